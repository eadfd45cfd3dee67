"""DINOv3 ConvNeXt: the model of the transformers package as a backbone."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

from mapsage.models.lora import LoRAError

from .bands import RGB, adapt_bands, parse_bands, widen_checkpoints
from .dinov3_weights import NORMALIZATION, WeightsError
from .pixels import PixelRange

# hidden_sizes and depths of the official models, dinov3/models/convnext.py.
ARCHS: Dict[str, Tuple[List[int], List[int]]] = {
    'tiny': ([96, 192, 384, 768], [3, 3, 9, 3]),
    'small': ([96, 192, 384, 768], [3, 3, 27, 3]),
    'base': ([128, 256, 512, 1024], [3, 3, 27, 3]),
    'large': ([192, 384, 768, 1536], [3, 3, 27, 3]),
}

_STEM = 'stages.0.downsample_layers.0.weight'  # transformers 5 has a prefix


@MODELS.register_module()
class DINOv3ConvNeXt(BaseModule):
    """DINOv3 ConvNeXt that returns maps of stride 4, 8, 16 and 32 after the chosen stages.

    The last stage's map is normed, as by DINOv3's ``get_intermediate_layers(norm=True)``
    (dinov3/models/convnext.py), which norms this stage only.

    The network is that of the transformers package (4.56 or newer), and weights are read from a
    Hugging Face folder: ``init_cfg=dict(type='Pretrained', checkpoint=FOLDER)``. ``init_weights``
    loads them. A missing or unused key is an error that lists it.

    The input is RGB in 0..255. The backbone normalizes it with the statistics of web images, which
    all released ConvNeXt models were trained on, so the data preprocessor must not normalize. The
    statistics of other bands are not known to the weights, so that with other bands the data
    preprocessor must normalize.

    Args:
        arch: Name 'tiny', 'small', 'base' or 'large', or a dict of ``hidden_sizes`` and ``depths``.
        out_indices: Indices of the stages whose output is returned, ascending from 0.
        drop_path_rate: Drop-path probability (0..1) of the last layer; it grows linearly from 0 at
            the first layer.
        frozen: Whether to keep the whole backbone in ``eval()`` mode and without gradients.
        in_channels: Number of bands of the image.
        bands: Channels that are red, green and blue, as ``dict(rgb=(2, 1, 0))``, counted from 0;
            None in place of one that is not there. By default 0, 1, 2 of three or more. Pretrained
            kernels go to them, and their mean to the other channels (see :func:`adapt_bands`).
        lora: Setting of :class:`DINOv3ViT`, an error here.
        init_cfg: Config of the weights, as described above.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If an argument is out of its range.
    """

    compiled_methods = ('maps_of', )  # as of DINOv3ViT
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(self, arch: Any = 'tiny', out_indices: Sequence[int] = (0, 1, 2, 3),
                 drop_path_rate: float = 0., frozen: bool = False, in_channels: int = 3,
                 bands: Optional[Dict[str, Any]] = None,
                 lora: Optional[Dict[str, Any]] = None,
                 init_cfg: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(init_cfg)
        if lora is not None:
            raise LoRAError('DINOv3ConvNeXt takes no lora: it is a convolutional network without '
                            'attention. Use DINOv3ViT, or leave lora out and set frozen=True, or a '
                            'low learning rate')
        if isinstance(arch, str) and arch not in ARCHS:
            raise ValueError(f'arch={arch!r} is none of {list(ARCHS)}; a dict of hidden_sizes and '
                             'depths describes another')
        sizes, depths = ARCHS[arch] if isinstance(arch, str) else (
            arch['hidden_sizes'], arch['depths'])
        self.out_indices = tuple(out_indices)
        if not self.out_indices or list(self.out_indices) != sorted(
                set(self.out_indices) & set(range(len(sizes)))):
            raise ValueError(f'out_indices={self.out_indices} must be ascending stages out of '
                             f'0..{len(sizes) - 1}, at least one')
        self.frozen = frozen
        self.in_channels, self.rgb = in_channels, parse_bands(in_channels, bands)
        self._normalizes = in_channels == len(RGB) and self.rgb == RGB
        self.out_channels = tuple(sizes[index] for index in self.out_indices)
        transformers = _transformers()
        model = transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(
            hidden_sizes=list(sizes), depths=list(depths), drop_path_rate=drop_path_rate,
            num_channels=in_channels))
        stem = next(name for name, _ in model.named_parameters() if name.endswith(_STEM))
        widen_checkpoints(model.get_submodule(stem[:-len('.weight')]), in_channels, self.rgb)
        if self.out_indices[-1] < len(sizes) - 1:
            model.layer_norm = nn.Identity()  # its weights would get no gradient
        self.model = model
        mean, std = NORMALIZATION['web']
        self.register_buffer('pixel_mean', torch.tensor(mean).view(3, 1, 1))
        self.register_buffer('pixel_std', torch.tensor(std).view(3, 1, 1))
        self._check_pixels = PixelRange('DINOv3ConvNeXt', '')
        self._freeze()

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the maps of the chosen stages.

        Args:
            x: RGB image, float (N, 3, H, W), in 0..255, or normalized and of other bands; H and W
                are multiples of 32.

        Returns:
            One map, float (N, C, H / s, W / s), for each entry of ``out_indices``, with s = 4, 8,
            16, 32.

        Raises:
            BackboneInputError: If the input is already normalized. Values above 255 or of 0 to 1
                are logged.
        """
        if self._normalizes:
            self._check_pixels(x)
        return self.maps_of(x)

    def maps_of(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Do what :meth:`forward` does, without a look at the values of the image."""
        if self._normalizes:
            x = (x - self.pixel_mean) / self.pixel_std
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            found = self.model(x, output_hidden_states=True)
        states = found.hidden_states
        stages = list(states[len(states) - len(self.model.config.depths):])  # 4.x adds the input
        # The model norms the tokens of its last stage; the first of them is the mean of the others.
        stages[-1] = found.last_hidden_state[:, 1:].transpose(1, 2).reshape(stages[-1].shape)
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
            return  # transformers has initialized it
        path = self.init_cfg['checkpoint']
        try:
            loaded, info = type(self.model).from_pretrained(path, output_loading_info=True)
        except OSError as error:
            raise WeightsError(f'{path} holds no DINOv3 ConvNeXt: {error}. Expected a folder as '
                               'Hugging Face lays it out, with config.json and model.safetensors'
                               ) from error
        odd = {what: sorted(map(str, info[what])) for what in (
            'missing_keys', 'unexpected_keys', 'mismatched_keys') if info[what]}
        wanted = self.model.state_dict()
        state = {key: value for key, value in loaded.state_dict().items()
                 if key in wanted or not key.startswith('layer_norm.')}
        for key in state:
            if key.endswith(_STEM) and state[key].shape[1] == len(RGB):
                state[key] = adapt_bands(state[key], self.in_channels, self.rgb)
        shapes = [key for key in wanted
                  if key not in state or state[key].shape != wanted[key].shape]
        if odd or shapes or len(state) != len(wanted):
            raise WeightsError(f'{path} does not fit: {odd or ""} of another shape or missing '
                               f'{shapes[:5]}; its config has hidden_sizes='
                               f'{loaded.config.hidden_sizes}, depths={loaded.config.depths}, '
                               f'expected {self.model.config.hidden_sizes}, '
                               f'{self.model.config.depths}')
        self.model.load_state_dict(state)
        where = 'web' if self._normalizes else 'expected of the data preprocessor'
        print_log(f'DINOv3ConvNeXt: weights of {path}, normalization {where}', logger='current')

    def train(self, mode: bool = True) -> DINOv3ConvNeXt:
        """Switch everything that is not frozen to training mode."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        if self.frozen:
            nn.Module.train(self, False)
            self.requires_grad_(False)


def _transformers() -> Any:
    try:
        import transformers
        from transformers import DINOv3ConvNextModel  # noqa: F401  (4.56 and newer)
    except ImportError as error:
        raise ImportError("DINOv3ConvNeXt needs a package: pip install 'transformers>=4.56' "
                          '(Python 3.9 or newer)') from error
    return transformers
