"""The source that encodes ahead of the head, on the head's device.

It hides the time between two encodings, such as loading and copying, behind the head's step. It
does not add computing power; sources for other ranks are in `remote/`.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, wait
from typing import Callable, Deque, Dict, Optional, Tuple

import torch

from mapsage.base.process import BackgroundWorker

from .source import Encode, Features, FeatureSource, Item, StreamingError


class Prefetched(FeatureSource):
    """Encodes a limited number of items while the head trains.

    On an eager device a thread encodes, and its kernels share the device with the head's. A lazy
    device queues work by itself: there an item is encoded and flushed at its request, so that the
    device computes it while the head's step is recorded.

    Args:
        encode: Frozen encoder, without autograd.
        depth: Number of items that may wait, which becomes ``ahead``. Each of them holds its images
            and features on the device.
        timeout: Seconds that an item may take.
        prepare: Function that the thread calls first, since each thread has a current device.
        flush: Function that runs what a lazy device has recorded; None on an eager device.

    Raises:
        ValueError: If ``depth`` or ``timeout`` is not positive.
    """

    def __init__(
        self,
        encode: Encode,
        depth: int = 2,
        timeout: float = 600.0,
        prepare: Callable[[], None] = lambda: None,
        flush: Optional[Callable[[], None]] = None,
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f'depth={depth!r}, expected a number of batches, 1 or more.')
        if not timeout > 0:
            raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds.')
        self.ahead = depth
        self._encode, self._timeout = encode, timeout
        self._flush = flush
        self._worker = BackgroundWorker('feature-prefetch', prepare)
        self._encoded: Deque[Tuple[int, Future]] = deque()
        self._waited = 0.0

    def request(self, item: Item) -> None:  # noqa: D102
        if self._flush is None:
            future = self._worker.submit(self._run, item)
        else:
            future = Future()
            future.set_result(self._run(item))
            self._flush()
        self._encoded.append((item.number, future))

    def features(self, item: Item) -> Features:  # noqa: D102
        number, future = self._encoded.popleft()
        if number != item.number:
            raise StreamingError(
                f'item {item.number} was asked for and item {number} is next: '
                f'items are fetched in the order they are requested in.'
            )
        begin = time.monotonic()
        wait([future], self._timeout)
        self._waited += time.monotonic() - begin
        if not future.done():
            raise StreamingError(
                f'the features of item {item.number} were not ready within {self._timeout:g} s. '
                f'The encoder hangs or is slow: raise feature_source.timeout, or lower the batch '
                f'size.'
            )
        return future.result()

    def report(self) -> Dict[str, float]:
        """Return ``waited``: seconds the head waited for features since the last report."""
        waited, self._waited = self._waited, 0.0
        return dict(waited=waited)

    def close(self) -> None:
        """End the thread, and drop items that were requested and not fetched."""
        self._worker.close(self._timeout)
        self._encoded.clear()

    def _run(self, item: Item) -> Features:
        with torch.no_grad():
            return tuple(self._encode(item.images))
