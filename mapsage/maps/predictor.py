"""Scores of windows from a PyTorch model, multiplied with the blending weights.

`WindowPredictor` does the preprocessing of the config and the forward pass for windows of one size.
When a batch does not fit the memory, it halves the batch size for good. On a CPU, several threads
compute a batch each: PyTorch divides every operator of a batch among its threads, which wait for
each other after each operator, and threads with a batch each do not. Two of them compute 1.35 times
as many windows of 256 pixels a second as two that share a batch (docs/benchmarks.md).

Shapes: N windows of a batch, B bands, C scores, H and W sides of a window.
"""

from __future__ import annotations

import copy
import queue
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Callable, Collection, Deque, Iterator, List, Optional, Sequence, Tuple, cast

import numpy as np
import torch
from mmseg.structures import SegDataSample
from torch import nn

from mapsage.accelerator import current_accelerator, is_out_of_memory

from .blending import RowBlender
from .device_blending import DeviceBlender
from .errors import PredictError
from .folding import Folding, choose_folds, fold_batch_norms
from .map_model import Predictor, Scores
from .windows import blend_weights

# Axes of (batch, bands, height, width) along which a view is mirrored.
_FLIPS: Tuple[Tuple[int, ...], ...] = ((), (3,), (2,), (2, 3))
# Batches that wait on a device while the host queues the next one.
_BATCHES_AHEAD = 2
# Threads that compute a batch each: every one needs the memory of a batch's activations.
_MOST_PARALLEL = 4


class TorchPredictor(Predictor):
    """A predictor with a PyTorch model, which several threads of a CPU may call at the same time."""

    dtypes = (np.uint8, np.uint16)
    batch_size: int
    _model: Any
    _window: Tuple[int, int]
    _say: Callable[[str], None]
    _replicas: Optional[queue.SimpleQueue[TorchPredictor]] = None

    def use_threads(self, threads: int) -> None:
        """Let several threads call this predictor of a CPU at the same time.

        Sets :attr:`parallel`; it stays 1 if the model cannot be copied. More callers wait.

        Args:
            threads: Number of threads that compute.
        """
        self.parallel, self._threads_each = divide_threads(threads)
        replicas: List[TorchPredictor] = [self]
        try:
            replicas += [self._replica() for _ in range(self.parallel - 1)]
        # copy.deepcopy raises the first for objects such as locks, and PyTorch the second for
        # tensors that a module has computed with a gradient.
        except (TypeError, RuntimeError):
            self.parallel, self._threads_each = 1, threads
        self._replicas = queue.SimpleQueue()
        for replica in replicas:
            self._replicas.put(replica)

    def _replica(self) -> TorchPredictor:
        """Return a predictor for another thread, with the same weights in the same memory.

        Its modules are copies, because a module may store a part of its computation in itself.
        """
        tensors = chain(self._model.parameters(), self._model.buffers())
        replica = copy.copy(self)
        replica._model = copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors})
        return replica

    def stack(self, windows: Sequence[np.ndarray]) -> torch.Tensor:
        """Return windows as a batch; for a GPU in pinned memory, from which it copies by itself."""
        dtype = windows[0].dtype
        # PyTorch 1.10 has no uint16; the same bits travel as int16, see _widen.
        bits = np.int16 if dtype == np.uint16 else dtype
        # From an empty array, because PyTorch takes no view that is mirrored.
        batch = current_accelerator().host_buffer(
            (len(windows), *windows[0].shape), torch.from_numpy(np.empty(0, bits)).dtype
        )
        np.stack(windows, out=batch.numpy().view(dtype))
        return batch

    def __call__(self, windows: Scores) -> Any:
        """Return the weighted scores of a batch, computed by a replica that no thread uses."""
        if isinstance(windows, np.ndarray):
            # Bands in another order have a negative stride.
            windows = torch.from_numpy(np.ascontiguousarray(windows))
        if self._replicas is None:
            return self._predict(windows)
        replica = self._replicas.get()
        try:
            # The number belongs to the calling thread.
            torch.set_num_threads(self._threads_each)
            return replica._predict(windows)
        finally:
            self._replicas.put(replica)

    def _predict(self, windows: torch.Tensor) -> Scores:
        """Return the weighted scores of a batch of windows, in halves if memory is short."""
        windows = _widen(windows)
        computed: List[Any] = []
        first = 0
        while first < len(windows):
            scores = self._compute(windows[first : first + self.batch_size])
            if scores is None:
                self._halve()
                continue
            computed.append(scores)
            first += len(scores)
        if len(computed) == 1:
            return computed[0]
        join: Any = np.concatenate if isinstance(computed[0], np.ndarray) else torch.cat
        return join(computed)

    def _compute(self, windows: torch.Tensor) -> Optional[Scores]:
        """Return the weighted scores of a batch, or None if it does not fit the memory."""
        raise NotImplementedError

    def _halve(self) -> None:
        height, width = self._window
        if self.batch_size == 1:
            raise self._no_memory_for_a_window()
        self._say(
            f'out of memory with {self.batch_size} windows of {width}x{height} pixels at a '
            f'time: goes on with {self.batch_size // 2}'
        )
        self.batch_size //= 2

    def _no_memory_for_a_window(self) -> PredictError:
        height, width = self._window
        return PredictError(
            f'out of memory with a single window of {width}x{height} pixels: '
            f'take a smaller --window, or free memory of the device.'
        )


