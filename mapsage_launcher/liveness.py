"""Beats to other processes, and reports those that have fallen silent.

A beat proves that a process and its interpreter run, not that it makes progress. The time in which
this process was itself stopped does not count against its peers. It is used by the watch of a node
(`nodes/node_watch.py`) and between encoders and heads (`mapsage/extras/streaming/wire/`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, Hashable, Optional

_MAX_INTERVAL_SECONDS = 5.0


@dataclass
class _Peer:
    beat: Callable[[], None]
    silent: Callable[[float], None]
    heard: float
    allowed: float


class Liveness:
    """Beats to peers from a separate thread, and reports peers that were silent for too long.

    Because the thread does nothing else, a process stays alive to its peers while it computes for
    minutes, waits for a device or compiles, as long as its interpreter runs. The caller decides
    what a beat is and how it travels.

    A process that was itself stopped (SIGSTOP, a suspended machine, a call that held the
    interpreter) could not hear its peers in that time, so the time does not count against them.

    Args:
        timeout: Seconds without any sign of a peer after which it counts as silent.
        interval: Seconds between two beats; if None, a tenth of ``timeout``, at most 5.
        clock: Function that returns seconds; not a wall clock, which may be set.

    Raises:
        ValueError: If a time is not positive, or ``interval`` is not shorter than ``timeout``.
    """

    def __init__(
        self,
        timeout: float,
        interval: Optional[float] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval is None:
            interval = min(_MAX_INTERVAL_SECONDS, timeout / 10)
        if not 0 < interval < timeout:
            raise ValueError(
                f'timeout={timeout!r}, interval={interval!r}, expected positive '
                f'seconds, and several intervals in a timeout.'
            )
        self.timeout, self.interval = timeout, interval
        self._clock = clock
        self._peers: Dict[Hashable, _Peer] = {}
        self._lock = threading.Lock()
        self._last = clock()
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> Liveness:
        """Start to beat in a daemon thread; return this object."""
        self._thread = threading.Thread(target=self._run, name='liveness', daemon=True)
        self._thread.start()
        return self

    def watch(
        self,
        peer: Hashable,
        beat: Callable[[], None],
        silent: Callable[[float], None],
        first: float = 0.0,
    ) -> None:
        """Beat to a peer from now on, and watch it. A watched peer's time starts again.

        Args:
            peer: Any name of the peer.
            beat: Function that sends a beat without waiting; called in the thread. If it raises,
                the peer stays watched, and its silence decides.
            silent: Function that is called once, in the thread, with the seconds since the last
                sign of the peer. The peer is not watched any longer then.
            first: Seconds until the peer's first sign, if that may take longer than ``timeout``.
        """
        with self._lock:
            self._peers[peer] = _Peer(beat, silent, self._clock(), max(first, self.timeout))

    def heard(self, peer: Hashable) -> None:
        """Record a sign of life of a peer; does nothing if the peer is not watched."""
        with self._lock:
            if peer in self._peers:
                self._peers[peer].heard = self._clock()
                self._peers[peer].allowed = self.timeout

    def forget(self, peer: Hashable) -> None:
        """Stop beating to a peer and watching it."""
        with self._lock:
            self._peers.pop(peer, None)

    def tick(self) -> None:
        """Report the silent peers and beat to the others; the thread calls this."""
        with self._lock:
            now = self._clock()
            pause, self._last = now - self._last, now
            if pause > self.timeout / 2:
                for peer in self._peers.values():
                    peer.heard = min(now, peer.heard + pause)
            silent = {
                name: peer for name, peer in self._peers.items() if now - peer.heard > peer.allowed
            }
            for name in silent:
                del self._peers[name]
            peers = list(self._peers.values())
        for peer in silent.values():
            peer.silent(now - peer.heard)
        for peer in peers:
            try:
                peer.beat()
            # The caller's function may raise anything. One peer that cannot be reached must not
            # keep the beat from the others.
            except Exception:
                continue

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.interval):
            self.tick()
