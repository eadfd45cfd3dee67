"""What keeps a viewer from being shown."""
from __future__ import annotations

from mapsage.errors import UserError


class ViewError(UserError, ValueError):
    """A folder, a scene or a port that the viewer cannot use."""
