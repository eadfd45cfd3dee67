"""OlmoEarth v1.2 in plain PyTorch: dates and sensors in one sequence of tokens.

Differences from the published code: missing tokens are masked in evaluation, too. There, the tokens
of a sample that misses a date attend to the padding of its batch, so features depend on the batch.

Shapes as in ``encoder.py``; K = h * w * T tokens of all sensors.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from mmengine.registry import MODELS
from torch import nn

from mapsage.geo.stacks import StackLayout, calendar
from mapsage.models.backbones.attention import (
    PreNormBlock,
    attend,
    attend_to_any,
    join_heads,
    split_heads,
)
from mapsage.models.backbones.dinov3_blocks import Mlp
from mapsage.models.backbones.weight_files import State, WeightsError
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
from .resampling import enlarge
from .sensors import DECIBEL, REFLECTANCE, SENTINEL2_ALIASES, PublishedSensor, match_sensors

# Side of a patch in pixels after the image was enlarged; the weights of the embedding are for it.
_BASE_PATCH = 8
# Date of images without one, as rslearn gives them: 1 January 2024.
_DEFAULT_DATE = (2024, 1, 1)
# Days before a month of a common year; the published code counts leap years by 365.25 days.
_DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)


class OlmoEarthArch(NamedTuple):
    """Structure of an OlmoEarth encoder; ``pixel_channels`` are those of a pixel's embedding."""

    embed_dims: int
    num_layers: int
    num_heads: int
    pixel_channels: int


# Source: olmoearth-pretrain-minimal 0.1.5, model_loader.py.
ARCHS: Dict[str, OlmoEarthArch] = {
    'nano': OlmoEarthArch(128, 4, 8, 12),
    'tiny': OlmoEarthArch(192, 12, 3, 64),
    'small': OlmoEarthArch(384, 12, 6, 64),
    'base': OlmoEarthArch(768, 12, 12, 64),
}


def _two_sigma(
    bands: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    unit: str,
    aliases: Mapping[str, str],
) -> PublishedSensor:
    """Return a sensor that is normalized so that mean - 2 std becomes 0 and mean + 2 std 1."""
    return PublishedSensor(
        tuple(bands),
        tuple(center - 2 * spread for center, spread in zip(mean, std)),
        tuple(4 * spread for spread in std),
        unit,
        aliases,
    )


# Source: olmoearth-pretrain-minimal 0.1.5, data/norm_configs/computed.json.
SENSORS: Dict[str, PublishedSensor] = {
    'sentinel2_l2a': _two_sigma(
        ('B02', 'B03', 'B04', 'B08', 'B05', 'B06', 'B07', 'B8A', 'B11', 'B12', 'B01', 'B09'),
        (
            1188.9413,
            1407.7739,
            1513.0574,
            2755.4813,
            1890.9893,
            2483.7812,
            2722.7282,
            2885.5703,
            2562.8526,
            1914.1383,
            1115.8494,
            3269.8126,
        ),
        (
            1859.1924,
            1727.7387,
            1740.7757,
            1612.2566,
            1754.7320,
            1622.1173,
            1621.8226,
            1611.3588,
            1441.5472,
            1328.8914,
            1955.6992,
            2651.0884,
        ),
        REFLECTANCE,
        SENTINEL2_ALIASES,
    ),
    'sentinel1': _two_sigma(('vv', 'vh'), (-11.6490, -17.7454), (10.8404, 10.2163), DECIBEL, {}),
    'landsat': _two_sigma(
        ('B8', 'B1', 'B2', 'B3', 'B4', 'B5', 'B6', 'B7', 'B9', 'B10', 'B11'),
        (
            10132.0910,
            11000.9595,
            10493.4163,
            10146.3185,
            10236.4460,
            14427.0215,
            12164.0815,
            9712.0330,
            4585.4696,
            21347.8936,
            19686.2321,
        ),
        (
            7788.7282,
            7857.9206,
            7872.3921,
            7676.2775,
            8038.2181,
            9302.4316,
            7442.3905,
            6037.7122,
            2549.7454,
            10957.2815,
            9911.4212,
        ),
        REFLECTANCE,
        {},
    ),
}
_ALIASES = {
    's2': 'sentinel2_l2a',
    's2l2a': 'sentinel2_l2a',
    'sentinel2': 'sentinel2_l2a',
    's1': 'sentinel1',
    's1grd': 'sentinel1',
    'sentinel1': 'sentinel1',
    'landsat': 'landsat',
    'landsat8': 'landsat',
    'l8': 'landsat',
}


