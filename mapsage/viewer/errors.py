"""What keeps a viewer from being shown."""
from __future__ import annotations


class ViewError(ValueError):
    """A folder, a scene or a port that the viewer cannot use."""
