"""A model's scores for windows: preprocessing as in the config, forward, weights of the blend."""
from __future__ import annotations

from typing import Any, List, Tuple, cast

import numpy as np
import torch
from mmseg.structures import SegDataSample
from torch import nn

from mapsage.accelerator import current_accelerator

from .errors import PredictError
from .windows import blend_weights

_FLIPS: Tuple[Tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))  # of (batch, bands, height, width)


class WindowPredictor:
    """Computes weighted scores of windows of one size on the accelerator in force.

    A score is a class probability: softmax over the logits, or the sigmoid of a binary model's only
    one. This is also how MMSegmentation's ``SegTTAModel`` makes predictions comparable.

    On a lazy device every batch is padded to ``batch_size``, so that one program serves all.

    Args:
        model: Segmentor of MMSegmentation on its device; it is put into evaluation mode.
        device: Device of the model.
        window: Height and width of a window in pixels.
        overlap: Pixels over which the weights rise from the edges of a window.
        batch_size: Largest number of windows in a batch.
        tta: Whether to average over the window and its three mirror images.

    Attributes:
        scores: Number of scores of a pixel.
        threshold: Score from which on a binary model with a single output means class 1.
        weights: ``(height, width)`` float32 factors of the scores.
    """

    def __init__(self, model: nn.Module, device: torch.device, window: Tuple[int, int],
                 overlap: int, batch_size: int, tta: bool = False) -> None:
        self._model = cast(Any, model.eval())
        self._device = device
        self._window, self._batch_size = window, batch_size
        self._flips = _FLIPS if tta else _FLIPS[:1]
        self.scores = int(getattr(self._model, 'out_channels', None) or self._model.num_classes)
        head: Any = getattr(model, 'decode_head', None)
        head = head[-1] if isinstance(head, nn.ModuleList) else head  # a cascade
        threshold = getattr(head, 'threshold', None)
        self.threshold: float = 0.5 if threshold is None else threshold
        self.weights = np.outer(*(blend_weights(side, min(overlap, side - 1)) for side in window))
        self._device_weights = torch.from_numpy(self.weights).to(device)

    def __call__(self, windows: torch.Tensor) -> np.ndarray:
        """Return the weighted scores of a batch of windows.

        Args:
            windows: ``(batch, bands, height, width)`` uint8 or float32 on the CPU, bands in the
                order in which the test pipeline of the config has them.

        Returns:
            ``(batch, scores, height, width)`` float32.

        Raises:
            PredictError: If the model has another number of scores than it says.
        """
        count = len(windows)
        accelerator = current_accelerator()
        if accelerator.lazy and count < self._batch_size:
            empty = windows.new_zeros((self._batch_size - count, *windows.shape[1:]))
            windows = torch.cat([windows, empty])
        with torch.no_grad():
            total = self._scores(windows)
            for flip in self._flips[1:]:
                total = total + self._scores(windows.flip(flip)).flip(flip)
            if len(self._flips) > 1:
                total = total / len(self._flips)
            weighted = total * self._device_weights
        accelerator.flush()
        return weighted.cpu().numpy()[:count]

    def logits(self, windows: torch.Tensor) -> torch.Tensor:
        """Return what the model answers to ``(batch, bands, height, width)``, on its device."""
        height, width = self._window
        samples: List[Any] = [SegDataSample(metainfo=dict(
            ori_shape=self._window, img_shape=self._window, pad_shape=self._window,
            padding_size=[0, 0, 0, 0])) for _ in windows]
        data = self._model.data_preprocessor(
            dict(inputs=list(windows.unbind(0)), data_samples=samples), False)
        inputs = data['inputs']
        shape = tuple(inputs.shape[2:])
        metas = [dict(sample.metainfo, img_shape=shape, pad_shape=shape) for sample in samples]
        # The preprocessor pads below and on the right.
        return self._model.encode_decode(inputs, metas)[:, :, :height, :width]

    def _scores(self, windows: torch.Tensor) -> torch.Tensor:
        logits = self.logits(windows).float()
        if logits.shape[1] != self.scores:
            raise PredictError(f'the model gave {logits.shape[1]} scores a pixel, expected '
                               f'{self.scores} (num_classes or out_channels of its decode head).')
        return logits.softmax(1) if self.scores > 1 else logits.sigmoid()
