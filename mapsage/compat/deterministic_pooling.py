"""Pool adaptively on CUDA in deterministic mode, as the heads of UPerNet and PSPNet do.

Gap: with ``randomness.deterministic=True`` PyTorch (1.10 to 2.14) refuses the backward pass of
``adaptive_avg_pool2d`` on CUDA, because its kernel adds the gradients of overlapping windows in any
order. Bilinear upsampling, which was refused too, has a deterministic path in newer versions.
Remove when: tests/cuda/test_deterministic_training.py passes without this file.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch._jit_internal import BroadcastingList2  # type: ignore[attr-defined]
from torch.nn import functional

_adaptive_avg_pool2d = functional.adaptive_avg_pool2d


def _deterministic_pool(input: torch.Tensor, output_size: BroadcastingList2[int]) -> torch.Tensor:
    # TorchScript must not compile the deterministic path, as in PyTorch's own interpolate().
    if not torch.jit.is_scripting():
        if input.is_cuda and input.requires_grad and torch.are_deterministic_algorithms_enabled():
            return _pool(input, output_size)
    return _adaptive_avg_pool2d(input, output_size)


def _pool(
    input: torch.Tensor, output_size: Union[int, Tuple[Optional[int], Optional[int]]]
) -> torch.Tensor:
    sides = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * 2
    if tuple(sides) == (1, 1):
        # A mean over all pixels, which is deterministic in PyTorch.
        return _adaptive_avg_pool2d(input, output_size)
    # All windows in one row of the output have equal height, so the mean over a window is the mean
    # of its rows' means.
    return _pool_side(_pool_side(input, -2, sides[0]), -1, sides[1])


def _pool_side(input: torch.Tensor, dim: int, count: Optional[int]) -> torch.Tensor:
    """Return the means over ``count`` windows along ``dim``; None keeps the size."""
    size = input.shape[dim]
    if count is None or count == size:
        return input
    starts = [index * size // count for index in range(count)]
    ends = [-(-(index + 1) * size // count) for index in range(count)]
    return torch.cat(
        [
            input.narrow(dim, start, end - start).mean(dim, keepdim=True)
            for start, end in zip(starts, ends)
        ],
        dim,
    )


def apply() -> None:
    """Replace PyTorch's function if PyTorch is built for CUDA."""
    if torch.version.cuda is not None:
        functional.adaptive_avg_pool2d = _deterministic_pool
