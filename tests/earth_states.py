"""Weights, images and stacks for tests of the encoders for satellite images.

All values come from a formula, not from a random generator, so that every version of PyTorch and
every processor has the same ones.
"""

import datetime
import math
import re
import zlib
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import torch
from torch import nn

from mapsage.geo.stacks import StackLayout, day_number

# Names of this package and of the published files: (pattern, replacement).
OLMOEARTH = (
    (r'^(blocks|norm)\.', r'encoder.\1.'),
    (
        r'^patch_embed\.(\w+)\.channel$',
        r'encoder.composite_encodings.per_modality_channel_embeddings.\1',
    ),
    (
        r'^patch_embed\.(\w+)\.pixel_proj\.',
        r'encoder.patch_embeddings.per_modality_embeddings.\1.\1__0.pixel_proj.0.',
    ),
    (
        r'^patch_embed\.(\w+)\.proj\.',
        r'encoder.patch_embeddings.per_modality_embeddings.\1.\1__0.proj.',
    ),
)
TERRAMIND = (
    (r'^blocks\.', 'encoder.'),
    (r'^norm\.', 'encoder_norm.'),
    (r'^patch_embed\.S2L2A\.', 'encoder_embeddings.untok_sen2l2a@224.'),
    (r'^patch_embed\.S1GRD\.', 'encoder_embeddings.untok_sen1grd@224.'),
)


def rename(key: str, names: Sequence[Tuple[str, str]]) -> str:
    """Return a name after the replacement of patterns, one after the other."""
    for pattern, replacement in names:
        key = re.sub(pattern, replacement, key)
    return key


def waves(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Return values that look random, uniform in -1..1, float32."""
    count = math.prod(shape)
    angles = torch.arange(count, dtype=torch.float64) * 12.9898 + seed * 78.233
    return (2 * ((angles.sin() * 43758.5453) % 1) - 1).float().view(*shape)


def fill(model: nn.Module, name_of: Callable[[str], str] = str) -> nn.Module:
    """Give every parameter of a model values with the size of trained ones, by its name.

    Args:
        model: Model, changed in place.
        name_of: Name that determines the values, from the parameter's name in this model.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The encoders compute this table.
            if name.endswith('month_embed.weight'):
                continue
            values = waves(parameter.shape, zlib.crc32(name_of(name).encode()) % 10007)
            if parameter.dim() > 1:
                # Variance 1 / inputs, as trained layers have it, so that tokens stay near 1.
                values *= (3 / parameter[0].numel()) ** 0.5 if min(parameter.shape[:2]) > 1 else 0.5
            elif 'norm' in name and name.endswith('weight'):
                values = 1 + 0.3 * values
            else:
                values *= 0.3
            parameter.copy_(values)
    return model.eval()


def summarize(maps: Sequence[torch.Tensor]) -> Any:
    """Return a few numbers of maps (N, D, h, w): mean and mean size, and single features."""
    return [
        round(float(value), 5)
        for features in maps
        for value in (features.mean(), features.abs().mean(), *features[-1, ::37, 0, -1])
    ]


def images(
    layout: StackLayout,
    size: Sequence[int],
    center: Mapping[str, float],
    spread: Mapping[str, float],
    count: int = 2,
) -> torch.Tensor:
    """Return pixels of all sensors around ``center``, (N, pixel_channels, H, W)."""
    parts = []
    for seed, sensor in enumerate(layout.sensors):
        shape = (count, sensor.max_dates * len(sensor.bands), *size)
        parts.append(center[sensor.name] + spread[sensor.name] * waves(shape, seed + 900))
    return torch.cat(parts, 1)


def stack(
    layout: StackLayout,
    pixels: torch.Tensor,
    dates: Mapping[str, Sequence[Any]],
    missing: Sequence[Any] = (),
    site: Any = (11.5, 48.1),
) -> torch.Tensor:
    """Return the input of a model.

    Args:
        layout: Sensors.
        pixels: (N, pixel_channels, H, W).
        dates: Dates of each sensor, as ``(year, month, day)``.
        missing: (sample, sensor, date index) of missing dates.
        site: Longitude and latitude of all samples; None if unknown.
    """
    count = len(pixels)
    valid = torch.ones(count, layout.dates, *pixels.shape[2:])
    days = torch.tensor(
        [
            [
                float(day_number(datetime.date(*date)))
                for sensor in layout.sensors
                for date in dates[sensor.name]
            ]
        ]
    ).repeat(count, 1)
    first: Dict[str, int] = {}
    for sensor in layout.sensors:
        first[sensor.name] = sum(
            first_sensor.max_dates for first_sensor in layout.sensors if first_sensor.name in first
        )
    for sample, name, date in missing:
        valid[sample, first[name] + date] = 0
        days[sample, first[name] + date] = 0
    sites = None if site is None else torch.tensor([site]).repeat(count, 1)
    return layout.add_planes(torch.cat([pixels, valid], 1), days, sites)
