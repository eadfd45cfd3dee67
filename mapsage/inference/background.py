"""Work beside the model's: read ahead of it in one thread, and write behind it in another."""
from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Any, Callable, Generator, Iterable, Optional, Type, TypeVar

_T = TypeVar('_T')
_END: Any = object()
_LOOK_SECONDS = 0.1  # how often a thread that waits for room looks whether it is still needed


def read_ahead(items: Iterable[_T], depth: int) -> Generator[_T, None, None]:
    """Yield ``items``, which a thread draws up to ``depth`` ahead.

    What drawing raises is raised here, in its turn. The thread ends when the generator is closed.
    """
    ready: Any = queue.Queue(depth)
    stopped = threading.Event()

    def hand_on(item: Any, error: Optional[BaseException]) -> None:
        while not stopped.is_set():
            try:
                ready.put((item, error), timeout=_LOOK_SECONDS)
                return
            except queue.Full:
                continue

    def draw() -> None:
        try:
            for item in items:
                hand_on(item, None)
                if stopped.is_set():
                    return
        except BaseException as error:  # raised by the thread that asked
            hand_on(None, error)
        else:
            hand_on(_END, None)

    thread = threading.Thread(target=draw, name='read-ahead', daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()


class WriteBehind:
    """Calls a function in a thread, in the order of :meth:`put`.

    At the end of the ``with`` block everything has been done, unless the block raises: then what
    waits is dropped.

    Args:
        function: What to call.
        depth: How many calls may wait.
    """

    def __init__(self, function: Callable[..., None], depth: int) -> None:
        self._function = function
        self._waiting: Any = queue.Queue(depth)
        self._error: Optional[BaseException] = None
        self._dropping = False
        self._thread = threading.Thread(target=self._work, name='write-behind', daemon=True)

    def put(self, *arguments: Any) -> None:
        """Let the thread call the function with ``arguments``; wait while too many calls wait.

        Raises:
            BaseException: What an earlier call raised; no call follows it.
        """
        if self._error is not None:
            raise self._error
        self._waiting.put(arguments)

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self._dropping = kind is not None
        self._waiting.put(_END)
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _work(self) -> None:
        # It goes on taking after an error, so that put never waits for ever.
        while True:
            arguments = self._waiting.get()
            if arguments is _END:
                return
            if self._error is None and not self._dropping:
                try:
                    self._function(*arguments)
                except BaseException as error:  # raised by the thread that puts
                    self._error = error
