"""Complementary channel dropout: what one view of the features lacks, the other has.

Yang et al. 2024 (UniMatch V2), https://arxiv.org/abs/2410.10777.
"""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

import torch

_UNTOUCHED = 0.5  # share of the pairs that are left as they are


def channel_factors(images: int, channels: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the channels of both views, float (N, C), in host memory.

    They are 0 or 2 with equal probability, and sum up to 2; both are 1 for half of the pairs,
    rounded down. All is drawn from torch's CPU generator.
    """
    one = torch.randint(0, 2, (images, channels)).float() * 2
    untouched = torch.randperm(images)[:int(images * _UNTOUCHED)]
    one[untouched] = 1.
    return one, 2 - one


def drop_channels(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
                  ) -> Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...]]:
    """Return two views of features, each without the channels that the other keeps.

    Levels of equal width lose the same channels.

    Args:
        first: Features of the first view, a (N, C, H, W) a level.
        second: Those of the second view, of the same shapes.
    """
    drawn: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
    for level in first:
        if level.shape[1] not in drawn:
            drawn[level.shape[1]] = channel_factors(len(level), level.shape[1])
    views = []
    for number, view in enumerate((first, second)):
        views.append(tuple(
            level * drawn[level.shape[1]][number].to(level.device, level.dtype)[..., None, None]
            for level in view))
    return views[0], views[1]
