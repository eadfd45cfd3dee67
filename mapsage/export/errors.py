"""What keeps a model from becoming a file that others can run."""
from __future__ import annotations


class ExportError(ValueError):
    """A model, a target or a set of tiles that an export cannot use."""
