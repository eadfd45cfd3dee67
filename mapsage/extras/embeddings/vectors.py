"""Vectors of embeddings: unit length, 8 bits, principal components.

The 8 bits are those of AlphaEarth Foundations and OlmoEarth: the square root of a component, in
steps of 1 / 127.5, so that small components keep their precision.

Shapes: C components of a vector, first in every array of vectors.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Dict, Mapping

import numpy as np

from .errors import EmbeddingError

NO_DATA = -128
"""Value of all components of a vector without data."""

# https://developers.google.com/earth-engine/guides/aef_on_gcs_readme, and quantize_embeddings in
# olmoearth_pretrain/evals.
_SCALE, _LARGEST = 127.5, 127
SCHEME = 'sign(q) * (abs(q) / 127.5) ** 2'
"""The inverse of :func:`quantize`, as files of embeddings say it."""

_SHORTEST = 1e-12


def quantize(vectors: np.ndarray) -> np.ndarray:
    """Return components of -1..1 as int8 of -127..127, in an array of the same shape."""
    steps = np.sqrt(np.abs(vectors)) * np.float32(_SCALE)
    return np.clip(np.rint(np.copysign(steps, vectors)), -_LARGEST, _LARGEST).astype(np.int8)


def dequantize(quantized: np.ndarray) -> np.ndarray:
    """Return the float32 components of int8 values, the inverse of :func:`quantize`.

    Components without data, -128, have no meaning.
    """
    # In integers, which are faster than a table; the result is that of SCHEME to the last bit.
    wide = quantized.astype(np.int16)
    wide *= np.abs(wide)
    return wide.astype(np.float32) / np.float32(_SCALE**2)


def to_unit(vectors: np.ndarray) -> np.ndarray:
    """Return (C, ...) vectors of length 1; a zero vector stays zero."""
    length = np.sqrt(np.einsum('c...,c...->...', vectors, vectors))
    return vectors / np.maximum(length, np.float32(_SHORTEST))


def halve(quantized: np.ndarray) -> np.ndarray:
    """Return (C, H, W) int8 vectors at half the resolution, the next overview of a file.

    A vector is the mean of up to four, with unit length again; one of AlphaEarth's overviews is the
    mean of all vectors of the file below it.

    Returns:
        ``(C, ceil(H / 2), ceil(W / 2))`` int8; no data where none of the four has data.
    """
    count, height, width = quantized.shape
    padding = (0, 0), (0, height % 2), (0, width % 2)
    padded = np.pad(quantized, padding, constant_values=NO_DATA)
    valid = padded[0] != NO_DATA
    boxes = np.where(valid, dequantize(padded), 0)
    total = sum(boxes[:, row::2, column::2] for row in range(2) for column in range(2))
    has_data = valid[::2, ::2] | valid[1::2, ::2] | valid[::2, 1::2] | valid[1::2, 1::2]
    return np.where(has_data, quantize(to_unit(np.asarray(total))), np.int8(NO_DATA))


@dataclass(frozen=True)
class Pca:
    """Principal components of the vectors of an encoder, about the origin.

    A component of the vectors is divided by the square root of its root mean square first: else
    the few with large values, of the first levels of a network, would make up the principal ones.
    No mean is subtracted, which would change the angles between vectors, by which classifiers go.
    `tools/benchmarks/embeddings.py choice` compares both.

    Attributes:
        components: ``(C, D)`` float32, what vectors are multiplied with.
        explained: Share of the squared length of the divided vectors that is left, 0..1.
        sample: What it was fitted on, for a user.
    """

    components: np.ndarray
    explained: float
    sample: str

    @classmethod
    def fit(cls, vectors: np.ndarray, dims: int, sample: str) -> Pca:
        """Return the components of (N, C) vectors.

        Raises:
            EmbeddingError: If ``dims`` is more than the vectors allow.
        """
        count, size = vectors.shape
        if dims > min(size, count):
            raise EmbeddingError(
                f'--dims {dims}: the encoder gives vectors of {size} components, and the sample '
                f'has {count} of them; expected at most {min(size, count)}.'
            )
        precise = vectors.astype(np.float64)
        sizes = np.sqrt((precise**2).mean(0))
        # A component that is 0 in the sample must not outweigh all others where it is not.
        divisors = np.sqrt(np.maximum(sizes, max(1e-3 * sizes.max(), _SHORTEST)))
        precise /= divisors
        lengths, directions = np.linalg.eigh(precise.T @ precise)
        components = directions[:, ::-1][:, :dims] / divisors[:, None]
        # A direction and its opposite are equally right, so the largest component decides.
        largest = np.abs(components).argmax(0)
        components = components * np.sign(components[largest, np.arange(dims)])
        explained = lengths[::-1][:dims].sum() / max(lengths.sum(), _SHORTEST)
        return cls(components.astype(np.float32), round(float(explained), 4), sample)

    def to_dict(self) -> Dict[str, Any]:
        """Return the components as JSON values: the array in base64 of little-endian float32."""
        packed = base64.b64encode(np.ascontiguousarray(self.components, '<f4').tobytes())
        return dict(
            components=packed.decode(),
            dims=self.components.shape[1],
            explained=self.explained,
            sample=self.sample,
        )

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], path: str) -> Pca:
        """Return the components that :meth:`to_dict` gave.

        Raises:
            EmbeddingError: If ``stored``, of the file ``path``, is something else.
        """
        try:
            values = np.frombuffer(base64.b64decode(stored['components'], validate=True), '<f4')
            components = values.reshape(-1, max(int(stored['dims']), 1)).astype(np.float32)
            pca = cls(components, float(stored['explained']), str(stored['sample']))
            if not len(components) or not np.isfinite(components).all():
                raise ValueError('no finite numbers')
        except (KeyError, TypeError, ValueError) as error:
            raise EmbeddingError(
                f'{path} holds no principal components that can be read ({error}); expected a file '
                f'of mapsage embed --dims.'
            ) from error
        return pca

    def key(self) -> str:
        """Return a short hash, which files of the same components have in common."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
