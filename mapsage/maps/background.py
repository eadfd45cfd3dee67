"""Threads that keep the model busy: one reads ahead of it, another writes behind it.

All hand their errors to the calling thread: `read_ahead` and `map_in_order` when the failed item is
due, `WriteBehind` at the next call or at the end of its block. `strips.py` uses them.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from itertools import cycle
from types import TracebackType
from typing import Any, Callable, Deque, Generator, Iterable, Optional, Tuple, Type, TypeVar

from mapsage.base.process import BackgroundWorker

_T = TypeVar('_T')
_R = TypeVar('_R')
_END: Any = object()


def read_ahead(items: Iterable[_T], depth: int) -> Generator[_T, None, None]:
    """Yield ``items``, which a thread draws up to ``depth`` items ahead.

    An error while drawing an item is raised here when that item is due. The thread ends when the
    generator is closed.
    """
    iterator, worker = iter(items), BackgroundWorker('read-ahead')
    drawn: Deque[Future] = deque(worker.submit(next, iterator, _END) for _ in range(depth))
    try:
        while True:
            item = drawn.popleft().result()
            if item is _END:
                return
            drawn.append(worker.submit(next, iterator, _END))
            yield item
    finally:
        worker.close()


def map_in_order(
    function: Callable[[_T], _R], items: Iterable[_T], threads: int
) -> Generator[Tuple[_T, _R], None, None]:
    """Yield each item with the function's result, in the order of the items.

    One more item than there are threads is drawn, so that a thread that has finished finds the
    next item. An error is raised here when its item is due. The threads end when the generator is
    closed.

    Args:
        function: Function that several threads may call at the same time.
        items: Items, drawn in the calling thread.
        threads: Number of threads; with 1 the calling thread calls the function.
    """
    if threads == 1:
        for item in items:
            yield item, function(item)
        return
    workers = [BackgroundWorker(f'compute-{number}') for number in range(threads)]
    waiting: Deque[Tuple[_T, Future]] = deque()
    try:
        for item, worker in zip(items, cycle(workers)):
            waiting.append((item, worker.submit(function, item)))
            # The result leaves this list before it is used, so that it can be freed after that.
            if len(waiting) > threads:
                first, result = waiting.popleft()
                yield first, result.result()
                del first, result
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
            del first, result
    finally:
        for worker in workers:
            worker.close()


class WriteBehind:
    """Calls a function in a thread, in the order of :meth:`put`.

    The ``with`` block ends after all calls were made. If the block raises, waiting calls are
    dropped.

    Args:
        function: Function to call.
        depth: Number of calls that may wait.
    """

    def __init__(self, function: Callable[..., None], depth: int) -> None:
        self._function, self._depth = function, depth
        self._worker = BackgroundWorker('write-behind')
        self._calls: Deque[Future] = deque()
        self._error: Optional[BaseException] = None

    def put(self, *arguments: object) -> None:
        """Let the thread call the function with ``arguments``; wait while too many calls wait.

        Raises:
            BaseException: The error of an earlier call; no call is made after it.
        """
        # One call is running, the rest of the queue waits.
        if len(self._calls) > self._depth:
            wait([self._calls.popleft()])
        if self._error is not None:
            raise self._error
        self._calls.append(self._worker.submit(self._call, *arguments))

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is None:
            wait(self._calls)
        self._worker.close()
        if kind is None and self._error is not None:
            raise self._error

    def _call(self, *arguments: object) -> None:
        if self._error is not None:
            return
        try:
            self._function(*arguments)
        # Handed to the thread that puts, which raises it.
        except BaseException as error:
            self._error = error
