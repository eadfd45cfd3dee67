"""The user error of this room, `ExportError`."""

from __future__ import annotations

from mapsage.base.errors import UserError


class ExportError(UserError, ValueError):
    """A model, a target or a set of tiles cannot be exported."""
