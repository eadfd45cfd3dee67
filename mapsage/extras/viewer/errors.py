"""The error of the viewer, for a user's mistake with a folder, a scene or a port."""

from __future__ import annotations

from mapsage.base.errors import UserError


class ViewError(UserError, ValueError):
    """A folder, a scene or a port that the viewer cannot use."""
