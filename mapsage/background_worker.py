"""A thread that makes calls one after the other."""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any, Callable, Optional


class BackgroundWorker:
    """Makes calls in a thread, in the order of :meth:`submit`, and returns futures.

    ``ThreadPoolExecutor(1)`` does the same, but the interpreter waits for its thread at the end. A
    call that hangs on a device or waits for another rank would then keep a failed process alive, so
    this thread is a daemon. It starts with the first call.

    Args:
        name: Name of the thread.
        prepare: Function that is called in the thread before the first call, since the current
            device is a thread's own. If it raises, so does the call, and the next call tries again.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._name, self._prepare = name, prepare
        self._calls: Any = None
        self._thread: Optional[threading.Thread] = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Let the thread call ``function``; the future has its result or what it raised."""
        if self._thread is None:
            # A thread that outlived its close() keeps its own queue.
            self._calls = queue.Queue()
            self._thread = threading.Thread(target=self._work, args=(self._calls,),
                                            name=self._name, daemon=True)
            self._thread.start()
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self, timeout: Optional[float] = None) -> None:
        """Cancel the calls that have not begun, let the current one end, and end the thread.

        Args:
            timeout: Seconds to wait for the current call; None waits until it ends.
        """
        if self._thread is None:
            return
        while True:
            try:
                self._calls.get_nowait()[0].cancel()
            except queue.Empty:
                break
        self._calls.put(None)
        self._thread.join(timeout)
        self._thread = None

    def _work(self, calls: queue.Queue) -> None:
        ready = False
        while True:
            call = calls.get()
            if call is None:
                return
            ready = self._make(call, ready)
            del call  # its arguments and its result may be large, and the next one may be far

    def _make(self, call: Any, ready: bool) -> bool:
        """Make a call and return whether the thread is prepared."""
        future, function, arguments = call
        try:
            if not ready:
                self._prepare()
            ready = True
            result = function(*arguments)
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)
        return ready
