"""Prithvi-EO-2.0 in plain PyTorch: all dates in one sequence, with date and site as numbers.

Shapes as in ``encoder.py``.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from mmengine.registry import MODELS
from torch import nn

from mapsage.geo.stacks import NO_DAY, StackLayout, calendar, day_of_year
from mapsage.models.backbones.attention import vit_block, with_class_token
from mapsage.models.backbones.weight_files import State
from mapsage.models.weight_license import WeightsLicense

from .encoder import EarthEncoder, PreparedStack, mean_over_valid, parse_arch, valid_cells
from .published_weights import PublishedNames
from .resampling import resize_table
from .sensors import (
    REFLECTANCE,
    SENTINEL2_ALIASES,
    EarthSensorError,
    PublishedSensor,
    match_sensors,
)

# Side of the training images in pixels; positions of other sizes are interpolated from theirs.
_IMAGE = 224


class PrithviArch(NamedTuple):
    """Structure of a Prithvi encoder; ``coords`` says whether it takes date and site (TL)."""

    embed_dims: int
    num_layers: int
    num_heads: int
    patch_size: int = 16
    coords: bool = True


# Source: terratorch 1.2.13, backbones/prithvi_vit.py.
ARCHS: Dict[str, PrithviArch] = {
    'tiny_TL': PrithviArch(192, 12, 3),
    '100M_TL': PrithviArch(768, 12, 12),
    '300M': PrithviArch(1024, 24, 16, coords=False),
    '300M_TL': PrithviArch(1024, 24, 16),
    '600M': PrithviArch(1280, 32, 16, 14, coords=False),
    '600M_TL': PrithviArch(1280, 32, 16, 14),
}

# Harmonized Landsat and Sentinel-2. Source: the same file.
_MEAN = 1087.0, 1342.0, 1433.0, 2734.0, 1958.0, 1363.0
_STD = 2248.0, 2179.0, 2178.0, 1850.0, 1242.0, 1049.0
SENSORS: Dict[str, PublishedSensor] = {
    # The product S30 and the weights have the names of Sentinel-2.
    'HLS': PublishedSensor(
        ('B02', 'B03', 'B04', 'B8A', 'B11', 'B12'), _MEAN, _STD, REFLECTANCE, SENTINEL2_ALIASES
    ),
    # The product L30 has the names of Landsat 8 and 9: its B05 is near infrared, where that of S30
    # is a red edge, and its B11 is thermal.
    'HLSL30': PublishedSensor(
        ('B02', 'B03', 'B04', 'B05', 'B06', 'B07'),
        _MEAN,
        _STD,
        REFLECTANCE,
        {
            'BLUE': 'B2',
            'GREEN': 'B3',
            'RED': 'B4',
            'NIR': 'B5',
            'NIR_NARROW': 'B5',
            'SWIR_1': 'B6',
            'SWIR_2': 'B7',
        },
    ),
}
_ALIASES = {
    'hls': 'HLS',
    's2': 'HLS',
    's2l2a': 'HLS',
    'sentinel2': 'HLS',
    'sentinel2l2a': 'HLS',
    'hlss30': 'HLS',
    's30': 'HLS',
    'hlsl30': 'HLSL30',
    'l30': 'HLSL30',
}


class LearnedScale(nn.Module):
    """Learned factor of the encoding of dates or sites; named as in the files."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.1))


