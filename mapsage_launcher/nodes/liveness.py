"""Tells other processes that this one is alive, and finds those that have fallen silent."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, Hashable, Optional

_MAX_INTERVAL = 5.0  # seconds


@dataclass
class _Peer:
    beat: Callable[[], None]
    silent: Callable[[float], None]
    heard: float
    allowed: float


class Liveness:
    """Beats to peers from a thread of its own, and reports those from which nothing came.

    The thread does nothing else. So a process is alive to its peers while it computes for minutes,
    waits for a device or compiles, as long as its interpreter runs. What a beat is, and over what
    it travels, is the caller's: a message to an encoder, a key of a store.

    A process that was itself stopped (SIGSTOP, a suspended machine, a call that held the
    interpreter) has heard nobody meanwhile. That time is not held against the peers.

    Args:
        timeout: Seconds without any sign of a peer after which it counts as silent.
        interval: Seconds between two beats; a tenth of ``timeout``, at most 5, when None.
        clock: Function that returns seconds; not a wall clock, which may be set.

    Raises:
        ValueError: If a time is not positive, or ``interval`` is not shorter than ``timeout``.
    """

    def __init__(self, timeout: float, interval: Optional[float] = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if interval is None:
            interval = min(_MAX_INTERVAL, timeout / 10)
        if not 0 < interval < timeout:
            raise ValueError(f'timeout={timeout!r}, interval={interval!r}, expected positive '
                             f'seconds, and several intervals in a timeout.')
        self.timeout, self.interval = timeout, interval
        self._clock = clock
        self._peers: Dict[Hashable, _Peer] = {}
        self._lock = threading.Lock()
        self._last = clock()
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> Liveness:
        """Begin to beat, in a daemon thread; return this object."""
        self._thread = threading.Thread(target=self._run, name='liveness', daemon=True)
        self._thread.start()
        return self

    def watch(self, peer: Hashable, beat: Callable[[], None],
              silent: Callable[[float], None], first: float = 0.0) -> None:
        """Beat to a peer from now on, and watch it; its time begins anew if it is watched already.

        Args:
            peer: Any name of the peer.
            beat: Function that sends a beat and does not wait; called in the thread. If it raises,
                the peer's own silence decides.
            silent: Function that is called once, in the thread, with the seconds since the peer
                was heard; the peer is no longer watched then.
            first: Seconds until its first sign, if they may be more than ``timeout``.
        """
        with self._lock:
            self._peers[peer] = _Peer(beat, silent, self._clock(), max(first, self.timeout))

    def heard(self, peer: Hashable) -> None:
        """Note a sign of a peer, whatever it was; a peer that is not watched is ignored."""
        with self._lock:
            if peer in self._peers:
                self._peers[peer].heard = self._clock()
                self._peers[peer].allowed = self.timeout

    def forget(self, peer: Hashable) -> None:
        """Stop to beat to a peer and to watch it."""
        with self._lock:
            self._peers.pop(peer, None)

    def tick(self) -> None:
        """Report the peers that are silent, and beat to the others; the thread's turn."""
        with self._lock:
            now = self._clock()
            pause, self._last = now - self._last, now
            if pause > self.timeout / 2:
                for peer in self._peers.values():
                    peer.heard = min(now, peer.heard + pause)
            silent = {name: peer for name, peer in self._peers.items()
                      if now - peer.heard > peer.allowed}
            for name in silent:
                del self._peers[name]
            peers = list(self._peers.values())
        for peer in silent.values():
            peer.silent(now - peer.heard)
        for peer in peers:
            try:
                peer.beat()
            except Exception:  # noqa: S112 (one peer that cannot be told must not cost the others)
                continue

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.interval):
            self.tick()
