"""Blend scores on the device that has computed them, so that only finished pixels leave it.

`DeviceBlender` is a `RowBlender` whose sums are tensors. Both give equal bytes: numbers go through
the same float32 operations in the same order (`tests/unit/maps/test_blending.py` compares them).
Masks of pixels with data stay on the host, which knows them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Tuple

import numpy as np
import torch

from mapsage.accelerator import is_out_of_memory

from .blending import NO_DATA, PROBABILITY_STEPS, Blended, RowBlender
from .errors import PredictError

# Open columns are finished together, as many as fit: one window at a time keeps a card waiting for
# the host, which starts about ten kernels for them.
_OPEN_BYTES, _OPEN_COLUMNS = 256 << 20, 4096


class _DeviceSums:
    """Sums over a box of pixels as :class:`mapsage.maps.blending.BoxSums`, on a device.

    Attributes:
        sums: ``(C + 1, rows, columns)`` float32, sums of weighted scores and of the weights.
        valid: ``(rows, columns)`` bool on the host, where the scene has data.
    """

    def __init__(self, scores: int, rows: int, columns: int, device: torch.device) -> None:
        self.sums = torch.zeros((scores + 1, rows, columns), device=device)
        self.valid = np.zeros((rows, columns), bool)

    def planes(self) -> Iterator[Any]:
        yield self.sums
        yield self.valid


class DeviceBlender(RowBlender):
    """Sums the weighted scores of windows on a device, and hands out finished rows on the host.

    Args:
        device: Device of the scores.
        copy_to_host: Function that starts to copy a tensor and returns a function that waits for
            the copy, as :meth:`mapsage.accelerator.Accelerator.copy_to_host`.
        arguments: The arguments of :class:`RowBlender`.
    """

    def __init__(
        self,
        device: torch.device,
        copy_to_host: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
        scores: int,
        window: Tuple[int, int],
        width: int,
        *arguments: Any,
        **planes: bool,
    ) -> None:
        self._device, self._copy_to_host = device, copy_to_host
        columns = min(_OPEN_COLUMNS, width, _OPEN_BYTES // (4 * (scores + 1) * window[0]))
        with _naming_memory():
            # As a tensor: devices multiply by the rounded inverse of a Python number.
            self._steps = torch.full((), float(PROBABILITY_STEPS), device=device)
            super().__init__(
                scores, (window[0], max(window[1], columns)), width, *arguments, **planes
            )

    def begin(self, rows: int) -> None:
        """Begin a row of windows, of which the first ``rows`` rows are reached by no later one."""
        self._rows = rows
        classes = max(2, self._scores)
        count = 1 + self._confidence + classes * self._probabilities
        with _naming_memory():
            # The last byte says whether a score was not a number.
            self._bytes = torch.zeros(
                count * rows * self._width + 1, dtype=torch.uint8, device=self._device
            )
        self._planes = self._bytes[:-1].view(count, rows, self._width)
        self._valid = np.empty((rows, self._width), bool)

    def add(self, column: int, scores: Any, weights: Any, valid: np.ndarray) -> None:
        """Add a window of the current row of windows, as :meth:`RowBlender.add`, on the device."""
        height, width = valid.shape
        with _naming_memory():
            box = self._open_box(column, valid.shape)
            # Not +=, which also writes the sum back into the slice.
            sums = self._open.sums[(slice(None), *box)]
            sums[:-1].add_(scores[:, :height, :width])
            sums[-1].add_(weights[:height, :width])
        self._open.valid[box] |= valid

    def take(self) -> Blended:
        """End the row of windows and return its finished rows, on the host."""
        with _naming_memory():
            self._end_row()
            host = self._copy_to_host(self._bytes)().numpy()
        self._check_numbers(not host[-1])
        planes = host[:-1].reshape(self._planes.shape)
        if not self._valid.all():
            planes[:, ~self._valid] = NO_DATA
        return Blended(
            planes[0],
            planes[1] if self._confidence else None,
            planes[1 + self._confidence :] if self._probabilities else None,
        )

    def _new_sums(self, scores: int, rows: int, columns: int) -> Any:
        return _DeviceSums(scores, rows, columns, self._device)

    def _widen(self, stop: int) -> None:
        # As many columns as there is room for, because every call starts two kernels.
        if stop > self._right:
            super()._widen(min(self._left + self._open.valid.shape[1], self._width))

    def _finish_box(self, count: int, columns: slice) -> None:
        box = np.s_[: self._rows, :count]
        self._valid[:, columns] = self._open.valid[box]
        sums, weights = self._open.sums[:-1][(slice(None), *box)], self._open.sums[-1][box]
        known = weights > 0
        if len(sums) > 1:
            best, classes = sums.amax(0), sums.argmax(0)
        else:
            classes = sums[0] > float(self._threshold) * weights
            best = torch.where(classes, sums[0], weights - sums[0])
        self._bytes[-1:] |= torch.isnan(best).any()
        divisor = torch.where(known, weights, torch.ones_like(weights))
        planes = self._planes[:, :, columns]
        planes[0] = classes
        if self._confidence:
            planes[1] = torch.round(100 * (best / divisor).clamp(max=1))
        if self._probabilities:
            steps = torch.round(sums / (divisor / self._steps))
            planes[-len(sums) :] = steps.clamp(max=PROBABILITY_STEPS)
            # A binary model scores class 1; class 0 has the rest.
            if len(sums) == 1:
                planes[-2] = PROBABILITY_STEPS - planes[-1]
        planes.masked_fill_(~known, NO_DATA)


@contextmanager
def _naming_memory() -> Iterator[None]:
    """Raise a PredictError with the next step where the device has too little memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PredictError(
            'out of memory while scores are blended on the device: take a smaller --batch-size, or '
            'free memory of the device.'
        ) from error
