"""Pooling of the features of several dates and sensors, the neck behind ``StackBackbone``.

All shapes are fixed: a date that is missing, or clouded in a cell, has the weight 0 there. A cell
without any valid date is 0, never NaN.

Shapes: N stacks, T dates of a sensor, h x w cells of a level, C channels of a date.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn
from torch.nn import functional

from mapsage.geo.stacks import StackLayout, StackLayoutError

from .temporal_attention import TemporalAttention

Channels = Union[Sequence[int], Mapping[str, Sequence[int]]]

_POOLS = ('mean', 'max', 'concat', 'attention')
# Smallest weight by which a sum is divided; shares of valid pixels are multiples of 1 / cell area.
_EPSILON = 1e-6


@MODELS.register_module()
class TemporalPool(BaseModule):
    """Neck that pools the dates of each sensor, and joins the sensors.

    Args:
        sensors: As in ``StackBackbone``.
        channels: Channels of each level of a date, such as ``[64, 128, 256, 512]``; or these by
            sensor, if the sensors have different encoders.
        pool: ``'mean'``: mean over dates, weighted by the share of valid pixels in a cell.
            ``'max'``: largest value among the dates with a valid pixel in the cell. ``'concat'``:
            channels of all dates. ``'attention'``: learned weights, see ``TemporalAttention``.
        fuse: How sensors are joined: ``'concat'`` for their channels, or ``'mean'`` over the
            sensors that have data in a cell; their channels must be equal.
        attention: Arguments of ``TemporalAttention``.
        init_cfg: As in ``BaseModule``.

    Attributes:
        out_channels: Channels of each level of the output, which the decode head takes.

    Raises:
        StackLayoutError: If an argument has another value, or channels do not fit.
    """

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        channels: Channels,
        pool: str = 'mean',
        fuse: str = 'concat',
        attention: Optional[Dict[str, Any]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(init_cfg)
        self.layout = StackLayout.of_config(sensors)
        if pool not in _POOLS or fuse not in ('concat', 'mean'):
            raise StackLayoutError(
                f'pool={pool!r} and fuse={fuse!r}, expected one of {_POOLS}, '
                "and 'concat' or 'mean'."
            )
        self.pool, self.fuse = pool, fuse
        names = [sensor.name for sensor in self.layout.sensors]
        by_sensor = (
            dict(channels) if isinstance(channels, Mapping) else dict.fromkeys(names, channels)
        )
        if set(by_sensor) != set(names) or len({len(by_sensor[name]) for name in names}) != 1:
            raise StackLayoutError(
                f'channels={channels!r}, expected as many levels for each of {names}.'
            )
        self.channels = {name: tuple(by_sensor[name]) for name in names}
        pooled = [
            [
                count * (sensor.max_dates if pool == 'concat' else 1)
                for count in self.channels[sensor.name]
            ]
            for sensor in self.layout.sensors
        ]
        if fuse == 'mean' and any(levels != pooled[0] for levels in pooled):
            raise StackLayoutError(
                f"fuse='mean' of sensors with the channels {pooled}, expected "
                "the same for all; fuse='concat' joins any."
            )
        self.out_channels = (
            pooled[0] if fuse == 'mean' else [sum(counts) for counts in zip(*pooled)]
        )
        if pool == 'attention':
            self.attention = nn.ModuleDict(
                {
                    name: TemporalAttention(self.channels[name], **(attention or {}))
                    for name in names
                }
            )

    def forward(self, inputs: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """Return the pooled levels.

        Args:
            inputs: Output of ``StackBackbone``: levels of dates folded into channels, and the level
                of valid shares and days.
        """
        *levels, facts = inputs
        self._check(levels, facts)
        dates = self.layout.dates
        shares, days = facts[:, :dates], facts[:, dates:, :1, :1].flatten(1)
        sensors: List[List[torch.Tensor]] = []
        weights: List[List[torch.Tensor]] = []
        date, first = 0, [0] * len(levels)
        for sensor in self.layout.sensors:
            features, level_shares = [], []
            for number, level in enumerate(levels):
                channels = self.channels[sensor.name][number]
                end = first[number] + sensor.max_dates * channels
                features.append(
                    level[:, first[number] : end].reshape(
                        level.shape[0], sensor.max_dates, channels, *level.shape[2:]
                    )
                )
                level_shares.append(
                    _resize_shares(shares[:, date : date + sensor.max_dates], level)
                )
                first[number] = end
            sensors.append(
                self._pool(
                    sensor.name, features, level_shares, days[:, date : date + sensor.max_dates]
                )
            )
            weights.append([share.amax(1, keepdim=True) for share in level_shares])
            date += sensor.max_dates
        if self.fuse == 'concat':
            return tuple(torch.cat(parts, 1) for parts in zip(*sensors))
        return tuple(
            _weighted_mean(torch.stack(parts, 1), torch.stack(shares, 1))
            for parts, shares in zip(zip(*sensors), zip(*weights))
        )

    def _pool(
        self,
        name: str,
        features: List[torch.Tensor],
        shares: List[torch.Tensor],
        days: torch.Tensor,
    ) -> List[torch.Tensor]:
        """Return the levels of a sensor without dates.

        Args:
            name: Name of the sensor.
            features: Levels (N, T, C, h, w).
            shares: Shares of valid pixels for each level, (N, T, h, w).
            days: Days of the year, (N, T).
        """
        if self.pool == 'attention':
            return self.attention[name](features, shares, days)
        if self.pool == 'mean':
            return [
                _weighted_mean(level, share[:, :, None]) for level, share in zip(features, shares)
            ]
        if self.pool == 'max':
            return [
                _masked_max(level, share[:, :, None] > 0) for level, share in zip(features, shares)
            ]
        return [level.flatten(1, 2) for level in features]

    def _check(self, levels: Sequence[torch.Tensor], facts: torch.Tensor) -> None:
        expected = [
            sum(
                sensor.max_dates * self.channels[sensor.name][number]
                for sensor in self.layout.sensors
            )
            for number in range(len(self.channels[self.layout.sensors[0].name]))
        ]
        channels = [int(level.shape[1]) for level in levels]
        if channels != expected or facts.shape[1] != 2 * self.layout.dates:
            raise StackLayoutError(
                f'levels with {channels} channels and {int(facts.shape[1])} facts, expected '
                f'{expected} and {2 * self.layout.dates} for {self.layout} and channels='
                f"{self.channels}. Backbone: StackBackbone(dates='separate') with the same "
                'sensors.'
            )


def _resize_shares(shares: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Return shares in the size and the dtype of a level."""
    if shares.shape[2:] != level.shape[2:]:
        shares = functional.interpolate(shares, level.shape[2:], mode='area')
    return shares.to(level.dtype)


def _weighted_mean(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over dimension 1; 0 where all weights are 0."""
    total = weights.sum(1).clamp(min=_EPSILON)
    return (features * weights).sum(1) / total


def _masked_max(features: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the largest valid value over dimension 1; 0 where none is valid."""
    lowest = torch.finfo(features.dtype).min
    largest = features.masked_fill(~valid, lowest).amax(1)
    return largest.masked_fill(~valid.any(1), 0)