class WindowPredictor(TorchPredictor):
    """Computes weighted scores of windows of one size on the current accelerator.

    A score is a class probability: the softmax over the logits, or the sigmoid of a binary model's
    single logit, as in MMSegmentation's ``SegTTAModel``. A decode head with ``gives_scores = True``
    returns scores instead of logits (mask queries: from 0 up, not normalized), which are used
    unchanged.

    If a batch does not fit the memory, it and all later batches are computed in halves. A window's
    scores do not depend on the other windows of its batch, except for the last bits of float32,
    because libraries choose kernels by the size of the batch. On a lazy device, and of a compiled
    model, every batch is padded to ``batch_size``, so that only one program is compiled.

    Args:
        model: Segmentor of MMSegmentation on its device; it is switched to evaluation mode.
        device: Device of the model.
        window: Height and width of a window in pixels.
        overlap: Pixels over which the weights rise from the edges of a window.
        batch_size: Largest number of windows in a batch.
        tta: Whether to average over the window and its three mirror images.
        amp: Data type of autocast; None computes in float32. Scores are float32 in any case.
        say: Function that receives a line for the user.

    Attributes:
        amp: Data type of autocast, or None.
        batch_size: Current number of windows of a batch; halved when the memory runs out.
        scores: Number of scores of a pixel.
        threshold: Score above which a binary model with a single output means class 1.
        has_views: Whether mirror images are predicted, too.
        weights: ``(height, width)`` float32 factors of the scores, where the scores are.
        parallel: Number of threads that may compute a batch at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        window: Tuple[int, int],
        overlap: int,
        batch_size: int,
        tta: bool = False,
        amp: Optional[torch.dtype] = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._model = cast(Any, model.eval())
        self._device = device
        self._window, self.batch_size = window, batch_size
        self.amp, self._say = amp, say
        self._compiled: Optional[Callable[..., torch.Tensor]] = None
        # Where a program is compiled for each size of a batch, all batches have one.
        self._pads = current_accelerator().lazy
        self._flips = _FLIPS if tta else _FLIPS[:1]
        self.scores = int(getattr(self._model, 'out_channels', None) or self._model.num_classes)
        head: Any = getattr(model, 'decode_head', None)
        # The last head of a cascade gives the prediction.
        head = head[-1] if isinstance(head, nn.ModuleList) else head
        threshold = getattr(head, 'threshold', None)
        self.threshold: float = 0.5 if threshold is None else threshold
        self.has_views = tta
        weights = np.outer(*(blend_weights(side, min(overlap, side - 1)) for side in window))
        self._gives_scores = bool(getattr(head, 'gives_scores', False))
        self._device_weights = torch.from_numpy(weights).to(device)
        # A lazy device would compile a program for every position of a window.
        self._blends_on_device = device.type != 'cpu' and not current_accelerator().lazy
        self.weights: Any = self._device_weights if self._blends_on_device else weights
        self._fences: Deque[Callable[[], None]] = deque()

    def choose_folds(self, bands: int) -> Folding:
        """Return which batch normalizations of the model can be folded into convolutions.

        The model computes a window of random pixels around the mean of its data preprocessor, see
        :func:`mapsage.maps.folding.choose_folds`.

        Args:
            bands: Number of bands that the model takes.

        Raises:
            PredictError: If a window does not fit the memory.
        """
        pixels = self._trial_window(bands)
        try:
            with torch.no_grad():
                return choose_folds(self._model, lambda: self.logits(pixels))
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise self._no_memory_for_a_window() from error
            raise

    def compile(self) -> None:
        """Let ``torch.compile`` translate the model, for batches of ``batch_size`` windows.

        A model that it cannot translate computes as before, and the user is told so.

        Raises:
            PredictError: If this PyTorch has no ``torch.compile``.
        """
        compiler = getattr(torch, 'compile', None)
        if compiler is None:
            raise PredictError(
                f'--compile needs PyTorch 2.0 or newer, and this is {torch.__version__}: leave it out.'
            )
        self._compiled = compiler(self._model.encode_decode, dynamic=False)
        self._pads = True

    def fold_batch_norms(self, names: Collection[str]) -> None:
        """Make a convolutional model faster on a CPU; ``names`` are from :meth:`choose_folds`."""
        fold_batch_norms(self._model, names)

    def _trial_window(self, bands: int) -> torch.Tensor:
        """Return (1, bands, height, width) pixels in the units that the model takes."""
        random, shape = np.random.RandomState(0), (1, bands, *self._window)
        preprocessor = self._model.data_preprocessor
        mean, std = (getattr(preprocessor, name, None) for name in ('mean', 'std'))
        if mean is None or std is None:
            # Models that normalize by themselves: earth encoders refuse small values.
            return torch.from_numpy(random.randint(0, 256, shape).astype(np.uint8))
        if getattr(preprocessor, 'channel_conversion', False):
            mean, std = mean.flip(0), std.flip(0)
        return mean + std * torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    def blender(
        self, window: Tuple[int, int], width: int, shared_rows: int, **planes: bool
    ) -> RowBlender:
        """Return what blends the scores on the device, or on the host if that is too small."""
        if self._blends_on_device:
            try:
                return DeviceBlender(
                    self._device,
                    current_accelerator().copy_to_host,
                    self.scores,
                    window,
                    width,
                    shared_rows,
                    self.threshold,
                    **planes,
                )
            except PredictError as error:
                self._say(f'{error} Goes on with blending on the host.')
                self._blends_on_device, self.weights = False, self._device_weights.cpu().numpy()
        return super().blender(window, width, shared_rows, **planes)

    def __call__(self, windows: Scores) -> Any:
        """Return the weighted scores of a batch of windows.

        Args:
            windows: ``(batch, bands, height, width)`` of :meth:`stack`, bands in the order of the
                config's test pipeline.

        Returns:
            ``(batch, scores, height, width)`` float32; a tensor if the device blends, which may
            still be computing it.

        Raises:
            PredictError: If the model returns another number of scores than its head declares, a
                single window does not fit the memory, or the device cannot compute in ``amp``.
        """
        return super().__call__(windows)

    def _predict(self, windows: torch.Tensor) -> Scores:
        if not self._blends_on_device:
            return super()._predict(windows)
        # The host is at most two batches ahead of the device, whose scores take memory.
        if len(self._fences) == _BATCHES_AHEAD:
            self._fences.popleft()()
        pinned = windows.is_pinned()
        # Only a device that copies by itself is known to compute with integers of 16 bits.
        windows = windows if pinned else _widen(windows)
        scores = super()._predict(windows.to(self._device, non_blocking=pinned))
        self._fences.append(current_accelerator().fence(self._device))
        return scores

    def views(self, windows: torch.Tensor) -> Iterator[np.ndarray]:
        """Yield the scores of a batch of windows, and with ``tta`` the scores of each mirror image.

        Args:
            windows: ``(batch, bands, height, width)``, as in :meth:`__call__`.

        Yields:
            ``(batch, scores, height, width)`` float32 without weights, mirrored back.

        Raises:
            PredictError: If the batch does not fit the memory.
        """
        for flip in self._flips:
            try:
                with torch.no_grad():
                    scores = self._scores(windows.flip(flip)).flip(flip)
                current_accelerator().flush()
                yield scores.cpu().numpy()
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise PredictError(
                        f'out of memory with {len(windows)} windows at a time: lower --batch-size.'
                    ) from error
                self._raise_if_dtype_unsupported(error)
                raise

    def _compute(self, windows: torch.Tensor) -> Optional[Scores]:
        """Return the weighted scores of a batch, or None if it does not fit the memory."""
        count = len(windows)
        accelerator = current_accelerator()
        if self._pads and count < self.batch_size:
            empty = windows.new_zeros((self.batch_size - count, *windows.shape[1:]))
            windows = torch.cat([windows, empty])
        try:
            with torch.no_grad():
                total = self._scores(windows)
                for flip in self._flips[1:]:
                    total = total + self._scores(windows.flip(flip)).flip(flip)
                if len(self._flips) > 1:
                    total = total / len(self._flips)
                # A head that gives scores may still refer to them.
                weighted = (
                    total * self._device_weights
                    if self._gives_scores
                    else total.mul_(self._device_weights)
                )
            accelerator.flush()
            return weighted[:count] if self._blends_on_device else weighted.cpu().numpy()[:count]
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                # The caller retries after this frame is gone, because the error holds tensors.
                return None
            self._raise_if_dtype_unsupported(error)
            raise

    def _raise_if_dtype_unsupported(self, error: Exception) -> None:
        """Raise an error with a next step if the device cannot compute in the dtype of ``amp``."""
        if self.amp is not None and 'not implemented for' in str(error):
            raise PredictError(
                f'16 bits: torch {torch.__version__} cannot compute this model in '
                f'{dtype_name(self.amp)} on {current_accelerator().name} '
                f'({error}). Add --no-amp.'
            ) from error

    def logits(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the model's output for ``(batch, bands, height, width)`` windows, on its device.

        The output is ``(batch, scores, height, width)``: logits, or scores if the head gives them.
        """
        height, width = self._window
        samples: List[Any] = [
            SegDataSample(
                metainfo=dict(
                    ori_shape=self._window,
                    img_shape=self._window,
                    pad_shape=self._window,
                    padding_size=[0, 0, 0, 0],
                )
            )
            for _ in windows
        ]
        data = self._model.data_preprocessor(
            dict(inputs=list(windows.unbind(0)), data_samples=samples), False
        )
        inputs = data['inputs']
        shape = tuple(inputs.shape[2:])
        metas = [dict(sample.metainfo, img_shape=shape, pad_shape=shape) for sample in samples]
        with self._precision():
            if self.amp is not None and not current_accelerator().lazy:
                # On a CPU, 16-bit convolutions are 1.5 to 2 times as fast with channels last;
                # tensor cores use this order anyway.
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            # Cut off the preprocessor's padding, which is below and on the right.
            return self._run_model(inputs, metas)[:, :, :height, :width]

    def _run_model(self, inputs: torch.Tensor, metas: List[Any]) -> torch.Tensor:
        if self._compiled is not None:
            from torch._dynamo.exc import TorchDynamoException

            try:
                return self._compiled(inputs, metas)
            except TorchDynamoException as error:
                if is_out_of_memory(error):
                    raise
                reason = ' '.join(str(error).strip().split('\n')[:2])
                self._say(f'--compile: the model cannot be compiled, goes on without: {reason}')
                self._compiled = None
        return self._model.encode_decode(inputs, metas)

    def _precision(self) -> AbstractContextManager:
        return nullcontext() if self.amp is None else current_accelerator().autocast(self.amp)

    def _scores(self, windows: torch.Tensor) -> torch.Tensor:
        logits = self.logits(windows).float()
        if logits.shape[1] != self.scores:
            raise PredictError(
                f'the model gave {logits.shape[1]} scores a pixel, expected '
                f'{self.scores} (num_classes or out_channels of its decode head).'
            )
        if self._gives_scores:
            return logits
        return logits.softmax(1) if self.scores > 1 else logits.sigmoid()


def _widen(windows: torch.Tensor) -> torch.Tensor:
    """Return float32 for the bits of uint16 in an int16 tensor, and other windows as they are."""
    if windows.dtype != torch.int16:
        return windows
    return windows.to(torch.int32).bitwise_and_(0xFFFF).float()


def divide_threads(threads: int) -> Tuple[int, int]:
    """Return the number of batches to compute at a time, and PyTorch's threads for each.

    As few threads as possible are left over, and then as many batches as possible are computed.
    Up to four threads compute a batch each, with the bits of PyTorch with a single thread.

    Args:
        threads: Number of threads, 1 or more.
    """
    parallel = max(
        range(1, min(threads, _MOST_PARALLEL) + 1),
        key=lambda count: (count * (threads // count) if count > 1 else 0, count),
    )
    return parallel, threads // parallel


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type without its module, such as ``'bfloat16'``."""
    return str(dtype).replace('torch.', '')
