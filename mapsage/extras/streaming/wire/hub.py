"""The one thread that reads and writes all connections of a process: an event loop.

Sockets, timers and calls from other threads run as callbacks, one after the other, so a callback
must not block. The docstrings say which methods may be called only by callbacks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from functools import partial
from typing import Callable, Deque, List, Tuple

from mapsage_launcher.liveness import Liveness

Call = Callable[[], None]


class Hub:
    """Runs callbacks of ready sockets, of timers and of :meth:`call`, in one thread.

    A process has this thread and the one of :class:`Liveness`, however many links it has; a head that
    connects has one more until its peer has proved itself. A link costs one file descriptor.

    Args:
        peer_timeout: Seconds without any message after which a peer counts as lost.
    """

    def __init__(self, peer_timeout: float) -> None:
        self.liveness = Liveness(peer_timeout)
        self._selector = selectors.DefaultSelector()
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, lambda events: None)
        self._calls: Deque[Call] = deque()
        self._timers: List[Tuple[float, int, Call]] = []
        self._numbers = itertools.count()
        self._users = 0
        self._at_end: List[Call] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name='feature-links', daemon=True)

    @property
    def peer_timeout(self) -> float:
        """Seconds without any message after which a peer counts as lost."""
        return self.liveness.timeout

    def start(self) -> Hub:
        """Start the threads; return this object."""
        self.liveness.start()
        self._thread.start()
        return self

    def call(self, function: Call) -> None:
        """Run a function in the thread. May be called from any thread."""
        self._calls.append(function)
        try:
            self._waker.send(b'x')
        except OSError:
            # The pipe is full, so the thread will wake, or the thread has ended.
            pass

    def later(self, seconds: float, function: Call) -> None:
        """Run a function after some seconds. Call in the thread only."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), function))

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call a function when a socket is ready. Call in the thread only.

        Args:
            sock: Socket to watch.
            events: Events of :mod:`selectors` to wait for; 0 ends the watch.
            ready: Function that receives the events that have happened.
        """
        known = sock.fileno() in self._selector.get_map()
        if known and events:
            self._selector.modify(sock, events, ready)
        elif known:
            self._selector.unregister(sock)
        elif events:
            self._selector.register(sock, events, ready)

    def drop(self, sock: socket.socket) -> None:
        """Shut down and close a socket. Call in the thread only."""
        is_closed = sock.fileno() < 0
        if is_closed:
            return
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)
        try:
            # Loader workers may have inherited the descriptor, and would keep the connection open.
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The socket was not connected, or is not connected any more.
            pass
        sock.close()

    def at_end(self, function: Call) -> None:
        """Call a function when the threads end."""
        self._at_end.append(function)

    def enter(self) -> None:
        """Count one more link that uses the thread."""
        self._users += 1

    def leave(self) -> None:
        """Count one link less; the last one ends the threads. Call in the thread only."""
        self._users -= 1
        self._stopping = self._users <= 0

    def stop(self) -> None:
        """End the threads, even if links are open. May be called from any thread."""
        self._users = 0
        if self._thread.is_alive():
            self.call(self.leave)
            self.join(self.peer_timeout)
        else:
            self._end()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the threads, if no link is left; return whether they have ended."""
        if self._users <= 0:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            wait = None
            if self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            for key, events in self._selector.select(0 if self._calls else wait):
                if key.fileobj is self._awake:
                    self._awake.recv(4096)
                else:
                    self._guarded(partial(key.data, events))
            for _ in range(len(self._calls)):
                self._guarded(self._calls.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])
        self._end()

    def _guarded(self, function: Call) -> None:
        """Call a function. Its error concerns one connection and must not end all of them."""
        try:
            function()
        except BaseException:
            # Errors of a connection are handled in the link. This one is a defect of the program,
            # or of a receiver, so its traceback is printed. stderr may be closed.
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()

    def _end(self) -> None:
        self.liveness.close()
        for function in self._at_end:
            function()
        # A call may bring a new connection, whose peer must see that it is closed.
        while self._calls:
            self._guarded(self._calls.popleft())
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()
