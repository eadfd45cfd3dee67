"""DINOv3 ConvNeXt: the model of the transformers package as a backbone.

Unlike ``DINOv3ViT``, this class wraps the package's own model, so it needs transformers 4.56 or
newer (Python 3.9). The input contract is the same: RGB in 0..255, normalized by the backbone.

Shapes: N images, C bands, H x W pixels; s the stride of a stage (4, 8, 16, 32).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

from mapsage.models.lora import LoRAError

from .bands import RGB, adapt_bands, parse_bands, widen_checkpoints
from .dinov3_weights import NORMALIZATION, WeightsError
from .pixels import PixelRange

# hidden_sizes and depths of the official models; source: dinov3/models/convnext.py.
ARCHS: Dict[str, Tuple[List[int], List[int]]] = {
    'tiny': ([96, 192, 384, 768], [3, 3, 9, 3]),
    'small': ([96, 192, 384, 768], [3, 3, 27, 3]),
    'base': ([128, 256, 512, 1024], [3, 3, 27, 3]),
    'large': ([192, 384, 768, 1536], [3, 3, 27, 3]),
}

# End of the stem's name; transformers 5 adds a prefix.
_STEM = 'stages.0.downsample_layers.0.weight'


@MODELS.register_module()
class DINOv3ConvNeXt(BaseModule):
    """DINOv3 ConvNeXt that returns feature maps of stride 4, 8, 16 and 32 after the chosen stages.

    The final norm is applied to the last stage only, as by DINOv3's
    ``get_intermediate_layers(norm=True)`` (dinov3/models/convnext.py).

    The network comes from the transformers package (4.56 or newer), and weights are read from a
    Hugging Face folder: ``init_cfg=dict(type='Pretrained', checkpoint=FOLDER)``. They are loaded in
    ``init_weights``. A missing or unused key is an error that names it.

    The input is RGB in 0..255. The backbone normalizes it with the statistics of web images, on
    which all released ConvNeXt models were trained, so the data preprocessor must not normalize.
    For bands other than red, green and blue the weights know no statistics, so the data
    preprocessor must normalize.

    Args:
        arch: Name 'tiny', 'small', 'base' or 'large', or a dict of ``hidden_sizes`` and ``depths``.
        out_indices: Indices of the stages whose output is returned, ascending, counted from 0.
        drop_path_rate: Drop-path probability (0..1) of the last layer; it grows linearly from 0 at
            the first layer.
        frozen: Whether to keep the whole backbone in ``eval()`` mode and without gradients.
        in_channels: Number of bands of the image.
        bands: Channels of red, green and blue, counted from 0, as ``dict(rgb=(2, 1, 0))``; None for
            a color that the image lacks. By default, the first three channels if there are at least
            three. Pretrained kernels go to these channels, and the mean kernel to all others (see
            :func:`adapt_bands`).
        lora: Setting of :class:`DINOv3ViT`; any value except None is an error here.
        init_cfg: Config of the weights, as described above.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If an argument is out of its range.
    """

    # As in DINOv3ViT: forward() reads pixel values on the host, which would break the graph.
    compiled_methods = ('compute_maps',)
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        arch: Union[str, Dict[str, Any]] = 'tiny',
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        frozen: bool = False,
        in_channels: int = 3,
        bands: Optional[Dict[str, Any]] = None,
        lora: Optional[Dict[str, Any]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(init_cfg)
        if lora is not None:
            raise LoRAError(
                'DINOv3ConvNeXt accepts no lora: it is a convolutional network without '
                'attention. Use DINOv3ViT, or leave lora out and set frozen=True, or a '
                'low learning rate'
            )
        if isinstance(arch, str) and arch not in ARCHS:
            raise ValueError(
                f'arch={arch!r}, expected one of {list(ARCHS)}; for another '
                'architecture, give a dict of hidden_sizes and depths'
            )
        sizes, depths = (
            ARCHS[arch] if isinstance(arch, str) else (arch['hidden_sizes'], arch['depths'])
        )
        self.out_indices = tuple(out_indices)
        if not self.out_indices or list(self.out_indices) != sorted(
            set(self.out_indices) & set(range(len(sizes)))
        ):
            raise ValueError(
                f'out_indices={self.out_indices} must be ascending stage indices '
                f'in 0..{len(sizes) - 1}, at least one'
            )
        self.frozen = frozen
        self.in_channels, self.rgb = in_channels, parse_bands(in_channels, bands)
        self._normalizes = in_channels == len(RGB) and self.rgb == RGB
        self.out_channels = tuple(sizes[index] for index in self.out_indices)
        transformers = _import_transformers()
        model = transformers.DINOv3ConvNextModel(
            transformers.DINOv3ConvNextConfig(
                hidden_sizes=list(sizes),
                depths=list(depths),
                drop_path_rate=drop_path_rate,
                num_channels=in_channels,
            )
        )
        stem = next(name for name, _ in model.named_parameters() if name.endswith(_STEM))
        widen_checkpoints(model.get_submodule(stem[: -len('.weight')]), in_channels, self.rgb)
        if self.out_indices[-1] < len(sizes) - 1:
            # The norm belongs to the last stage. Unused, its weights would get no gradient, which
            # DDP reports as an error.
            model.layer_norm = nn.Identity()
        self.model = model
        mean, std = NORMALIZATION['web']
        self.register_buffer('pixel_mean', torch.tensor(mean).view(3, 1, 1))
        self.register_buffer('pixel_std', torch.tensor(std).view(3, 1, 1))
        self._check_pixels = PixelRange('DINOv3ConvNeXt', '')
        self._freeze()

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the feature maps of the chosen stages.

        Args:
            x: RGB images in 0..255, float (N, 3, H, W), or normalized images with other bands,
                float (N, C, H, W); H and W are multiples of 32.

        Returns:
            One map, float (N, C, H / s, W / s), for each entry of ``out_indices``, with s = 4, 8,
            16, 32.

        Raises:
            BackboneInputError: If the input is already normalized. Values above 255 or within
                0..1 are logged.
        """
        if self._normalizes:
            self._check_pixels(x)
        return self.compute_maps(x)

    def compute_maps(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Compute the output of :meth:`forward` without the range check of the pixel values."""
        if self._normalizes:
            x = (x - self.pixel_mean) / self.pixel_std
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            output = self.model(x, output_hidden_states=True)
        states = output.hidden_states
        # transformers 4.x puts the input before the stages.
        stages = list(states[len(states) - len(self.model.config.depths) :])
        # last_hidden_state is the normed last stage as tokens; token 0 is their mean.
        stages[-1] = output.last_hidden_state[:, 1:].transpose(1, 2).reshape(stages[-1].shape)
        return tuple(stages[index] for index in self.out_indices)

    def init_weights(self) -> None:
        """Load the weights that ``init_cfg`` names.

        Raises:
            WeightsError: If the folder cannot be read or its weights do not fit.
        """
        if self.is_init:  # type: ignore[has-type]
            return
        self.is_init = True
        if self.init_cfg is None:
            # The constructor of the transformers model has initialized the weights.
            return
        path = self.init_cfg['checkpoint']
        try:
            loaded, info = type(self.model).from_pretrained(path, output_loading_info=True)
        except OSError as error:
            raise WeightsError(
                f'{path} contains no DINOv3 ConvNeXt: {error}. Expected a Hugging '
                'Face folder with config.json and model.safetensors'
            ) from error
        problems = {
            problem: sorted(map(str, info[problem]))
            for problem in ('missing_keys', 'unexpected_keys', 'mismatched_keys')
            if info[problem]
        }
        target = self.model.state_dict()
        state = {
            key: value
            for key, value in loaded.state_dict().items()
            if key in target or not key.startswith('layer_norm.')
        }
        for key in state:
            if key.endswith(_STEM) and state[key].shape[1] == len(RGB):
                state[key] = adapt_bands(state[key], self.in_channels, self.rgb)
        unfit = [key for key in target if key not in state or state[key].shape != target[key].shape]
        if problems or unfit or len(state) != len(target):
            raise WeightsError(
                f'{path} does not fit: {problems or ""} missing or of another shape '
                f'{unfit[:5]}; its config has hidden_sizes='
                f'{loaded.config.hidden_sizes}, depths={loaded.config.depths}, '
                f'expected {self.model.config.hidden_sizes}, '
                f'{self.model.config.depths}'
            )
        self.model.load_state_dict(state)
        where = 'web' if self._normalizes else 'expected of the data preprocessor'
        print_log(f'DINOv3ConvNeXt: weights of {path}, normalization {where}', logger='current')

    def train(self, mode: bool = True) -> DINOv3ConvNeXt:
        """Set the training mode; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        if self.frozen:
            nn.Module.train(self, False)
            self.requires_grad_(False)


def _import_transformers() -> ModuleType:
    # Releases of transformers before 4.56 lack the class.
    try:
        import transformers
        from transformers import DINOv3ConvNextModel  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "DINOv3ConvNeXt needs a package: pip install 'transformers>=4.56' (Python 3.9 or newer)"
        ) from error
    return transformers
