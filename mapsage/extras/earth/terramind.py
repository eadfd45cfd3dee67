"""TerraMind v1 in plain PyTorch: the tokens of all sensors of a date in one sequence.

TerraMind knows no dates, so every date is encoded by itself and the features are averaged.

Shapes as in ``encoder.py``; K = h * w tokens of each sensor.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mapsage.geo.stacks import StackLayout
from mapsage.models.backbones.attention import Attention, PreNormBlock, attend_to_any
from mapsage.models.backbones.weight_files import State
from mapsage.models.weight_license import WeightsLicense

from .encoder import (
    EarthEncoder,
    PreparedSensor,
    PreparedStack,
    mean_over_valid,
    parse_arch,
    valid_cells,
)
from .published_weights import PublishedNames
from .resampling import resize_table
from .sensors import (
    BYTES,
    DECIBEL,
    OTHER,
    REFLECTANCE,
    SENTINEL2_ALIASES,
    PublishedSensor,
    match_sensors,
)

_PATCH = 16
# Cells on a side of the table of positions, of an image of 224 pixels.
_GRID = 14


class TerraMindArch(NamedTuple):
    """Structure of a TerraMind encoder."""

    embed_dims: int
    num_layers: int
    num_heads: int


# Source: terratorch 1.2.13, backbones/terramind/model/terramind_register.py.
ARCHS: Dict[str, TerraMindArch] = {
    'tiny': TerraMindArch(192, 12, 3),
    'small': TerraMindArch(384, 12, 6),
    'base': TerraMindArch(768, 12, 12),
    'large': TerraMindArch(1024, 24, 16),
}

# Source: v1_pretraining_mean and v1_pretraining_std of the same file.
SENSORS: Dict[str, PublishedSensor] = {
    'S2L2A': PublishedSensor(
        ('B01', 'B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B09', 'B11', 'B12'),
        (
            1390.458,
            1503.317,
            1718.197,
            1853.91,
            2199.1,
            2779.975,
            2987.011,
            3083.234,
            3132.22,
            3162.988,
            2424.884,
            1857.648,
        ),
        (
            2106.761,
            2141.107,
            2038.973,
            2134.138,
            2085.321,
            1889.926,
            1820.257,
            1871.918,
            1753.829,
            1797.379,
            1434.261,
            1334.311,
        ),
        REFLECTANCE,
        SENTINEL2_ALIASES,
    ),
    'S2L1C': PublishedSensor(
        ('B01', 'B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B09', 'B10', 'B11', 'B12'),
        (
            2357.089,
            2137.385,
            2018.788,
            2082.986,
            2295.651,
            2854.537,
            3122.849,
            3040.56,
            3306.481,
            1473.847,
            506.07,
            2472.825,
            1838.929,
        ),
        (
            1624.683,
            1675.806,
            1557.708,
            1833.702,
            1823.738,
            1733.977,
            1732.131,
            1679.732,
            1727.26,
            1024.687,
            442.165,
            1331.411,
            1160.419,
        ),
        REFLECTANCE,
        SENTINEL2_ALIASES,
    ),
    'RGB': PublishedSensor(
        ('red', 'green', 'blue'),
        (87.271, 80.931, 66.667),
        (58.767, 47.663, 42.631),
        BYTES,
        {'R': 'RED', 'G': 'GREEN', 'B': 'BLUE'},
    ),
    'S1GRD': PublishedSensor(('vv', 'vh'), (-12.599, -20.293), (5.195, 5.890), DECIBEL),
    'S1RTC': PublishedSensor(('vv', 'vh'), (-10.93, -17.329), (4.391, 4.459), DECIBEL),
    'DEM': PublishedSensor(('dem',), (670.665,), (951.272,), OTHER),
}
_ALIASES = {
    's2': 'S2L2A',
    's2l2a': 'S2L2A',
    's2l1c': 'S2L1C',
    's1': 'S1GRD',
    's1grd': 'S1GRD',
    's1rtc': 'S1RTC',
    'dem': 'DEM',
    'rgb': 'RGB',
}
_FILE_NAMES = {
    'S2L2A': 'sen2l2a',
    'S2L1C': 'sen2l1c',
    'RGB': 'sen2rgb',
    'S1GRD': 'sen1grd',
    'S1RTC': 'sen1rtc',
    'DEM': 'dem',
}


class UnbiasedNorm(nn.Module):
    """Layer norm without a learned bias; the files contain one of zeros."""

    bias: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.register_buffer('bias', torch.zeros(channels))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normalize tokens, (..., channels)."""
        return F.layer_norm(tokens, self.weight.shape, self.weight, self.bias, 1e-6)


