"""The source that encodes ahead of the head, on the head's device."""
from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Tuple

import torch

from .source import Encode, Features, FeatureSource, Item, StreamingError


class Prefetched(FeatureSource):
    """Encodes a limited number of items while the head trains.

    On an eager device a thread encodes, and its kernels share the device with those of the head. A
    lazy device queues work by itself: there an item is encoded and flushed when it is requested, so
    that the device computes it while the head's step is recorded.

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

    def __init__(self, encode: Encode, depth: int = 2, timeout: float = 600.,
                 prepare: Callable[[], None] = lambda: None,
                 flush: Optional[Callable[[], None]] = None) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f'depth={depth!r}, expected a number of batches, 1 or more.')
        if not timeout > 0:
            raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds.')
        self.ahead = depth
        self._encode, self._timeout = encode, timeout
        self._prepare, self._flush = prepare, flush
        self._encoded: Deque[Tuple[int, Features]] = deque()
        self._orders: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()
        self._thread: Optional[threading.Thread] = None
        self._waited = 0.0

    def request(self, item: Item) -> None:  # noqa: D102
        if self._flush is not None:
            self._encoded.append((item.number, self._run(item)))
            self._flush()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name='feature-prefetch', daemon=True)
            self._thread.start()
        self._orders.put(item)

    def features(self, item: Item) -> Features:  # noqa: D102
        begin = time.monotonic()
        number, features = self._next(item)
        self._waited += time.monotonic() - begin
        if number != item.number:
            raise StreamingError(f'item {item.number} was asked for and item {number} is next: '
                                 f'items are fetched in the order they are requested in.')
        return features

    def report(self) -> Dict[str, float]:
        """Return ``waited``: seconds the head waited for features since the last report."""
        waited, self._waited = self._waited, 0.0
        return dict(waited=waited)

    def close(self) -> None:
        """End the thread; items that were requested and not fetched are dropped."""
        if self._thread is not None:
            while not self._orders.empty():  # the item that is being encoded ends by itself
                try:
                    self._orders.get_nowait()
                except queue.Empty:
                    break
            self._orders.put(None)
            self._thread.join(self._timeout)
            self._thread = None
        self._encoded.clear()

    def _next(self, item: Item) -> Tuple[int, Features]:
        if self._flush is not None:
            return self._encoded.popleft()
        try:
            number, answer = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            raise StreamingError(
                f'the features of item {item.number} were not ready within {self._timeout:g} s. '
                f'The encoder hangs or is slow: raise feature_source.timeout, or lower the batch '
                f'size.') from None
        if isinstance(answer, BaseException):
            raise answer
        return number, answer

    def _run(self, item: Item) -> Features:
        with torch.no_grad():
            return tuple(self._encode(item.images))

    def _work(self) -> None:
        ready = False
        while True:
            item = self._orders.get()
            if item is None:
                return
            answer: Any
            try:
                if not ready:
                    self._prepare()
                    ready = True
                answer = self._run(item)
            except BaseException as error:  # raised again where the features are asked for
                answer = error
            self._answers.put((item.number, answer))