class RotarySpaceTimeAttention(nn.Module):
    """Self-attention with learned rotary frequencies of time, row and column ("rope_3d_mixed").

    Args:
        arch: Structure of the encoder.
    """

    def __init__(self, arch: OlmoEarthArch) -> None:
        super().__init__()
        channels, self.heads = arch.embed_dims, arch.num_heads
        self.rope_mixed_freqs = nn.Parameter(
            torch.randn(3, arch.num_heads, channels // arch.num_heads // 2) * 0.02
        )
        self.q, self.k, self.v, self.proj = (nn.Linear(channels, channels) for _ in range(4))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, valid: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """Transform tokens.

        Args:
            tokens: float (N, K, D).
            positions: Time, row and column of each token, float32 (N, K, 3).
            valid: Which tokens are attended to, bool (N, K); None if all.
        """
        query, key, value = (
            split_heads(layer(tokens), self.heads) for layer in (self.q, self.k, self.v)
        )
        # Products and sums, because autocast would compute a matrix product in half precision,
        # which has too few digits for days.
        # Indices with several new axes are exported wrongly by torch 1.10.
        angles = sum(
            positions[:, None, :, axis].unsqueeze(-1) * frequencies[:, None]
            for axis, frequencies in enumerate(self.rope_mixed_freqs.float())
        )
        sine, cosine = angles.sin(), angles.cos()  # type: ignore[union-attr]
        attended = attend(
            _rotate_pairs(query, sine, cosine), _rotate_pairs(key, sine, cosine), value, valid
        )
        return self.proj(join_heads(attended))


class SensorEmbedding(nn.Module):
    """Embedding of the patches of a sensor: a layer for each pixel, then one for the patch.

    Args:
        arch: Structure of the encoder.
        bands: Number of bands.
    """

    def __init__(self, arch: OlmoEarthArch, bands: int) -> None:
        super().__init__()
        self.pixel_proj = nn.Linear(bands, arch.pixel_channels)
        self.proj = nn.Linear(arch.pixel_channels * _BASE_PATCH**2, arch.embed_dims)
        self.channel = nn.Parameter(torch.randn(1, arch.embed_dims // 4) * 0.02)

    def forward(self, pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return tokens (N, T, rows, columns, D) of pixels (N, T, C, H, W)."""
        count, dates = pixels.shape[:2]
        # The image is enlarged, not the kernel made smaller.
        pixels = enlarge(pixels.flatten(0, 1), rows * _BASE_PATCH, columns * _BASE_PATCH)
        features = torch.relu(self.pixel_proj(pixels.permute(0, 2, 3, 1)))
        features = features.view(count * dates, rows, _BASE_PATCH, columns, _BASE_PATCH, -1)
        patches = features.transpose(2, 3).reshape(count, dates, rows, columns, -1)
        return self.proj(patches)


@MODELS.register_module()
class OlmoEarth(EarthEncoder):
    """OlmoEarth v1.2 encoder, which returns maps that are means over all dates and sensors.

    Sensors, with their bands and units: ``sentinel2_l2a`` (B01 to B12 without B10; digital numbers
    of L2A, 0..10000), ``sentinel1`` (vv, vh; decibel) and ``landsat`` (B1 to B11 of Collection 2,
    Level 1; digital numbers). A missing band is 0 after the normalization, as in the training of
    the weights; missing dates and pixels are masked. Images without a date count as taken on
    2024-01-01, as in rslearn.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint='.../weights.pth')``. Files of v1 and
    v1.1, which have another structure, are refused.

    Source: olmoearth-pretrain-minimal 0.1.5; https://arxiv.org/abs/2511.13655.

    Args:
        sensors: Sensors of the config, as in the dataset: ``bands`` and ``max_dates`` by name.
        arch: Name 'nano', 'tiny', 'small' or 'base', or a dict of ``embed_dims, num_layers,
            num_heads, pixel_channels``.
        patch_size: Side of a cell of the feature map in pixels, 1 to 8. Memory grows with the
            square of the number of cells times dates.
        resolution: Side of a pixel in meters.
        out_indices: Indices of the blocks whose output is returned; by default four evenly spaced
            ones. The last block's output is normed.
        frozen: Whether to freeze everything.
        modalities: Name of the encoder's sensor by the config's name, such as
            ``dict(summer='sentinel2_l2a')``; the names s2, s1 and landsat are known.
        init_cfg: Config of the weights.

    Raises:
        EarthSensorError: If a sensor or a band is unknown.
        ValueError: If another argument is out of its range.
    """

    embedding_names = ('patch_embed.',)
    weights_origin = (
        'The published files are at https://huggingface.co/allenai (OlmoEarth-v1_2-'
        'Nano, -Tiny, -Small, -Base): weights.pth.'
    )
    weights_license = WeightsLicense(
        'OlmoEarth Artifact License',
        'https://github.com/allenai/olmoearth_pretrain/blob/main/LICENSE',
        'use by the military, for surveillance, and for oil, gas, mining or deforestation; these '
        'restrictions apply to models that are trained from the weights, too',
    )

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        arch: Union[str, Dict[str, Any]] = 'base',
        patch_size: int = 4,
        resolution: float = 10.0,
        out_indices: Optional[Sequence[int]] = None,
        frozen: bool = False,
        modalities: Optional[Dict[str, str]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.arch = parse_arch(arch, ARCHS, OlmoEarthArch)
        if patch_size not in range(1, _BASE_PATCH + 1) or resolution <= 0:
            raise ValueError(
                f'patch_size={patch_size}, resolution={resolution}: expected an '
                f'integer in 1..{_BASE_PATCH} and meters above 0'
            )
        layout = StackLayout.of_config(sensors)
        super().__init__(
            layout,
            match_sensors(layout, SENSORS, _ALIASES, modalities, 'OlmoEarth'),
            self.arch.embed_dims,
            self.arch.num_layers,
            patch_size,
            out_indices,
            frozen,
            init_cfg,
        )
        # Rows and columns are counted in units of 10 m.
        self.step = resolution * patch_size / 10
        self.patch_embed = nn.ModuleDict(
            {
                sensor.published_name: SensorEmbedding(self.arch, len(sensor.published.bands))
                for sensor in self.sensors
            }
        )
        self.blocks = nn.ModuleList(
            PreNormBlock(
                self.embed_dims,
                RotarySpaceTimeAttention(self.arch),
                Mlp(self.embed_dims, 4 * self.embed_dims),
                nn.LayerNorm,
            )
            for _ in range(self.out_indices[-1] + 1)
        )
        self.norm = nn.LayerNorm(self.embed_dims) if self.is_whole else nn.Identity()
        self.finish()

    def encode(self, stack: PreparedStack) -> List[torch.Tensor]:
        """Return the feature maps, float (N, D, h, w), of the blocks of ``out_indices``."""
        embedded = [self._embed(sensor) for sensor in stack.sensors]
        tokens, positions, valid = (
            torch.cat(parts, 1)
            for parts in zip(
                *(
                    (tokens.flatten(1, 3), positions.flatten(1, 3), valid.flatten(1))
                    for tokens, positions, valid in embedded
                )
            )
        )
        mask = None if stack.complete else attend_to_any(valid)
        sizes = [cells.flatten(1).shape[1] for _, _, cells in embedded]
        return [
            self._merge(output.split(sizes, 1), [cells for _, _, cells in embedded])
            for output in self.run_blocks(tokens, positions, mask)
        ]

    def _embed(self, sensor: PreparedSensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens (N, T, h, w, D), positions (N, T, h, w, 3), valid cells (N, T, h, w)."""
        rows, columns = (size // self.stride for size in sensor.pixels.shape[-2:])
        embedding = self.patch_embed[sensor.name]
        tokens = embedding(sensor.pixels, rows, columns)
        time, month = _time_and_month(sensor.days)
        quarter = self.embed_dims // 4
        count, dates = time.shape
        channel = embedding.channel.expand(count, dates, quarter)  # type: ignore[operator]
        angle = month * (2 * math.pi / 12)
        season = (
            torch.stack([angle.sin(), angle.cos()], -1)[..., None]
            .expand(-1, -1, -1, quarter // 2)
            .flatten(2)
        )
        nothing = torch.zeros_like(season)
        encoding = torch.cat([channel, nothing, season, nothing], -1)
        # In the parameters' dtype, so that autocast adds the outputs of blocks up in float32.
        tokens = tokens + encoding[:, :, None, None].to(channel.dtype)
        grid = (count, dates, rows, columns)
        axis = torch.arange(max(rows, columns), device=time.device, dtype=time.dtype) * self.step
        positions = torch.stack(
            [
                time[:, :, None, None].expand(grid),
                axis[:rows, None].expand(grid),
                axis[:columns].expand(grid),
            ],
            -1,
        )
        return tokens, positions, valid_cells(sensor.valid, rows, columns)

    def _merge(self, tokens: Sequence[torch.Tensor], valid: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean over sensors of the means over valid dates, (N, D, h, w)."""
        maps = [
            mean_over_valid(features.view(*cells.shape, -1).permute(0, 1, 4, 2, 3), cells)
            for features, cells in zip(tokens, valid)
        ]
        return mean_over_valid(
            torch.stack(maps, 1), torch.stack([cells.any(1) for cells in valid], 1)
        )

    def published_names(self, state: State, path: str) -> PublishedNames:
        """Return the names of the tensors in a published file; files before v1.2 are refused."""
        if not any(key.endswith('.rope_mixed_freqs') for key in state):
            raise WeightsError(
                f'{path} has no learned rotary frequencies: it is of OlmoEarth v1 '
                f'or v1.1, expected v1.2. {self.weights_origin}'
            )
        prefix = r'encoder\.patch_embeddings\.per_modality_embeddings\.'
        used = '|'.join(sensor.published_name for sensor in self.sensors)
        return PublishedNames(
            [
                (rf'^{prefix}(\w+)\.\1__0\.pixel_proj\.0\.', r'patch_embed.\1.pixel_proj.'),
                (rf'^{prefix}(\w+)\.\1__0\.proj\.', r'patch_embed.\1.proj.'),
                (
                    r'^encoder\.composite_encodings\.per_modality_channel_embeddings\.(\w+)$',
                    r'patch_embed.\1.channel',
                ),
                (r'^encoder\.(blocks|norm)\.', r'\1.'),
            ],
            [
                (r'decoder\.|target_encoder\.', 'decoder and target encoder'),
                (r'encoder\.(project_and_aggregate|attention_pooler)\.', 'the pooled embedding'),
                (r'encoder\.composite_encodings\.(month_embed|pos_embed)', 'fixed encodings'),
                (
                    rf'{prefix}(?!({used})\.)|encoder\.composite_encodings\.'
                    rf'per_modality_channel_embeddings\.(?!({used})$)',
                    'sensors not in the config',
                ),
            ],
        )


def _time_and_month(days: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the time in months of 30 days from 2000-01-01, and the month, 0 to 11, of day numbers.

    Args:
        days: Day numbers, (N, T); 0 if unknown.

    Returns:
        Two float32 tensors (N, T).
    """
    year, month, day = (
        torch.where(days > 0, number, torch.full_like(number, default)).float()
        for number, default in zip(calendar(days), _DEFAULT_DATE)
    )
    before = torch.tensor(_DAYS_BEFORE_MONTH, dtype=torch.float32, device=days.device)
    elapsed = (year - 2000) * 365.25 + before[month.long() - 1] + day - 1
    return elapsed / 30, month - 1


def _rotate_pairs(x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of channels of queries or keys, in float32.

    Args:
        x: float (N, heads, K, channels).
        sine: float32 (N, heads, K, channels / 2).
        cosine: float32 of the same shape.

    Returns:
        Tensor with the shape and dtype of ``x``.
    """
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    return (
        torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1)
        .flatten(-2)
        .to(x.dtype)
    )
