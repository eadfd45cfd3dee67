"""Attention over dates, as in U-TAE.

Source: `ltae.py` and `utae.py` of VSainteuf/utae-paps@987874e (L-TAE: Garnot & Landrieu 2020,
U-TAE: 2021), written anew with two differences. Features are normalized date by date, so that a
missing date does not change the others, and the position is the day of the year.

Shapes: N stacks, T dates, G heads, h x w cells of a level, C channels.
"""
from __future__ import annotations

import math
from typing import List, Sequence

import torch
from torch import nn
from torch.nn import functional

from mapsage.stacks import StackLayoutError

# Score of a date without data before the softmax; exp(-1e4) is 0, and 16 bits can hold it.
_NO_SCORE = -1e4
_EPSILON = 1e-6
# Longest period of the positions in days, the constant of U-TAE.
_PERIOD = 1000.


class TemporalAttention(nn.Module):
    """Weights of dates in each cell, learned at the coarsest level and used at all levels.

    At the coarsest level, every head compares a learned query with keys of the dates; its values
    are its share of the channels. The weights, resized, sum the dates of the finer levels, where a
    head has the same share of the channels.

    Args:
        channels: Channels of each level, the coarsest last.
        heads: Number of heads; divides the channels of each level.
        key_channels: Channels of a key.
        width: Channels of values at the coarsest level; a multiple of ``heads``.
        dropout: Probability to drop a value.

    Raises:
        StackLayoutError: If a number of channels is no multiple of ``heads``.
    """

    _rates: torch.Tensor

    def __init__(self, channels: Sequence[int], heads: int = 16, key_channels: int = 4,
                 width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        if any(count % heads for count in (*channels, width)) or width // heads % 2:
            raise StackLayoutError(
                f'channels={list(channels)} and width={width} with heads={heads}, expected '
                'multiples of heads, and an even number of channels of width in a head.')
        self.heads, self.key_channels, self.width = heads, key_channels, width
        last = channels[-1]
        self.enter_norm = nn.GroupNorm(heads, last)
        self.enter = nn.Conv2d(last, width, 1)
        self.key = nn.Conv2d(width, heads * key_channels, 1)
        self.query = nn.Parameter(torch.empty(heads, key_channels))
        nn.init.normal_(self.query, std=math.sqrt(2 / key_channels))
        self.leave = nn.Sequential(nn.Conv2d(width, last, 1), nn.GroupNorm(heads, last), nn.ReLU(),
                                   nn.Dropout(dropout), nn.GroupNorm(heads, last))
        size = width // heads
        rates = _PERIOD ** -(2 * torch.div(torch.arange(size), 2, rounding_mode='floor') / size)
        self.register_buffer('_rates', rates, False)

    def forward(self, levels: Sequence[torch.Tensor], shares: Sequence[torch.Tensor],
                days: torch.Tensor) -> List[torch.Tensor]:
        """Return the levels without dates, (N, C, h, w) each.

        Args:
            levels: Features, (N, T, C, h, w) each, the coarsest last.
            shares: Share of valid pixels in the cells of each level, (N, T, h, w).
            days: Days of the year, (N, T); 0 for a missing date.
        """
        count, dates, _, height, width = levels[-1].shape
        values = self.enter(_normalize(self.enter_norm, levels[-1].flatten(0, 1)))
        position = self._positions(days).repeat(1, 1, self.heads).to(values)
        values = values + position.flatten(0, 1)[:, :, None, None]
        keys = self.key(values).reshape(count, dates, self.heads, -1, height, width)
        scores = (keys * self.query[:, :, None, None]).sum(3) / math.sqrt(self.key_channels)
        valid = (shares[-1] > 0)[:, :, None]
        weights = scores.masked_fill(~valid, _NO_SCORE).softmax(1) * valid
        values = values.reshape(count, dates, self.heads, -1, height, width)
        pooled = (values * weights[:, :, :, None]).sum(1).flatten(1, 2)
        finer = [self._sum_dates(level, share, weights)
                 for level, share in zip(levels[:-1], shares[:-1])]
        # A cell without a valid date is 0 and not the bias of the layers.
        return [*finer, self.leave(pooled) * valid.any(1)]

    def _sum_dates(self, level: torch.Tensor, share: torch.Tensor, weights: torch.Tensor
                   ) -> torch.Tensor:
        """Return a finer level, summed over dates by resized weights, (N, C, h, w)."""
        count, dates, _, height, width = level.shape
        resized = functional.interpolate(weights.flatten(0, 1), (height, width), mode='bilinear',
                                         align_corners=False)
        resized = resized.reshape(count, dates, self.heads, 1, height, width) \
            * (share > 0)[:, :, None, None]
        resized = resized / resized.sum(1, keepdim=True).clamp(min=_EPSILON)
        grouped = level.reshape(count, dates, self.heads, -1, height, width)
        return (grouped * resized).sum(1).flatten(1, 2)

    def _positions(self, days: torch.Tensor) -> torch.Tensor:
        """Return the positions of days for a head, (N, T, width / heads)."""
        angles = days.float()[:, :, None] * self._rates
        is_sine = torch.arange(angles.shape[-1], device=angles.device) % 2 == 0
        return torch.where(is_sine, angles.sin(), angles.cos())


def _normalize(norm: nn.GroupNorm, features: torch.Tensor) -> torch.Tensor:
    """Return features (M, C, h, w) normalized over the channels of a group, cell by cell."""
    images, channels, height, width = features.shape
    grouped = features.reshape(images, norm.num_groups, -1, height, width)
    mean = grouped.mean(2, keepdim=True)
    variance = (grouped - mean).pow(2).mean(2, keepdim=True)
    normalized = ((grouped - mean) / (variance + norm.eps).sqrt()).reshape(
        images, channels, height, width)
    return normalized * norm.weight[:, None, None] + norm.bias[:, None, None]
