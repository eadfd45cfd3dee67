"""Attention over dates, as in U-TAE.

Source: `ltae.py` and `utae.py` of VSainteuf/utae-paps@987874e (L-TAE: Garnot & Landrieu 2020,
U-TAE: 2021), written anew with two differences. The statistics of the normalization, over the
channels of a head and the dates, leave out missing dates, and the position is the day of the year.

Shapes: N stacks, T dates, G heads, h x w cells of a level, C channels.
"""

from __future__ import annotations

import math
from typing import List, Sequence

import torch
from torch import nn
from torch.nn import functional

from mapsage.geo.stacks import StackLayoutError

# Score of a date without data before the softmax; exp(-1e4) is 0, and 16 bits can hold it.
_NO_SCORE = -1e4
_EPSILON = 1e-6
# Longest period of the positions in days, the constant of U-TAE.
_PERIOD = 1000.0
# Fewest channels of a head at the coarsest level, as U-TAE has at its finest. Where a cell has a
# single date, the normalization removes mean and scale of these channels: of one, nothing is left.
_FEWEST_CHANNELS = 4


class TemporalAttention(nn.Module):
    """Weights of dates in each cell, learned at the coarsest level and used at all levels.

    At the coarsest level, every head compares a learned query with keys of the dates; its values
    are its share of the channels. The weights, resized, sum the dates of the finer levels, where a
    head has the same share of the channels.

    Args:
        channels: Channels of each level, the coarsest last.
        heads: Number of heads; divides the channels of each level, and leaves 4 or more channels a
            head at the coarsest.
        key_channels: Channels of a key.
        width: Channels of values at the coarsest level; a multiple of ``heads``.
        dropout: Probability to drop a value.

    Raises:
        StackLayoutError: If a number of channels is no multiple of ``heads``, or too small.
    """

    def __init__(
        self,
        channels: Sequence[int],
        heads: int = 16,
        key_channels: int = 4,
        width: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if any(count % heads for count in (*channels, width)) or width // heads % 2:
            raise StackLayoutError(
                f'channels={list(channels)} and width={width} with heads={heads}, expected '
                'multiples of heads, and an even number of channels of width in a head.'
            )
        self.heads, self.key_channels, self.width = heads, key_channels, width
        last = channels[-1]
        if last < _FEWEST_CHANNELS * heads:
            raise StackLayoutError(
                f'heads={heads} and channels={list(channels)} leave {last // heads} channel(s) a '
                f'head at the coarsest level, which are normalized together; expected '
                f'{_FEWEST_CHANNELS} or more: at most {last // _FEWEST_CHANNELS} heads, '
                f'attention=dict(heads=...), or more channels.'
            )
        self.enter_norm = nn.GroupNorm(heads, last)
        self.enter = nn.Conv2d(last, width, 1)
        self.key = nn.Conv2d(width, heads * key_channels, 1)
        self.query = nn.Parameter(torch.empty(heads, key_channels))
        nn.init.normal_(self.query, std=math.sqrt(2 / key_channels))
        self.leave = nn.Sequential(
            nn.Conv2d(width, last, 1),
            nn.GroupNorm(heads, last),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.GroupNorm(heads, last),
        )

    def forward(
        self, levels: Sequence[torch.Tensor], shares: Sequence[torch.Tensor], days: torch.Tensor
    ) -> List[torch.Tensor]:
        """Return the levels without dates, (N, C, h, w) each.

        Args:
            levels: Features, (N, T, C, h, w) each, the coarsest last.
            shares: Share of valid pixels in the cells of each level, (N, T, h, w).
            days: Days of the year, float32 (N, T); 0 for a missing date.
        """
        count, dates, _, height, width = levels[-1].shape
        valid = (shares[-1] > 0)[:, :, None]
        values = self.enter(_normalize(self.enter_norm, levels[-1], valid).flatten(0, 1))
        position = self._positions(days).repeat(1, 1, self.heads).to(values)
        values = values + position.flatten(0, 1)[:, :, None, None]
        keys = self.key(values).reshape(count, dates, self.heads, -1, height, width)
        scores = (keys * self.query[:, :, None, None]).sum(3) / math.sqrt(self.key_channels)
        weights = scores.masked_fill(~valid, _NO_SCORE).softmax(1) * valid
        values = values.reshape(count, dates, self.heads, -1, height, width)
        pooled = (values * weights[:, :, :, None]).sum(1).flatten(1, 2)
        finer = [
            self._sum_dates(level, share, weights) for level, share in zip(levels[:-1], shares[:-1])
        ]
        # A cell without a valid date is 0 and not the bias of the layers.
        return [*finer, self.leave(pooled) * valid.any(1)]

    def _sum_dates(
        self, level: torch.Tensor, share: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return a finer level, summed over dates by resized weights, (N, C, h, w)."""
        count, dates, _, height, width = level.shape
        resized = functional.interpolate(
            weights.flatten(0, 1), (height, width), mode='bilinear', align_corners=False
        )
        resized = (
            resized.reshape(count, dates, self.heads, 1, height, width)
            * (share > 0)[:, :, None, None]
        )
        resized = resized / resized.sum(1, keepdim=True).clamp(min=_EPSILON)
        grouped = level.reshape(count, dates, self.heads, -1, height, width)
        return (grouped * resized).sum(1).flatten(1, 2)

    def _positions(self, days: torch.Tensor) -> torch.Tensor:
        """Return the positions of days for a head, (N, T, width / heads)."""
        size = self.width // self.heads
        # Not a buffer, which a model in 16 bits would round.
        pair = torch.div(torch.arange(size, device=days.device), 2, rounding_mode='floor')
        angles = days.float()[:, :, None] * _PERIOD ** -(2 * pair / size)
        is_sine = torch.arange(angles.shape[-1], device=angles.device) % 2 == 0
        return torch.where(is_sine, angles.sin(), angles.cos())


def _normalize(norm: nn.GroupNorm, features: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return features normalized over the channels of a group and the valid dates, cell by cell.

    Args:
        norm: Number of groups, and factors and offsets of channels.
        features: (N, T, C, h, w).
        valid: Cells with data, bool (N, T, 1, h, w).
    """
    count, dates, channels, height, width = features.shape
    grouped = features.reshape(count, dates, norm.num_groups, -1, height, width)
    weights = valid[:, :, None].to(features.dtype)
    # A cell without any date divides by 1.
    weights = weights / (weights.sum(1, keepdim=True).clamp(min=1) * grouped.shape[3])
    mean = (grouped * weights).sum((1, 3), keepdim=True)
    variance = ((grouped - mean).pow(2) * weights).sum((1, 3), keepdim=True)
    normalized = ((grouped - mean) / (variance + norm.eps).sqrt()).reshape(features.shape)
    return normalized * norm.weight[:, None, None] + norm.bias[:, None, None]
