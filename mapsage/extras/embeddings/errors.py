"""The user error of this extra, `EmbeddingError`."""

from __future__ import annotations

from mapsage.base.errors import UserError


class EmbeddingError(UserError, ValueError):
    """Embeddings cannot be computed, read or classified."""
