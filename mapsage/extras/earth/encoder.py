"""What the encoders for satellite images share: input, normalization, weights and freezing.

An encoder takes a stack of sensors and dates (``mapsage/geo/stacks``) or plain images of one date, and
returns feature maps of one map per place: dates and sensors are merged inside. The data
preprocessor must not normalize, because mean and std belong to the weights.

Shapes: N images, T dates, C bands, H x W pixels, D channels, h x w cells of the feature map.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import (
    Any,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import nn

from mapsage.geo.stacks import NO_DAY, SceneStack, SensorImages, StackLayout
from mapsage.models.backbones.pixels import BackboneInputError
from mapsage.models.backbones.weight_files import State, read_tensors
from mapsage.models.frozen_weights import initializer_name
from mapsage.models.lora import is_adapter
from mapsage.models.weight_license import WeightsLicense

from .published_weights import PublishedNames, fit_published
from .sensors import MatchedSensor, UnitCheck


class PreparedSensor(NamedTuple):
    """Images of a sensor as an encoder's weights expect them.

    Attributes:
        name: Name of the encoder's sensor.
        pixels: Normalized pixels with all published bands in published order, float (N, T, C, H,
            W); 0 where a pixel or a band is missing.
        valid: bool (N, T, H, W), False where a pixel is missing.
        days: Day numbers of ``mapsage.geo.stacks``, float (N, T); 0 if unknown.
    """

    name: str
    pixels: torch.Tensor
    valid: torch.Tensor
    days: torch.Tensor


class PreparedStack(NamedTuple):
    """Input of an encoder.

    Attributes:
        sensors: Sensors in the order of the config.
        longitude: float (N,), degrees; NaN if unknown.
        latitude: float (N,), degrees; NaN if unknown.
        complete: Whether every pixel is known to be valid, so that nothing needs a mask.
    """

    sensors: Sequence[PreparedSensor]
    longitude: torch.Tensor
    latitude: torch.Tensor
    complete: bool


class EarthEncoder(BaseModule):
    """Base class of encoders for stacks of sensors and dates.

    Subclasses create their layers, with the blocks in ``self.blocks`` and the final norm in
    ``self.norm``, then call :meth:`finish`, and implement :meth:`encode`.

    Args:
        layout: Sensors of the config.
        sensors: The same sensors as the encoder's authors describe them.
        embed_dims: Number of channels D.
        num_layers: Number of blocks of the whole model.
        stride: Side of a cell of the feature map in pixels.
        out_indices: Indices of the blocks whose output is returned, ascending, counted from 0; by
            default four evenly spaced ones. Blocks after the last index are not built.
        frozen: Whether to freeze everything.
        init_cfg: Config of the weights.

    Raises:
        ValueError: If ``out_indices`` are not ascending indices of blocks.
    """

    # Methods that compile=dict(backbone=True) compiles. forward() is not one of them, because its
    # check of units reads pixel values on the host.
    compiled_methods = ('compute_maps',)
    # Beginnings of the names of parameters before the first block, for layer decay.
    embedding_names: Tuple[str, ...] = ()
    # Sentence that says where the published files are.
    weights_origin = ''
    weights_license: WeightsLicense
    blocks: nn.ModuleList

    def __init__(
        self,
        layout: StackLayout,
        sensors: Sequence[MatchedSensor],
        embed_dims: int,
        num_layers: int,
        stride: int,
        out_indices: Optional[Sequence[int]],
        frozen: bool,
        init_cfg: Optional[Dict[str, Any]],
    ) -> None:
        super().__init__(init_cfg)
        if out_indices is None:
            out_indices = sorted(
                {max(num_layers * quarter // 4 - 1, 0) for quarter in (1, 2, 3, 4)}
            )
        if not out_indices or list(out_indices) != sorted(
            set(out_indices) & set(range(num_layers))
        ):
            raise ValueError(
                f'out_indices={tuple(out_indices)} must be ascending block indices in '
                f'0..{num_layers - 1}, at least one'
            )
        self.layout, self.sensors = layout, tuple(sensors)
        self.embed_dims, self.num_layers, self.stride = embed_dims, num_layers, stride
        self.out_indices = tuple(out_indices)
        self.out_channels = (embed_dims,) * len(self.out_indices)
        self.frozen = frozen
        self._check_units = UnitCheck(type(self).__name__, self.sensors)
        for number, sensor in enumerate(self.sensors):
            # In the order of the config's bands. The config determines them, so they are not saved.
            order = sorted(
                (position, index)
                for index, position in enumerate(sensor.positions)
                if position is not None
            )
            for kind, values in (('mean', sensor.published.mean), ('std', sensor.published.std)):
                self.register_buffer(
                    f'_{kind}_{number}',
                    torch.tensor([values[index] for _, index in order]).view(-1, 1, 1),
                    persistent=False,
                )

    @property
    def is_whole(self) -> bool:
        """Whether all blocks of the model are built, so that the final norm is applied."""
        return self.out_indices[-1] == self.num_layers - 1

    def finish(self) -> None:
        """Initialize all linear layers and freeze what the config says."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self._freeze()

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the feature maps of the chosen blocks.

        Args:
            x: Stacks, float (N, ``layout.input_channels``, H, W), in the units that the encoder's
                documentation names; or images without planes of validity, days and site,
                (N, bands of all sensors, H, W), if every sensor has one date.

        Returns:
            One map, float (N, D, h, w), for each entry of ``out_indices``. Cells where no sensor
            and no date has a valid pixel are 0.

        Raises:
            BackboneInputError: If H or W is not a multiple of the stride, or the values have
                another unit.
            StackLayoutError: If the number of channels does not fit the sensors.
        """
        if x.shape[-2] % self.stride or x.shape[-1] % self.stride:
            raise BackboneInputError(
                f'input of {x.shape[-2]} x {x.shape[-1]} pixels (H x W), expected multiples of '
                f'{self.stride}; choose a crop size or --window that fits, or pad with '
                f'size_divisor={self.stride} in the data preprocessor'
            )
        stack = self._split(x)
        self._check_units(
            {name: (images.pixels, images.valid) for name, images in stack.sensors.items()}
        )
        return self.compute_maps(x)

    def compute_maps(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Compute the output of :meth:`forward` without its checks."""
        stack = self._split(x)
        prepared = [
            self._prepare(number, sensor, stack.sensors[sensor.layout.name])
            for number, sensor in enumerate(self.sensors)
        ]
        maps = self.encode(
            PreparedStack(prepared, stack.longitude, stack.latitude, self._is_plain(x))
        )
        # Without contiguous() the maps would be channels-last views, for which GroupNorm of torch
        # 2.13 crashes in the backward pass if its input needs no gradient.
        return tuple(features.contiguous() for features in maps)

    @abstractmethod
    def encode(self, stack: PreparedStack) -> List[torch.Tensor]:
        """Return the feature maps, float (N, D, h, w), of the blocks of ``out_indices``."""

    def run_blocks(self, tokens: torch.Tensor, *inputs: Any) -> List[torch.Tensor]:
        """Return the tokens after the blocks of ``out_indices``; the last block's are normed.

        Args:
            tokens: Tokens before the first block, (N, tokens, D).
            *inputs: Further arguments of the blocks.
        """
        outputs = []
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, *inputs)
            if index in self.out_indices:
                outputs.append(self.norm(tokens) if index == self.num_layers - 1 else tokens)
        return outputs

    @abstractmethod
    def published_names(self, state: State, path: str) -> PublishedNames:
        """Return the names of the tensors in a published file.

        Args:
            state: Tensors of the file.
            path: Path of the file, for messages.

        Raises:
            WeightsError: If the file is of another model or version.
        """

    def init_weights(self) -> None:
        """Load the weights that ``init_cfg`` names; without ``init_cfg``, do what MMEngine does."""
        cfgs = self.init_cfg if isinstance(self.init_cfg, (list, tuple)) else [self.init_cfg or {}]
        pretrained = [
            cfg for cfg in cfgs if initializer_name(cfg) in ('Pretrained', 'PretrainedInit')
        ]
        if self.is_init or not pretrained:  # type: ignore[has-type]
            super().init_weights()
            return
        self._load(pretrained[-1]['checkpoint'], pretrained[-1].get('prefix') or '')
        self.is_init = True

    def train(self, mode: bool = True) -> EarthEncoder:
        """Set the training mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _load(self, path: str, prefix: str) -> None:
        name = type(self).__name__
        state = read_tensors(path, prefix, name, self.weights_origin)
        # Adapters that the file lacks keep their initial values.
        target = {
            key: value
            for key, value in self.state_dict().items()
            if key in state or not is_adapter(key)
        }
        fitted, unused = fit_published(
            state, target, self.published_names(state, path), self.num_layers, name
        )
        self.load_state_dict(fitted, strict=len(target) == len(self.state_dict()))
        print_log(
            f'{name}: {len(fitted)} tensors of {path}; not used: {unused}. '
            + self.weights_license.describe(),
            logger='current',
        )

    def _freeze(self) -> None:
        if self.frozen:
            # Not self.train(), which calls this method.
            nn.Module.train(self, False)
            self.requires_grad_(False)

    def _is_plain(self, x: torch.Tensor) -> bool:
        return x.shape[1] == self.layout.pixel_channels and self.layout.dates == len(self.sensors)

    def _split(self, x: torch.Tensor) -> SceneStack:
        if not self._is_plain(x):
            return self.layout.split(x)
        sensors, channel = {}, 0
        for sensor in self.layout.sensors:
            pixels = x[:, None, channel : channel + len(sensor.bands)]
            sensors[sensor.name] = SensorImages(
                pixels,
                torch.ones_like(pixels[:, :, 0], dtype=torch.bool),
                x.new_full((x.shape[0], 1), NO_DAY),
            )
            channel += len(sensor.bands)
        unknown = x.new_full((x.shape[0],), float('nan'))
        return SceneStack(sensors, unknown, unknown)

    def _prepare(self, number: int, sensor: MatchedSensor, images: SensorImages) -> PreparedSensor:
        """Normalize the pixels and put the bands into published order."""
        mean, std = self.get_buffer(f'_mean_{number}'), self.get_buffer(f'_std_{number}')
        pixels = (images.pixels - mean) / std
        missing = torch.zeros_like(pixels[:, :, :1])
        pixels = torch.where(images.valid[:, :, None], pixels, missing)
        bands = pixels.shape[2]
        if sensor.positions != tuple(range(bands)):
            order = [bands if position is None else position for position in sensor.positions]
            pixels = torch.cat([pixels, missing], 2)[:, :, order]
        return PreparedSensor(sensor.published_name, pixels, images.valid, images.days)


def valid_cells(valid: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return which cells have a valid pixel.

    Args:
        valid: bool (N, T, H, W).
        rows: Number of rows of cells, a divisor of H.
        columns: Number of columns of cells, a divisor of W.

    Returns:
        bool (N, T, rows, columns).
    """
    size = valid.shape[2] // rows, valid.shape[3] // columns
    return F.max_pool2d(valid.float(), size) > 0


def mean_over_valid(features: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the mean over the valid dates of each cell; 0 if a cell has none.

    Args:
        features: float (N, T, D, h, w).
        valid: bool (N, T, h, w).

    Returns:
        float (N, D, h, w).
    """
    weights = valid[:, :, None].to(features.dtype)
    return (features * weights).sum(1) / weights.sum(1).clamp(min=1)


_Arch = TypeVar('_Arch', bound=Tuple[Any, ...])


def parse_arch(
    arch: Union[str, Mapping[str, Any]], archs: Mapping[str, _Arch], kind: Type[_Arch]
) -> _Arch:
    """Return the architecture that a config names, or describes by a dict of its fields.

    Raises:
        ValueError: If the name is unknown, or the dict has other keys.
    """
    if isinstance(arch, str):
        if arch not in archs:
            raise ValueError(f'arch={arch!r}, expected one of {list(archs)}')
        return archs[arch]
    try:
        return kind(**arch)
    except TypeError as error:
        raise ValueError(
            f'arch={dict(arch)}: {error}; expected the keys {list(kind.__annotations__)}'
        ) from error
