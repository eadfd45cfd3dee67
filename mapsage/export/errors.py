"""What keeps a model from becoming a file that others can run."""
from __future__ import annotations

from mapsage.errors import UserError


class ExportError(UserError, ValueError):
    """A model, a target or a set of tiles that an export cannot use."""
