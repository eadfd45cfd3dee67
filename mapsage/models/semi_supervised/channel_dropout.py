"""Complementary channel dropout: each of two views keeps the channels that the other view drops.

The factors are drawn on the CPU, so a run draws the same ones on any device.

Yang et al. 2024 (UniMatch V2), https://arxiv.org/abs/2410.10777.

Shapes: N images, C channels of a level, H x W cells of its feature map.
"""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

import torch

# Share of the images whose two views keep all channels.
_UNTOUCHED = 0.5


def channel_factors(images: int, channels: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Draw the channel factors of both views from torch's CPU generator, float (N, C) on the CPU.

    A channel has the factor 0 in one view and 2 in the other, with equal probability. For half of
    the images, rounded down, all factors are 1.
    """
    first = torch.randint(0, 2, (images, channels)).float() * 2
    untouched = torch.randperm(images)[:int(images * _UNTOUCHED)]
    first[untouched] = 1.
    return first, 2 - first


def drop_channels(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
                  ) -> Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...]]:
    """Drop complementary channels of two views.

    Levels with the same number of channels drop the same ones.

    Args:
        first: Features of the first view, one (N, C, H, W) per level.
        second: Features of the second view, of the same shapes.
    """
    # By number of channels: the factors of the first and of the second view.
    factors: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
    for level in first:
        if level.shape[1] not in factors:
            factors[level.shape[1]] = channel_factors(len(level), level.shape[1])
    views = []
    for index, view in enumerate((first, second)):
        views.append(tuple(
            level * factors[level.shape[1]][index].to(level.device, level.dtype)[..., None, None]
            for level in view))
    return views[0], views[1]
