"""A thread for calls that may hang, and memory that a process gives back.

Work that may hang on a device or another rank is done by :class:`BackgroundWorker`: unlike the
threads of `concurrent.futures`, it never keeps a failed process alive.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from concurrent.futures import Future
from typing import Any, Callable, Optional, Tuple

# A future, a function and its arguments.
_Call = Tuple[Future, Callable[..., Any], Tuple[object, ...]]


class BackgroundWorker:
    """Makes calls in a thread, in the order of :meth:`submit`, and returns futures.

    ``ThreadPoolExecutor(1)`` does the same, but the interpreter waits for its thread at exit. This
    thread is a daemon, so a call that hangs does not. The thread starts with the first call.

    Args:
        name: Name of the thread.
        prepare: Function that is called in the thread before the first call; the current device,
            for example, must be set in each thread. If it raises an error, the call raises it, too,
            and the next call tries again.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._name, self._prepare = name, prepare
        self._calls: queue.Queue[Optional[_Call]] = queue.Queue()
        self._thread: Optional[threading.Thread] = None

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future:
        """Let the thread call ``function``; the future has its result or its error."""
        if self._thread is None:
            # A thread that outlived its close() keeps its own queue.
            self._calls = queue.Queue()
            self._thread = threading.Thread(
                target=self._work, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self, timeout: Optional[float] = None) -> None:
        """Cancel the calls that have not begun, wait for the current call, and end the thread.

        Args:
            timeout: Seconds to wait for the current call; None waits until it ends.
        """
        if self._thread is None:
            return
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call[0].cancel()
        self._calls.put(None)
        self._thread.join(timeout)
        self._thread = None

    def _work(self, calls: queue.Queue[Optional[_Call]]) -> None:
        is_prepared = False
        while True:
            call = calls.get()
            if call is None:
                return
            is_prepared = self._run(call, is_prepared)
            # Free its arguments and its result, because the next call may come much later.
            del call

    def _run(self, call: _Call, is_prepared: bool) -> bool:
        """Make a call and return whether the thread is prepared."""
        future, function, arguments = call
        try:
            if not is_prepared:
                self._prepare()
            is_prepared = True
            result = function(*arguments)
        # Any error is raised in the thread that asks for the result, because this thread has no
        # caller.
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return is_prepared


def return_free_memory() -> None:
    """Return the free memory of this process to the system; takes about a millisecond.

    After blocks of many sizes were allocated and freed, glibc keeps tens of megabytes for later.
    Other C libraries have no such call; then this does nothing.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
