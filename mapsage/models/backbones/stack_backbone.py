"""Any backbone of MMSegmentation on scene stacks: date by date, or all dates as one image.

Dates are encoded separately and folded into the channels of each level, so that segmentors, feature
caches and exports see the (N, C, H, W) levels that they know. `TemporalPool` of the extra earth pools them.

Shapes: N stacks, T dates of a sensor, h x w cells of a level.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn
from torch.nn import functional

from mapsage.geo.stacks import StackLayout, StackLayoutError, day_of_year


@MODELS.register_module()
class StackBackbone(BaseModule):
    """Backbone that encodes every date of every sensor of a stack.

    With ``dates='separate'`` the output has the levels of the encoder, each (N, channels, h, w)
    with all sensors, dates and feature channels in this order, and one more level for the neck
    ``TemporalPool``: the share of valid pixels of each date in each cell, and its day of the year.
    That level is float32, whatever the encoder computes in: bfloat16 has the even days only from
    257 on.

    With ``dates='channels'`` the encoder sees one image of all bands of all dates and sensors, and
    the output has its levels only. This is the simple rival that any pooling has to beat.

    Args:
        sensors: Sensors as in ``SceneStackDataset``; only ``bands`` and ``max_dates`` are read.
        encoder: Config of a backbone that all sensors share, or a config for each sensor by its
            name. It needs as many input channels as the sensor has bands, or with
            ``dates='channels'`` as there are bands in all dates.
        dates: ``'separate'`` or ``'channels'``.
        frozen: Whether the encoders are not trained, so that their features can be cached.
        init_cfg: As in ``BaseModule``.

    Attributes:
        returns_facts: Whether the last level of the output is that of shares and days.

    Raises:
        StackLayoutError: If ``encoder`` does not fit the sensors or their bands, or ``dates`` is
            neither.
    """

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        encoder: Dict[str, Any],
        dates: str = 'separate',
        frozen: bool = False,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(init_cfg)
        self.layout = StackLayout.of_config(sensors)
        if dates not in ('separate', 'channels'):
            raise StackLayoutError(f"dates={dates!r}, expected 'separate' or 'channels'.")
        self.dates, self.returns_facts = dates, dates == 'separate'
        names = [sensor.name for sensor in self.layout.sensors]
        counts = {len(sensor.bands) for sensor in self.layout.sensors}
        if 'type' in encoder:
            if dates == 'separate' and len(counts) > 1:
                raise StackLayoutError(
                    f'one encoder for sensors with {sorted(counts)} bands; expected a config for '
                    f'each: encoder=dict({names[0]}=dict(type=...), ...).'
                )
            bands = (
                sum(len(sensor.bands) * sensor.max_dates for sensor in self.layout.sensors)
                if dates == 'channels'
                else counts.pop()
            )
            _check_bands(encoder, bands, 'all sensors')
            self.encoders = nn.ModuleDict(dict(shared=MODELS.build(encoder)))
        else:
            if set(encoder) != set(names) or dates == 'channels':
                raise StackLayoutError(
                    f'encoder has configs of {sorted(encoder)}, expected one '
                    f"config, or with dates='separate' those of {names}."
                )
            for sensor in self.layout.sensors:
                _check_bands(encoder[sensor.name], len(sensor.bands), f'sensor {sensor.name!r}')
            self.encoders = nn.ModuleDict({name: MODELS.build(encoder[name]) for name in names})

        self.frozen = frozen
        for parameter in self.parameters() if frozen else ():
            parameter.requires_grad = False

    def train(self, mode: bool = True) -> StackBackbone:
        """Set the mode of the module; frozen encoders stay in evaluation mode."""
        super().train(mode and not self.frozen)
        return self

    def forward(self, inputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the levels for the input of the model, (N, input_channels, H, W)."""
        if self.dates == 'channels':
            # Its check of the number of channels names the sensors.
            self.layout.split(inputs)
            return self._encode('shared', inputs[:, : self.layout.pixel_channels])
        stack = self.layout.split(inputs)
        levels: List[List[torch.Tensor]] = []
        for name, images in stack.sensors.items():
            count, dates, bands, height, width = images.pixels.shape
            encoder = 'shared' if 'shared' in self.encoders else name
            features = self._encode(encoder, images.pixels.reshape(-1, bands, height, width))
            levels.append([level.reshape(count, -1, *level.shape[2:]) for level in features])
        # Numbers, because an export traces sizes as tensors, which are never equal.
        sizes = {
            tuple(tuple(map(int, level.shape[2:])) for level in features) for features in levels
        }
        if len(sizes) > 1:
            raise StackLayoutError(
                f'the encoders of the sensors return levels of the sizes '
                f'{sorted(sizes)}, expected the same for all.'
            )
        joined = tuple(torch.cat(parts, 1) for parts in zip(*levels))
        valid = torch.cat([images.valid for images in stack.sensors.values()], 1)
        days = torch.cat([images.days for images in stack.sensors.values()], 1)
        return (*joined, _facts(valid, days, joined[0]))

    def _encode(self, name: str, images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        # Images keep float32 because of their days; the weights may have another dtype.
        parameter = next(filter(torch.is_floating_point, self.encoders[name].parameters()), images)
        features = self.encoders[name](images.to(parameter.dtype))
        return tuple(features) if isinstance(features, (tuple, list)) else (features,)


def _check_bands(encoder: Mapping[str, Any], bands: int, subject: str) -> None:
    """Raise an error if the encoder of a config takes another number of channels, if that is known."""
    kind = encoder['type']
    # As MODELS.build looks it up.
    with MODELS.switch_scope_and_registry(None) as registry:
        known = kind if inspect.isclass(kind) else registry.get(kind)
    # Classes such as ResNetV1c hand their arguments to a base class.
    defaults = [
        parameter.default
        for base in getattr(known, '__mro__', ())
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if name == 'in_channels'
    ]
    channels = encoder.get('in_channels', *defaults[:1]) if defaults else encoder.get('in_channels')
    if isinstance(channels, int) and channels != bands:
        raise StackLayoutError(
            f'the encoder of {subject}, {getattr(known, "__name__", kind)}, has in_channels='
            f'{channels}, expected {bands}, the number of bands; set in_channels={bands}.'
        )


def _facts(valid: torch.Tensor, days: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Return shares of valid pixels and days of the year, float32 (N, 2 * dates, h, w).

    Args:
        valid: Valid pixels, bool (N, dates, H, W).
        days: Day numbers, float32 (N, dates).
        level: A level of features, for the size.
    """
    height, width = level.shape[2:]
    shares = functional.interpolate(valid.to(torch.float32), (height, width), mode='area')
    is_known = (days > 0).to(torch.int32)
    planes = (day_of_year(days) * is_known).to(torch.float32)[:, :, None, None]
    return torch.cat([shares, planes.expand(-1, -1, height, width)], 1)