class UnbiasedGatedMlp(nn.Module):
    """Feed-forward network in which ``fc1`` gates ``fc3``, without biases."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = int(2 * 4 * channels / 3)
        self.fc1 = nn.Linear(channels, inner, bias=False)
        self.fc2 = nn.Linear(inner, channels, bias=False)
        self.fc3 = nn.Linear(channels, inner, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens, (..., channels)."""
        return self.fc2(F.silu(self.fc1(tokens)) * self.fc3(tokens))


class PatchEmbedding(nn.Module):
    """Embedding of the patches of a sensor, with its positions and its learned vector."""

    pos_emb: torch.Tensor

    def __init__(self, channels: int, bands: int) -> None:
        super().__init__()
        self.proj = nn.Linear(bands * _PATCH**2, channels, bias=False)
        self.mod_emb = nn.Parameter(torch.randn(1, 1, channels) * 0.02)
        self.register_buffer('pos_emb', _position_table(channels))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return tokens (N, K, D) of pixels (N, C, H, W)."""
        count, bands, height, width = pixels.shape
        rows, columns = height // _PATCH, width // _PATCH
        patches = pixels.view(count, bands, rows, _PATCH, columns, _PATCH)
        tokens = self.proj(patches.permute(0, 2, 4, 3, 5, 1).reshape(count, rows * columns, -1))
        table = self.pos_emb.float().transpose(1, 2).view(-1, _GRID, _GRID)
        positions = resize_table(table, rows, columns, align_corners=False).flatten(1).t()
        return tokens + positions.to(self.mod_emb.dtype) + self.mod_emb


@MODELS.register_module()
class TerraMind(EarthEncoder):
    """TerraMind v1 encoder, which returns maps that are means over all dates and sensors.

    Sensors, with their bands and units: ``S2L2A`` and ``S2L1C`` (digital numbers, 0..10000),
    ``RGB`` (red, green, blue; 0..255), ``S1GRD`` and ``S1RTC`` (vv, vh; decibel) and ``DEM``
    (meters). A missing band is 0 after the normalization, which is the same as TerraTorch's removal
    of its weights; missing dates and pixels are masked. If sensors have several dates, each date of
    the sensor with the most dates is combined with the nearest date of the others.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint='.../TerraMind_v1_base.pt')``.

    Source: terratorch 1.2.13; https://arxiv.org/abs/2504.11171.

    Args:
        sensors: Sensors of the config, as in the dataset: ``bands`` and ``max_dates`` by name.
        arch: Name 'tiny', 'small', 'base' or 'large', or a dict of ``embed_dims, num_layers,
            num_heads``.
        out_indices: Indices of the blocks whose output is returned; by default four evenly spaced
            ones. The last block's output is normed.
        frozen: Whether to freeze everything.
        modalities: Name of the encoder's sensor by the config's name, such as
            ``dict(radar='S1RTC')``; s2 stands for S2L2A, and s1 for S1GRD.
        init_cfg: Config of the weights.

    Raises:
        EarthSensorError: If a sensor or a band is unknown.
        ValueError: If another argument is out of its range.
    """

    embedding_names = ('patch_embed.',)
    weights_origin = (
        'The published files are at https://huggingface.co/ibm-esa-geospatial '
        '(TerraMind-1.0-tiny, -small, -base, -large): TerraMind_v1_<size>.pt.'
    )
    weights_license = WeightsLicense('Apache-2.0', 'https://huggingface.co/ibm-esa-geospatial')

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        arch: Union[str, Dict[str, Any]] = 'base',
        out_indices: Optional[Sequence[int]] = None,
        frozen: bool = False,
        modalities: Optional[Dict[str, str]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.arch = parse_arch(arch, ARCHS, TerraMindArch)
        layout = StackLayout.of_config(sensors)
        super().__init__(
            layout,
            match_sensors(layout, SENSORS, _ALIASES, modalities, 'TerraMind'),
            self.arch.embed_dims,
            self.arch.num_layers,
            _PATCH,
            out_indices,
            frozen,
            init_cfg,
        )
        self.patch_embed = nn.ModuleDict(
            {
                sensor.published_name: PatchEmbedding(self.embed_dims, len(sensor.published.bands))
                for sensor in self.sensors
            }
        )
        self.blocks = nn.ModuleList(
            PreNormBlock(
                self.embed_dims,
                Attention(self.embed_dims, self.arch.num_heads, False),
                UnbiasedGatedMlp(self.embed_dims),
                UnbiasedNorm,
            )
            for _ in range(self.out_indices[-1] + 1)
        )
        self.norm = UnbiasedNorm(self.embed_dims) if self.is_whole else nn.Identity()
        self.finish()

    def encode(self, stack: PreparedStack) -> List[torch.Tensor]:
        """Return the feature maps, float (N, D, h, w), of the blocks of ``out_indices``."""
        sensors = align_dates(stack.sensors)
        count, dates, _, height, width = sensors[0].pixels.shape
        rows, columns = height // _PATCH, width // _PATCH
        tokens = torch.cat(
            [self.patch_embed[sensor.name](sensor.pixels.flatten(0, 1)) for sensor in sensors], 1
        )
        # (N, T, sensors, h, w)
        valid = torch.stack([valid_cells(sensor.valid, rows, columns) for sensor in sensors], 2)
        mask = None if stack.complete else attend_to_any(valid.flatten(0, 1).flatten(1))
        maps = []
        for output in self.run_blocks(tokens, mask):
            features = output.view(count, dates, len(sensors), rows, columns, -1)
            maps.append(mean_of_means(features.permute(0, 1, 2, 5, 3, 4), valid))
        return maps

    def published_names(self, state: State, path: str) -> PublishedNames:
        """Return the names of the tensors in a published file."""
        used = {
            f'untok_{_FILE_NAMES[sensor.published_name]}@224': sensor.published_name
            for sensor in self.sensors
        }
        return PublishedNames(
            [
                *(
                    (rf'^encoder_embeddings\.{name}\.', f'patch_embed.{ours}.')
                    for name, ours in used.items()
                ),
                (r'^encoder\.(\d+)\.', r'blocks.\1.'),
                (r'^encoder_norm\.', 'norm.'),
            ],
            [
                (r'decoder|mask_token|register_tokens$', 'the decoder'),
                (rf'encoder_embeddings\.(?!({"|".join(used)})\.)', 'sensors not in the config'),
            ],
        )


def align_dates(sensors: Sequence[PreparedSensor]) -> List[PreparedSensor]:
    """Return sensors with the same number of dates, of which those of one index are close.

    The dates are those of the sensor with the most dates, and of several such sensors of the one
    with the most bands. Every other sensor gives each of them its nearest date; a sensor that has
    only missing dates stays missing.

    Args:
        sensors: Prepared sensors.
    """
    longest = max(sensors, key=lambda sensor: (sensor.days.shape[1], sensor.pixels.shape[2]))
    aligned = []
    for sensor in sensors:
        if sensor is longest or longest.days.shape[1] == 1:
            aligned.append(sensor)
            continue
        distance = (longest.days[:, :, None] - sensor.days[:, None]).abs()
        is_missing = ~sensor.valid.flatten(2).any(2)
        distance = distance + is_missing[:, None].to(distance.dtype) * 1e6
        nearest = distance.argmin(2)
        batch = torch.arange(nearest.shape[0], device=nearest.device)[:, None]
        aligned.append(
            sensor._replace(
                pixels=sensor.pixels[batch, nearest],
                valid=sensor.valid[batch, nearest],
                days=sensor.days[batch, nearest],
            )
        )
    return aligned


def mean_of_means(features: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the mean over valid dates of the means over valid sensors, (N, D, h, w).

    Args:
        features: float (N, T, S, D, h, w) of S sensors.
        valid: bool (N, T, S, h, w).
    """
    count, dates = valid.shape[:2]
    of_dates = mean_over_valid(features.flatten(0, 1), valid.flatten(0, 1))
    return mean_over_valid(of_dates.view(count, dates, *of_dates.shape[1:]), valid.any(2))


def _position_table(channels: int) -> torch.Tensor:
    """Return the table of positions (1, K, channels): sine and cosine of row, then of column.

    The source names them w and h, but its first axis is the slower one.
    """
    quarter = channels // 4
    frequencies = 1 / 10000 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = torch.arange(_GRID, dtype=torch.float32)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    row = waves[:, None].expand(-1, _GRID, -1)
    column = waves[None].expand(_GRID, -1, -1)
    return torch.cat([row, column], -1).reshape(1, _GRID**2, channels)