class VolumeEmbedding(nn.Module):
    """Embedding of patches of one date; a convolution over dates, too, as in the files."""

    def __init__(self, channels: int, patch_size: int, bands: int) -> None:
        super().__init__()
        size = (1, patch_size, patch_size)
        self.proj = nn.Conv3d(bands, channels, size, stride=size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return tokens (N, T, h, w, D) of pixels (N, T, C, H, W)."""
        count, dates = pixels.shape[:2]
        # A 2-D convolution of every date computes the same and exists on every device.
        tokens = nn.functional.conv2d(
            pixels.flatten(0, 1),
            self.proj.weight[:, :, 0],
            self.proj.bias,
            stride=self.proj.stride[1:],
        )
        return tokens.view(count, dates, *tokens.shape[1:]).permute(0, 1, 3, 4, 2)


@MODELS.register_module()
class PrithviEO(EarthEncoder):
    """Prithvi-EO-2.0 encoder, which returns maps that are means over all dates.

    It takes one sensor, as reflectance x 10000: ``HLS`` has the bands B02, B03, B04, B8A, B11 and
    B12 with the names of Sentinel-2, as the product S30; ``HLSL30`` has the same bands with the
    names of Landsat, B02 to B07, as the product L30. A missing band is 0 after the normalization,
    which is the same as TerraTorch's removal of its weights; missing dates and pixels are masked.
    The TL variants take the year, the day of the year and the site of a stack; what is unknown is
    left out, as at random in the training of the weights. The day of the year counts from 1, as in
    the inference of Prithvi's authors; five datasets of TerraTorch 1.2.13 count from 0, and for
    models that were trained with them features move by up to 0.10.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint='.../Prithvi_EO_V2_300M_TL.pt')``.

    Source: terratorch 1.2.13; https://arxiv.org/abs/2412.02732.

    Args:
        sensors: The sensor of the config, as in the dataset: ``bands`` and ``max_dates`` by name.
        arch: Name 'tiny_TL', '100M_TL', '300M', '300M_TL', '600M' or '600M_TL', or a dict of
            ``embed_dims, num_layers, num_heads`` and optionally ``patch_size`` (16) and ``coords``
            (True).
        out_indices: Indices of the blocks whose output is returned; by default four evenly spaced
            ones. The last block's output is normed.
        frozen: Whether to freeze everything.
        modalities: ``dict(NAME='HLS')`` or ``dict(NAME='HLSL30')`` if the config's sensor has
            another name than s2, hls, hls_s30 or hls_l30.
        init_cfg: Config of the weights.

    Raises:
        EarthSensorError: If the sensor or a band is unknown, or there are several sensors.
        ValueError: If another argument is out of its range.
    """

    embedding_names = ('patch_embed.', 'cls_token', 'temporal_embed_enc.', 'location_embed_enc.')
    weights_origin = (
        'The published files are at https://huggingface.co/ibm-nasa-geospatial '
        '(Prithvi-EO-2.0-300M-TL and others): Prithvi_EO_V2_<arch>.pt.'
    )
    weights_license = WeightsLicense('Apache-2.0', 'https://huggingface.co/ibm-nasa-geospatial')

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        arch: Union[str, Dict[str, Any]] = '300M_TL',
        out_indices: Optional[Sequence[int]] = None,
        frozen: bool = False,
        modalities: Optional[Dict[str, str]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.arch = parse_arch(arch, ARCHS, PrithviArch)
        layout = StackLayout.of_config(sensors)
        if len(layout.sensors) > 1:
            raise EarthSensorError(
                f'PrithviEO takes one sensor, got '
                f'{[sensor.name for sensor in layout.sensors]}. TerraMind and '
                'OlmoEarth take several.'
            )
        super().__init__(
            layout,
            match_sensors(layout, SENSORS, _ALIASES, modalities, 'PrithviEO'),
            self.arch.embed_dims,
            self.arch.num_layers,
            self.arch.patch_size,
            out_indices,
            frozen,
            init_cfg,
        )
        self.patch_embed = VolumeEmbedding(
            self.embed_dims, self.stride, len(self.sensors[0].published.bands)
        )
        self.cls_token = nn.Parameter(torch.randn(1, 1, self.embed_dims) * 0.02)
        if self.arch.coords:
            self.temporal_embed_enc = LearnedScale()
            self.location_embed_enc = LearnedScale()
        self.blocks = nn.ModuleList(
            vit_block(self.embed_dims, self.arch.num_heads, 1e-5)
            for _ in range(self.out_indices[-1] + 1)
        )
        self.norm = nn.LayerNorm(self.embed_dims) if self.is_whole else nn.Identity()
        self.finish()

    def encode(self, stack: PreparedStack) -> List[torch.Tensor]:
        """Return the feature maps, float (N, D, h, w), of the blocks of ``out_indices``."""
        sensor = stack.sensors[0]
        tokens = self.patch_embed(sensor.pixels)
        count, dates, rows, columns, _ = tokens.shape
        encoding = self._positions(dates, rows, columns).to(tokens.device)[None]
        if self.arch.coords:
            # In float32, because years have too many digits for half precision.
            encoding = encoding + self._encode_dates(sensor.days)[:, :, None, None]
            encoding = encoding + self._encode_site(stack)[:, None, None, None]
        # In the parameters' dtype, so that autocast adds the outputs of blocks up in float32.
        tokens = (tokens + encoding.to(self.cls_token.dtype)).flatten(1, 3)
        tokens = torch.cat([self.cls_token.expand(count, -1, -1), tokens], 1)
        valid = valid_cells(sensor.valid, rows, columns)
        mask = None if stack.complete else with_class_token(valid.flatten(1))
        return [
            mean_over_valid(
                output[:, 1:].view(count, dates, rows, columns, -1).permute(0, 1, 4, 2, 3), valid
            )
            for output in self.run_blocks(tokens, mask)
        ]

    def _positions(self, dates: int, rows: int, columns: int) -> torch.Tensor:
        """Return the fixed encoding of positions on the CPU, float32 (dates, rows, columns, D)."""
        sixteenth = self.embed_dims // 16
        grid = _IMAGE // self.stride
        side = wave_encoding(torch.arange(grid, dtype=torch.float64), 6 * sixteenth).float()
        time = wave_encoding(torch.arange(dates, dtype=torch.float64), 4 * sixteenth).float()
        # Bicubic weights add up to 1, so a part that is constant along an axis needs no resizing.
        across = resize_table(side.t()[:, None].expand(-1, grid, -1), rows, columns, True)
        down = resize_table(side.t()[:, :, None].expand(-1, -1, grid), rows, columns, True)
        plane = torch.cat([across, down]).permute(1, 2, 0)
        return torch.cat(
            [
                plane[None].expand(dates, -1, -1, -1),
                time[:, None, None].expand(-1, rows, columns, -1),
            ],
            -1,
        )

    def _encode_dates(self, days: torch.Tensor) -> torch.Tensor:
        """Return the encoding of year and day of the year, float32 (N, T, D); 0 if unknown."""
        half = self.embed_dims // 2
        encoding = torch.cat(
            [
                wave_encoding(calendar(days)[0].float(), half),
                wave_encoding(day_of_year(days).float(), half),
            ],
            -1,
        )
        known = (days > NO_DAY)[..., None].float()
        return encoding * known * self.temporal_embed_enc.scale.float()

    def _encode_site(self, stack: PreparedStack) -> torch.Tensor:
        """Return the encoding of latitude and longitude, float32 (N, D); 0 if unknown."""
        half = self.embed_dims // 2
        known = ~(torch.isnan(stack.latitude) | torch.isnan(stack.longitude))
        nothing = torch.zeros_like(stack.latitude)
        encoding = torch.cat(
            [
                wave_encoding(torch.where(known, degrees, nothing).float(), half)
                for degrees in (stack.latitude, stack.longitude)
            ],
            -1,
        )
        return encoding * known[:, None].float() * self.location_embed_enc.scale.float()

    def published_names(self, state: State, path: str) -> PublishedNames:
        """Return the names of the tensors in a published file."""
        return PublishedNames(
            [(r'^(_timm_module|encoder)\.', '')],
            [
                (r'(_timm_module\.|encoder\.)?pos_embed$', 'fixed positions'),
                (r'decoder|.*_dec\.|(encoder\.)?mask_token$', 'the decoder'),
            ],
        )


def wave_encoding(numbers: torch.Tensor, channels: int) -> torch.Tensor:
    """Return sines, then cosines, of numbers at frequencies from 1 to 1 / 10000.

    Args:
        numbers: float (...).
        channels: Number of values for each number, even.

    Returns:
        Tensor (..., channels) of the dtype of ``numbers``.
    """
    half = channels // 2
    exponents = torch.arange(half, dtype=numbers.dtype, device=numbers.device) / half
    angles = numbers[..., None] * (1 / 10000**exponents)
    return torch.cat([angles.sin(), angles.cos()], -1)
