"""The features of a model's encoder as vectors of windows, from any config with a backbone.

`Encoder` implements `mapsage.maps.map_model.Predictor`: its scores are the components of vectors.

Shapes: N windows of a batch, B bands, H and W sides of a window with context, C components, h and w
sides of its core in cells.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Sequence, Tuple, cast

import numpy as np
import torch
import torch.nn.functional as functional
from mmseg.structures import SegDataSample
from torch import nn

from mapsage.accelerator import current_accelerator, is_out_of_memory
from mapsage.maps.predictor import TorchPredictor
from mapsage.maps.windows import blend_weights

from .blending import VectorBlender
from .errors import EmbeddingError
from .vectors import Pca

DEFAULT_LAYER = 'backbone'
_ALL, _LAST = 'all', '-1'
_CLASSIFIER = 'decode_head'


class Encoder(TorchPredictor):
    """Computes unit vectors of windows on the current accelerator.

    Args:
        model: Segmentor of MMSegmentation on its device; switched to evaluation mode.
        device: Device of the model.
        layer: Module whose output is taken, and which of its levels: ``backbone`` (the last level),
            ``backbone:0``, ``backbone:all`` (all levels, resized to the finest, each of unit
            length), ``neck``, any other path of a module; ``decode_head`` is the input of its
            classifier.
        window: Height and width of windows with their context, in pixels.
        batch_size: Largest number of windows that are computed at a time.
        amp: Data type of autocast; None computes in float32.
        say: Function that receives a line for the user.

    Attributes:
        stride: Pixels between two vectors, known after :meth:`measure`.
        scores: Number of components, with principal components their number.
        weights: ``(h, w)`` float32, blending weights of the core.
        batch_size: Number of windows of a batch; halved when the memory runs out.

    Raises:
        EmbeddingError: If the model lacks the layer.
    """

    # A score of class maps, which the interface has.
    threshold = 0.5

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        layer: str,
        window: Tuple[int, int],
        batch_size: int,
        amp: Optional[torch.dtype] = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._model, self._device = cast(Any, model.eval()), device
        self._window, self.batch_size, self._amp, self._say = window, batch_size, amp, say
        self._module, _, level = layer.partition(':')
        self._level, self._layer = level or _LAST, layer
        missing = [name for name in ('backbone', 'data_preprocessor') if not hasattr(model, name)]
        if missing:
            raise EmbeddingError(
                f"the config's model is a {type(model).__name__} without {' and '.join(missing)}; "
                f'expected a segmentor such as EncoderDecoder, whose backbone is the encoder.'
            )
        modules = dict(model.named_modules())
        if self._module not in modules:
            parts = ', '.join(name for name, _ in model.named_children())
            raise EmbeddingError(
                f'--layer {layer}: the model has no module {self._module!r}; it has {parts}, and '
                f'the modules inside them, such as {list(modules)[-1]}.'
            )
        if self._level != _ALL and not self._level.lstrip('-').isdigit():
            raise EmbeddingError(
                f'--layer {layer}: expected MODULE, MODULE:{_ALL} or MODULE:NUMBER, the number of a '
                f'level of its output from 0.'
            )
        self._captured: List[torch.Tensor] = []
        self._hook()
        self.stride, self.scores = 0, 0
        self.weights = np.ones((1, 1), np.float32)
        self._pca: Optional[torch.Tensor] = None

    def _hook(self) -> None:
        """Capture the output of the layer, or the input of a head's classifier."""
        if self._module == DEFAULT_LAYER:
            return
        module = self._model.get_submodule(self._module)
        if self._module == _CLASSIFIER and hasattr(module, 'conv_seg'):
            module.conv_seg.register_forward_pre_hook(
                lambda _, inputs: self._captured.append(inputs[0])
            )
        else:
            module.register_forward_hook(lambda _, inputs, output: self._captured.append(output))

    def measure(self, windows: np.ndarray) -> None:
        """Find stride and number of components with (N, B, H, W) windows.

        Raises:
            EmbeddingError: If the layer gives no feature map, or its size does not divide that of
                the window.
        """
        features = self.vectors(windows)
        height, width = features.shape[2:]
        stride = self._window[0] // height
        if (stride * height, stride * width) != self._window:
            raise EmbeddingError(
                f'--layer {self._layer} gives {width}x{height} vectors for a window of '
                f'{self._window[1]}x{self._window[0]} pixels, which is no whole stride: give '
                f'--window a multiple of the stride, such as {-(-self._window[0] // 32) * 32}.'
            )
        if features.shape[1] < 2:
            raise EmbeddingError(
                f'--layer {self._layer} gives a single number, expected vectors of 2 or more.'
            )
        self.stride, self.scores = stride, features.shape[1]

    def prepare(
        self, stride: int, scores: int, pca: Optional[Pca], cell: int, margin: int, overlap: int
    ) -> None:
        """Take over what rank 0 has measured, and cut windows to their core from now on.

        Args:
            stride, scores: As :meth:`measure` found them on rank 0.
            pca: Principal components, or None.
            cell: Side of a cell in pixels: the stride, or 1.
            margin: Pixels of context on each side of a window.
            overlap: Cells that the cores of neighboring windows share.
        """
        self.stride, self.scores = stride, scores
        if pca is not None:
            if len(pca.components) != scores:
                raise EmbeddingError(
                    f'the principal components are of vectors of {len(pca.components)} components, '
                    f'the encoder gives {scores}. Make them again with --dims.'
                )
            self._pca = torch.from_numpy(pca.components).to(self._device)
            self.scores = pca.components.shape[1]
        self._cell, self._margin = cell, margin // cell
        core = [side // cell - 2 * self._margin for side in self._window]
        self.weights = np.outer(*(blend_weights(side, min(overlap, side - 1)) for side in core))
        self._device_weights = torch.from_numpy(self.weights).to(self._device)

    def _replica(self) -> Encoder:
        replica = cast(Encoder, super()._replica())
        replica._captured = []
        for module in replica._model.modules():
            # The hooks of the original write into the original's list.
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number in [n for n, hook in hooks.items() if hook.__module__ == __name__]:
                    del hooks[number]
        replica._hook()
        return replica

    def blender(
        self, window: Tuple[int, int], width: int, shared_rows: int, **planes: bool
    ) -> VectorBlender:
        """Return what blends the vectors, on the host."""
        return VectorBlender(self.scores, window, width, shared_rows, **planes)

    def vectors(self, windows: np.ndarray) -> np.ndarray:
        """Return the unit vectors of windows with their context, without principal components.

        Returns:
            ``(N, C, H / stride, W / stride)`` float32.
        """
        with torch.no_grad():
            return self._levels(torch.from_numpy(np.ascontiguousarray(windows))).cpu().numpy()

    def _compute(self, windows: torch.Tensor) -> Optional[np.ndarray]:
        """Return the weighted vectors of a batch, or None if it does not fit the memory."""
        count, accelerator = len(windows), current_accelerator()
        if accelerator.lazy and count < self.batch_size:
            windows = torch.cat(
                [windows, windows.new_zeros((self.batch_size - count, *windows.shape[1:]))]
            )
        try:
            with torch.no_grad():
                features = self._levels(windows)
                if self._pca is not None:
                    features = torch.einsum('nchw,cd->ndhw', features, self._pca)
                if self._cell < self.stride:
                    features = _resize(features, self._window)
                margin = self._margin
                core = features[
                    :, :, margin : features.shape[2] - margin, margin : features.shape[3] - margin
                ]
                weighted = core * self._device_weights
            accelerator.flush()
            return weighted.cpu().numpy()[:count]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The caller retries after this frame is gone, because the error holds tensors.
            return None

    def _levels(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the layer's features as (N, C, H / stride, W / stride) vectors of unit length."""
        levels = self._features(windows)
        if self._level != _ALL:
            number = int(self._level)
            if not -len(levels) <= number < len(levels):
                raise EmbeddingError(
                    f'--layer {self._layer}: {self._module} gives {len(levels)} level(s), '
                    f'expected a number of 0 to {len(levels) - 1}.'
                )
            levels = [levels[number]]
        finest = max((tuple(level.shape[2:]) for level in levels), key=lambda size: size[0])
        unit = [functional.normalize(_resize(level.float(), finest), dim=1) for level in levels]
        return unit[0] if len(unit) == 1 else functional.normalize(torch.cat(unit, 1), dim=1)

    def _features(self, windows: torch.Tensor) -> List[torch.Tensor]:
        """Return the feature maps that the layer gives, each (N, C, h, w)."""
        shape = self._window
        samples = [
            SegDataSample(
                metainfo=dict(
                    ori_shape=shape, img_shape=shape, pad_shape=shape, padding_size=[0, 0, 0, 0]
                )
            )
            for _ in windows
        ]
        data = self._model.data_preprocessor(
            dict(inputs=list(windows.unbind(0)), data_samples=samples), False
        )
        inputs = data['inputs']
        self._captured.clear()
        with nullcontext() if self._amp is None else current_accelerator().autocast(self._amp):
            if self._module.split('.')[0] == DEFAULT_LAYER:
                output = self._model.backbone(inputs)
            elif self._module.split('.')[0] == 'neck':
                output = self._model.extract_feat(inputs)
            else:
                size = tuple(inputs.shape[2:])
                metas = [dict(each.metainfo, img_shape=size, pad_shape=size) for each in samples]
                output = self._model.encode_decode(inputs, metas)
        if self._module != DEFAULT_LAYER:
            if not self._captured:
                raise EmbeddingError(
                    f'--layer {self._layer}: the model does not call {self._module} when it '
                    f'predicts; name another module.'
                )
            output = self._captured[-1]
            self._captured.clear()
        levels = list(output) if isinstance(output, (tuple, list)) else [output]
        for level in levels:
            if not isinstance(level, torch.Tensor) or level.dim() != 4:
                form = tuple(level.shape) if isinstance(level, torch.Tensor) else type(level)
                raise EmbeddingError(
                    f'--layer {self._layer} gives {form}, expected feature maps (N, C, H, W): '
                    f'name the module that has them.'
                )
        return levels


def _resize(features: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    if tuple(features.shape[2:]) == tuple(size):
        return features
    return functional.interpolate(features, size=tuple(size), mode='bilinear', align_corners=False)
