"""A model's scores for windows: preprocessing as in the config, forward, weights of the blend."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, Iterator, List, Optional, Tuple, Union, cast

import numpy as np
import torch
from mmseg.structures import SegDataSample
from torch import nn

from mapsage.accelerator import current_accelerator, is_out_of_memory

from .errors import PredictError
from .windows import blend_weights

_FLIPS: Tuple[Tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))  # of (batch, bands, height, width)


class WindowPredictor:
    """Computes weighted scores of windows of one size on the accelerator in force.

    A score is a class probability: softmax over the logits, or the sigmoid of a binary model's only
    one. This is also how MMSegmentation's ``SegTTAModel`` makes predictions comparable. A decode
    head whose attribute ``gives_scores`` is true has scores of its own (mask queries: from 0 up,
    not normalized), which are taken as they are.

    A batch for which there is too little memory is computed in halves, as are all after it. The
    scores of a window do not depend on the others in its batch, but for the last bits of float32:
    libraries choose kernels by its size. On a lazy device every batch is padded to ``batch_size``,
    so that one program serves all.

    Args:
        model: Segmentor of MMSegmentation on its device; it is put into evaluation mode.
        device: Device of the model.
        window: Height and width of a window in pixels.
        overlap: Pixels over which the weights rise from the edges of a window.
        batch_size: Largest number of windows in a batch.
        tta: Whether to average over the window and its three mirror images.
        amp: Data type of autocast; None computes in float32. Scores are float32 in any case.
        say: Function that receives a line for the user.

    Attributes:
        batch_size: Number of windows that are computed at a time now.
        scores: Number of scores of a pixel.
        threshold: Score from which on a binary model with a single output means class 1.
        has_views: Whether mirror images are looked at, too.
        weights: ``(height, width)`` float32 factors of the scores.
    """

    def __init__(self, model: nn.Module, device: torch.device, window: Tuple[int, int],
                 overlap: int, batch_size: int, tta: bool = False,
                 amp: Optional[torch.dtype] = None,
                 say: Callable[[str], None] = lambda line: None) -> None:
        self._model = cast(Any, model.eval())
        self._device = device
        self._window, self.batch_size = window, batch_size
        self._amp, self._say = amp, say
        self._flips = _FLIPS if tta else _FLIPS[:1]
        self.scores = int(getattr(self._model, 'out_channels', None) or self._model.num_classes)
        head: Any = getattr(model, 'decode_head', None)
        head = head[-1] if isinstance(head, nn.ModuleList) else head  # a cascade
        threshold = getattr(head, 'threshold', None)
        self.threshold: float = 0.5 if threshold is None else threshold
        self.has_views = tta
        self.weights = np.outer(*(blend_weights(side, min(overlap, side - 1)) for side in window))
        self._gives_scores = bool(getattr(head, 'gives_scores', False))
        self._device_weights = torch.from_numpy(self.weights).to(device)

    def __call__(self, windows: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
        """Return the weighted scores of a batch of windows.

        Args:
            windows: ``(batch, bands, height, width)`` uint8 or float32 on the CPU, bands in the
                order in which the test pipeline of the config has them.

        Returns:
            ``(batch, scores, height, width)`` float32.

        Raises:
            PredictError: If the model has another number of scores than it says, if there is too
                little memory for one window, or the device cannot compute in this data type.
        """
        windows = torch.as_tensor(windows)
        done: List[np.ndarray] = []
        first = 0
        while first < len(windows):
            scores = self._compute(windows[first:first + self.batch_size])
            if scores is None:
                self._halve()
                continue
            done.append(scores)
            first += len(scores)
        return done[0] if len(done) == 1 else np.concatenate(done)

    def views(self, windows: torch.Tensor) -> Iterator[np.ndarray]:
        """Yield the scores of a batch of windows, and with ``tta`` of each mirror image, by itself.

        Args:
            windows: As in a call.

        Yields:
            ``(batch, scores, height, width)`` float32 without weights, mirrored back.

        Raises:
            PredictError: If there is too little memory.
        """
        for flip in self._flips:
            try:
                with torch.no_grad():
                    scores = self._scores(windows.flip(flip)).flip(flip)
                current_accelerator().flush()
                yield scores.cpu().numpy()
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise PredictError(f'out of memory with {len(windows)} windows at a time: '
                                       f'lower --batch-size.') from error
                self._explain(error)
                raise

    def _compute(self, windows: torch.Tensor) -> Optional[np.ndarray]:
        """Return the weighted scores of a batch, or None if there is too little memory for it."""
        count = len(windows)
        accelerator = current_accelerator()
        if accelerator.lazy and count < self.batch_size:
            empty = windows.new_zeros((self.batch_size - count, *windows.shape[1:]))
            windows = torch.cat([windows, empty])
        try:
            with torch.no_grad():
                total = self._scores(windows)
                for flip in self._flips[1:]:
                    total = total + self._scores(windows.flip(flip)).flip(flip)
                if len(self._flips) > 1:
                    total = total / len(self._flips)
                weighted = total * self._device_weights
            accelerator.flush()
            return weighted.cpu().numpy()[:count]
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None  # the caller tries again, when this error holds no tensors any more
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise a better error in place of one that says that the device lacks the data type."""
        if self._amp is not None and 'not implemented for' in str(error):
            raise PredictError(f'--amp: torch {torch.__version__} cannot compute this model in '
                               f'{_name(self._amp)} on {current_accelerator().name} ({error}). '
                               f'Leave out --amp.') from error

    def _halve(self) -> None:
        height, width = self._window
        if self.batch_size == 1:
            raise PredictError(f'out of memory with a single window of {width}x{height} pixels: '
                               f'take a smaller --window, or free memory of the device.')
        self._say(f'out of memory with {self.batch_size} windows of {width}x{height} pixels at a '
                  f'time: goes on with {self.batch_size // 2}')
        self.batch_size //= 2

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
        with self._precision():
            if self._amp is not None and not current_accelerator().lazy:
                # A convolution of 16 bits is 1.5 to 2 times as fast with channels last on a CPU,
                # and has this order on tensor cores.
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            # The preprocessor pads below and on the right.
            return self._model.encode_decode(inputs, metas)[:, :, :height, :width]

    def _precision(self) -> AbstractContextManager:
        return nullcontext() if self._amp is None else current_accelerator().autocast(self._amp)

    def _scores(self, windows: torch.Tensor) -> torch.Tensor:
        logits = self.logits(windows).float()
        if logits.shape[1] != self.scores:
            raise PredictError(f'the model gave {logits.shape[1]} scores a pixel, expected '
                               f'{self.scores} (num_classes or out_channels of its decode head).')
        if self._gives_scores:
            return logits
        return logits.softmax(1) if self.scores > 1 else logits.sigmoid()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace('torch.', '')
