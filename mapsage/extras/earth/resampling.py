"""Bicubic interpolation as two small matrix products.

PyTorch 1.10 and several accelerators lack bicubic interpolation with antialiasing. Interpolation is
linear and separable, so a matrix for the rows and one for the columns give the same values on every
device. The matrices are computed on the host, once for each pair of sizes.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

# Coefficient of the bicubic kernel of PyTorch's interpolation with antialias=True, as in Pillow.
_ANTIALIAS_COEFFICIENT = -0.5


def resize_table(table: torch.Tensor, rows: int, columns: int, align_corners: bool) -> torch.Tensor:
    """Resize a table of position embeddings as ``F.interpolate(mode='bicubic')`` does.

    Args:
        table: float (..., H, W).
        rows: New number of rows.
        columns: New number of columns.
        align_corners: As in ``F.interpolate``.

    Returns:
        float (..., rows, columns).
    """
    if table.shape[-2:] == (rows, columns):
        return table
    return _apply(
        table,
        _table_matrix(table.shape[-2], rows, align_corners),
        _table_matrix(table.shape[-1], columns, align_corners),
    )


def enlarge(images: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Enlarge images as ``F.interpolate(mode='bicubic', antialias=True)`` does.

    Args:
        images: float (..., H, W).
        rows: New number of rows, at least H.
        columns: New number of columns, at least W.

    Returns:
        float (..., rows, columns).
    """
    if images.shape[-2:] == (rows, columns):
        return images
    return _apply(
        images,
        _antialias_matrix(images.shape[-2], rows),
        _antialias_matrix(images.shape[-1], columns),
    )


def _apply(images: torch.Tensor, for_rows: torch.Tensor, for_columns: torch.Tensor) -> torch.Tensor:
    return for_rows.to(images) @ images @ for_columns.to(images).t()


@functools.lru_cache(maxsize=64)
def _table_matrix(size: int, new_size: int, align_corners: bool) -> torch.Tensor:
    """Return the float32 matrix (new_size, size) of bicubic interpolation without antialiasing."""
    # Interpolating an identity matrix along its rows gives the weights. In float32, the coordinates
    # have the rounding errors that F.interpolate has.
    unit = torch.eye(size, dtype=torch.float32)[None, None]
    return F.interpolate(unit, (new_size, size), mode='bicubic', align_corners=align_corners)[0, 0]


@functools.lru_cache(maxsize=64)
def _antialias_matrix(size: int, new_size: int) -> torch.Tensor:
    """Return the float32 matrix (new_size, size) of an enlargement with antialiasing.

    Samples beyond the border get no weight, and the remaining weights are normalized, as in
    ``aten/src/ATen/native/cpu/UpSampleKernel.cpp``.
    """
    centers = (torch.arange(new_size, dtype=torch.float64) + 0.5) * (size / new_size) - 0.5
    distances = (centers[:, None] - torch.arange(size, dtype=torch.float64)).abs()
    weights = _cubic(distances)
    # Not every device has float64.
    return (weights / weights.sum(1, keepdim=True)).float()


def _cubic(distance: torch.Tensor) -> torch.Tensor:
    """Return Keys' cubic kernel (1981) at distances in samples."""
    a = _ANTIALIAS_COEFFICIENT
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(
        distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(distance))
    )
