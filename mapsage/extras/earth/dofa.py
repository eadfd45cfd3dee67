"""DOFA v1 and v2 in plain PyTorch: the embedding of a band is computed from its wavelength.

So one encoder takes any optical sensor. DOFA knows no dates, and no two sensors at once: every date
of every sensor is encoded by itself and the features are averaged.

Shapes as in ``encoder.py``.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import nn

from mapsage.geo.stacks import SensorLayout, StackLayout, canonical_band
from mapsage.models.backbones.attention import join_heads, split_heads, vit_block, with_class_token
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
from .prithvi import wave_encoding
from .published_weights import PublishedNames
from .resampling import resize_table
from .sensors import (
    BYTES,
    OTHER,
    SENTINEL2_ALIASES,
    EarthSensorError,
    MatchedSensor,
    PublishedSensor,
    plain_name,
)

# Width of the network that computes the kernels, and number of its learned tokens.
_WAVES = 128
# Side of the training images in pixels.
_IMAGE = 224
# Beginning of the SHA-256 of torchgeo's files, which have the kernels of 2024-08.
_CURRENT_FILES = ('a0275954', '0ff904d3')


class DOFAArch(NamedTuple):
    """Structure of a DOFA encoder; ``version`` 2 has LayerScale and other names of tensors."""

    embed_dims: int
    num_layers: int
    num_heads: int
    patch_size: int = 16
    version: int = 1


# Source: torchgeo 0.10.1, models/dofa.py; zhu-xlab/DOFA@a414125a, dofa_v2.py.
ARCHS: Dict[str, DOFAArch] = {
    'v1_base': DOFAArch(768, 12, 12),
    'v1_large': DOFAArch(1024, 24, 16),
    'v2_base': DOFAArch(768, 12, 12, 14, 2),
    'v2_large': DOFAArch(1024, 24, 16, 14, 2),
}

_SENTINEL2 = dict(
    zip(
        ('B1', 'B2', 'B3', 'B4', 'B5', 'B6', 'B7', 'B8', 'B8A', 'B9', 'B10', 'B11', 'B12'),
        (0.443, 0.49, 0.56, 0.665, 0.705, 0.74, 0.783, 0.842, 0.865, 0.945, 1.375, 1.61, 2.19),
    )
)
# Wavelengths in micrometers by the name of the sensor and of the band. Sentinel-2's are of DOFA's
# README and, for the bands that it lacks, of ESA; a radar has none, and 5.405 is the README's.
WAVELENGTHS: Dict[str, Dict[str, float]] = {
    's2': _SENTINEL2,
    's1': {'VV': 5.405, 'VH': 5.405},
    'rgb': {'RED': 0.665, 'GREEN': 0.56, 'BLUE': 0.49},
}
# Mean and std of 8-bit values, by sensor and band. Source: zhu-xlab/DOFA@02937538, README.md.
_STATISTICS: Dict[str, Dict[str, Tuple[float, float]]] = {
    's2': {
        'B4': (114.11, 77.84),
        'B3': (114.82, 69.97),
        'B2': (126.64, 67.42),
        'B5': (84.34, 64.57),
        'B6': (97.85, 61.73),
        'B7': (103.94, 61.34),
        'B8': (101.44, 60.30),
        'B11': (72.33, 47.89),
        'B12': (56.67, 42.56),
    },
    's1': {'VH': (166.36, 64.83), 'VV': (88.46, 43.07)},
    'rgb': {'RED': (123.675, 58.395), 'GREEN': (116.28, 57.12), 'BLUE': (103.53, 57.375)},
}
_BAND_ALIASES = {'s2': SENTINEL2_ALIASES, 'rgb': {'R': 'RED', 'G': 'GREEN', 'B': 'BLUE'}}
_ALIASES = {'sentinel2': 's2', 's2l2a': 's2', 's2l1c': 's2', 'sentinel1': 's1', 's1grd': 's1'}


class WaveAttention(nn.Module):
    """Self-attention over the tokens of the bands, with the names of ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * _WAVES, _WAVES) * 0.02)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * _WAVES))
        self.out_proj = nn.Linear(_WAVES, _WAVES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens (1, K, 128)."""
        query, key, value = (
            split_heads(projected, 4)
            for projected in F.linear(tokens, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        weights = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        return self.out_proj(join_heads(weights.softmax(-1) @ value))


class WaveLayer(nn.Module):
    """Post-norm transformer layer with the names of ``nn.TransformerEncoderLayer``.

    That class would run a fused kernel which some versions of PyTorch lack, and adapters (LoRA) for
    the attention of the encoder would change its attention, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = WaveAttention()
        self.linear1 = nn.Linear(_WAVES, 2048)
        self.linear2 = nn.Linear(2048, _WAVES)
        self.norm1 = nn.LayerNorm(_WAVES)
        self.norm2 = nn.LayerNorm(_WAVES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens (1, K, 128)."""
        tokens = self.norm1(tokens + self.self_attn(tokens))
        return self.norm2(tokens + self.linear2(F.gelu(self.linear1(tokens))))


class WaveLayers(nn.Module):
    """One :class:`WaveLayer`, named as in ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WaveLayer()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens (1, K, 128)."""
        return self.layers[0](tokens)


class KernelGenerator(nn.Module):
    """Computes the kernel of each band and a bias."""

    def __init__(self, arch: DOFAArch) -> None:
        super().__init__()
        self.arch = arch
        self.weight_tokens = nn.Parameter(torch.randn(_WAVES, _WAVES) * 0.02)
        self.bias_token = nn.Parameter(torch.randn(1, _WAVES) * 0.02)
        self.transformer_encoder = WaveLayers()
        self.fc_weight = nn.Linear(_WAVES, arch.patch_size**2 * arch.embed_dims)
        self.fc_bias = nn.Linear(_WAVES, arch.embed_dims)

    def forward(self, waves: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel (D, C, patch, patch) and the bias (D,) of waves (C, 128)."""
        tokens = torch.cat([self.weight_tokens, waves, self.bias_token])[None]
        tokens = self.transformer_encoder(tokens)[0]
        size = self.arch.patch_size
        kernel = self.fc_weight(tokens[_WAVES:-1] + waves)
        kernel = kernel.view(len(waves), size, size, self.arch.embed_dims).permute(3, 0, 1, 2)
        return kernel * 0.01, self.fc_bias(tokens[-1]) * 0.01


class WaveProjection(nn.Module):
    """Residual network of two layers for the encoding of the wavelengths."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(_WAVES, _WAVES)
        self.w2 = nn.Linear(_WAVES, _WAVES)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        """Transform encodings (C, 128)."""
        return waves + torch.relu(self.w2(torch.relu(self.w1(waves))))


class DynamicEmbedding(nn.Module):
    """Embedding of patches with kernels that are computed from wavelengths.

    Cell (i, j) covers pixels from ``patch * i - 1`` on, because the published convolution is
    padded by one pixel.
    """

    def __init__(self, arch: DOFAArch) -> None:
        super().__init__()
        self.patch_size = arch.patch_size
        self.weight_generator = KernelGenerator(arch)
        self.fclayer = WaveProjection()

    def forward(self, pixels: torch.Tensor, wavelengths: torch.Tensor) -> torch.Tensor:
        """Return tokens (N, D, h, w) of pixels (N, C, H, W) and wavelengths (C,) in micrometers."""
        waves = wave_encoding(wavelengths.float() * 1000, _WAVES)
        kernel, bias = self.weight_generator(self.fclayer(waves.to(self.fclayer.w1.weight.dtype)))
        return F.conv2d(pixels, kernel, bias, stride=self.patch_size, padding=1)


@MODELS.register_module()
class DOFA(EarthEncoder):
    """DOFA v1 or v2 encoder, which returns maps that are means over all dates and sensors.

    It takes any bands whose wavelengths are known: those of the sensors s2, s1 and rgb by their
    names, and others by ``wavelengths``. The published statistics are of 8-bit values. For
    images in other units, such as reflectance, give ``mean`` and ``std`` of the training images, as
    benchmarks of DOFA do; ``tools/geotiff_statistics.py`` prints them.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint='.../dofav2_vit_base_e150.pth')``. Files
    of v1 from before August 2024 have another order of the kernels and are refused.

    Source: torchgeo 0.10.1; zhu-xlab/DOFA@a414125a; https://arxiv.org/abs/2403.15356.

    Args:
        sensors: Sensors of the config, as in the dataset: ``bands`` and ``max_dates`` by name.
        arch: Name 'v1_base', 'v1_large', 'v2_base' or 'v2_large', or a dict of ``embed_dims,
            num_layers, num_heads`` and optionally ``patch_size`` (16) and ``version`` (1).
        wavelengths: Wavelength of each band in micrometers, by the name of the sensor; needed for
            sensors that are not known by name.
        mean: Mean of each band in the unit of the images, by the name of the sensor.
        std: Standard deviation, like ``mean``.
        out_indices: Indices of the blocks whose output is returned, without a norm; by default four
            evenly spaced ones. The authors take (4, 6, 10, 11) of a Base.
        frozen: Whether to freeze everything.
        modalities: Known name by the config's name, such as ``dict(summer='s2')``.
        init_cfg: Config of the weights.

    Raises:
        EarthSensorError: If the wavelengths or the statistics of a band are unknown.
        ValueError: If another argument is out of its range.
    """

    embedding_names = ('patch_embed.', 'cls_token', 'pos_embed')
    weights_origin = (
        'The published files are at https://huggingface.co/earthflow/DOFA '
        '(dofav2_vit_base_e150.pth and others) and, for v1, at '
        'https://huggingface.co/torchgeo/dofa.'
    )
    weights_license = WeightsLicense('CC-BY-4.0', 'https://huggingface.co/earthflow/DOFA')

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        arch: Union[str, Dict[str, Any]] = 'v2_base',
        wavelengths: Optional[Mapping[str, Sequence[float]]] = None,
        mean: Optional[Mapping[str, Sequence[float]]] = None,
        std: Optional[Mapping[str, Sequence[float]]] = None,
        out_indices: Optional[Sequence[int]] = None,
        frozen: bool = False,
        modalities: Optional[Dict[str, str]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.arch = parse_arch(arch, ARCHS, DOFAArch)
        layout = StackLayout.of_config(sensors)
        _check_names(
            layout, dict(wavelengths=wavelengths, mean=mean, std=std, modalities=modalities)
        )
        described = [
            _describe(
                sensor,
                (modalities or {}).get(sensor.name, sensor.name),
                (wavelengths or {}).get(sensor.name),
                (mean or {}).get(sensor.name),
                (std or {}).get(sensor.name),
            )
            for sensor in layout.sensors
        ]
        super().__init__(
            layout,
            described,
            self.arch.embed_dims,
            self.arch.num_layers,
            self.arch.patch_size,
            out_indices,
            frozen,
            init_cfg,
        )
        for number, sensor in enumerate(described):
            self.register_buffer(
                f'_wavelengths_{number}',
                torch.tensor(sensor.published.wavelengths),
                persistent=False,
            )
        self.grid = _IMAGE // self.stride
        self.patch_embed = DynamicEmbedding(self.arch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, self.embed_dims) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.grid**2 + 1, self.embed_dims) * 0.02)
        # Tells files of this encoder from published ones, which have the same names.
        self.register_buffer('saved_by_mapsage', torch.ones(1))
        self.blocks = nn.ModuleList(
            vit_block(self.embed_dims, self.arch.num_heads, 1e-6, self.arch.version == 2)
            for _ in range(self.out_indices[-1] + 1)
        )
        self.norm = nn.Identity()
        self.finish()

    def encode(self, stack: PreparedStack) -> List[torch.Tensor]:
        """Return the feature maps, float (N, D, h, w), of the blocks of ``out_indices``."""
        of_sensors = [
            self._encode_sensor(number, sensor, stack.complete)
            for number, sensor in enumerate(stack.sensors)
        ]
        valid = torch.stack([cells for _, cells in of_sensors], 1)
        return [
            mean_over_valid(torch.stack(maps, 1), valid)
            for maps in zip(*(maps for maps, _ in of_sensors))
        ]

    def _encode_sensor(
        self, number: int, sensor: PreparedSensor, complete: bool
    ) -> Tuple[List[torch.Tensor], torch.Tensor]:
        """Return a sensor's maps (N, D, h, w), and where it has a valid date, bool (N, h, w)."""
        count, dates = sensor.pixels.shape[:2]
        tokens = self.patch_embed(
            sensor.pixels.flatten(0, 1), self.get_buffer(f'_wavelengths_{number}')
        )
        rows, columns = tokens.shape[-2:]
        table = self.pos_embed[0, 1:].float().t().reshape(-1, self.grid, self.grid)
        positions = resize_table(table, rows, columns, align_corners=False)
        # In the parameters' dtype, so that autocast adds the outputs of blocks up in float32.
        tokens = tokens + positions.to(self.cls_token.dtype)
        first = (self.cls_token + self.pos_embed[:, :1]).expand(count * dates, -1, -1)
        tokens = torch.cat([first, tokens.flatten(2).transpose(1, 2)], 1)
        valid = valid_cells(sensor.valid, rows, columns)
        mask = None if complete else with_class_token(valid.view(count * dates, -1))
        maps = [
            mean_over_valid(
                output[:, 1:].view(count, dates, rows, columns, -1).permute(0, 1, 4, 2, 3), valid
            )
            for output in self.run_blocks(tokens, mask)
        ]
        return maps, valid.any(1)

    def published_names(self, state: State, path: str) -> PublishedNames:
        """Return the names of the tensors in a published file; v1 files before 2024-08 are refused.

        The authors' newer files have tensors of a projector, and torchgeo's are known by their
        hash.
        """
        if 'saved_by_mapsage' in state:
            return PublishedNames([], [])
        if (
            self.arch.version == 1
            and not any(key.startswith('projector.') for key in state)
            and _hash_of(path) not in _CURRENT_FILES
        ):
            raise WeightsError(
                f'{path} is not a file of DOFA v1 since August 2024: it has no projector, and its '
                f'SHA-256 begins with none of {list(_CURRENT_FILES)}. Earlier files have another '
                'order of the kernels and would give wrong features. Take DOFA_ViT_base_e100.pth, '
                f"or torchgeo's. {self.weights_origin}"
            )
        state['saved_by_mapsage'] = torch.ones(1)
        unused = [
            (r'mask_token$|projector\.|decoder', 'the training'),
            (r'(fc_norm|norm|head|model\.norm)\.', 'the classification'),
        ]
        return PublishedNames([(r'^model\.', '')] if self.arch.version == 2 else [], unused)


def _describe(
    sensor: SensorLayout,
    name: str,
    wavelengths: Optional[Sequence[float]],
    mean: Optional[Sequence[float]],
    std: Optional[Sequence[float]],
) -> MatchedSensor:
    """Return a sensor of the config with the wavelengths and statistics of its bands."""
    known = _ALIASES.get(plain_name(name), plain_name(name))
    aliases = _BAND_ALIASES.get(known, {})
    bands = [aliases.get(band, band) for band in map(canonical_band, sensor.bands)]
    if wavelengths is None:
        table = WAVELENGTHS.get(known, {})
        unknown = [band for band, canonical in zip(sensor.bands, bands) if canonical not in table]
        if unknown:
            raise EarthSensorError(
                f'sensor {sensor.name!r}: the wavelengths of its bands {unknown} are unknown. Give '
                f'those of all bands in micrometers, wavelengths=dict({sensor.name}=[...]), or '
                f'name a known sensor, modalities=dict({sensor.name}=...): {sorted(WAVELENGTHS)}.'
            )
        wavelengths = [table[band] for band in bands]
    if (mean is None) != (std is None):
        raise EarthSensorError(f'sensor {sensor.name!r}: expected both mean and std, or none.')
    unit = OTHER
    if mean is None or std is None:
        statistics = _STATISTICS.get(known, {})
        unknown = [
            band for band, canonical in zip(sensor.bands, bands) if canonical not in statistics
        ]
        if unknown:
            raise EarthSensorError(
                f'sensor {sensor.name!r}: mean and std of its bands {unknown} are not published. '
                f'Give those of all bands, mean=dict({sensor.name}=[...]), std=dict(...); '
                'tools/geotiff_statistics.py prints them.'
            )
        mean, std = zip(*(statistics[band] for band in bands))
        unit = BYTES
    lengths = {len(sensor.bands), len(wavelengths), len(mean), len(std)}
    if len(lengths) > 1 or min(std) <= 0 or min(wavelengths) <= 0 or max(wavelengths) > 100:
        raise EarthSensorError(
            f'sensor {sensor.name!r} with the bands {list(sensor.bands)}: wavelengths='
            f'{list(wavelengths)}, mean={list(mean)}, std={list(std)}; expected one number for '
            'each band, std above 0, and wavelengths in micrometers (red is 0.665).'
        )
    published = PublishedSensor(
        tuple(sensor.bands), tuple(mean), tuple(std), unit, {}, tuple(map(float, wavelengths))
    )
    return MatchedSensor(sensor, sensor.name, published, tuple(range(len(sensor.bands))))


def _check_names(layout: StackLayout, settings: Mapping[str, Optional[Mapping[str, Any]]]) -> None:
    names = [sensor.name for sensor in layout.sensors]
    for setting, values in settings.items():
        if values is not None and not set(values) <= set(names):
            raise EarthSensorError(
                f'{setting} names the sensors {sorted(values)}, expected some of {names}.'
            )


def _hash_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        for block in iter(lambda: file.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()[:8]
