"""Both ends of real links in one process: over gloo, with a thread for each end."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from mapsage.features.wire.header import Header
from mapsage.features.wire.link import Link, Receiver

TIMEOUT = 30.0  # seconds; a deadline for a test that hangs, nothing waits so long


def both(*calls: Callable[[], Any]) -> List[Any]:
    """Return what calls return that must run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(TIMEOUT) for future in [pool.submit(call) for call in calls]]


def open_pair() -> Tuple[Link, Link]:
    """Return the head's link to an encoder, and the encoder's to the head; neither is started."""
    # Not open_links: its lock on the store is one for all threads of a process.
    store = dist.HashStore()
    groups = both(*(lambda end=end: dist.ProcessGroupGloo(
        store, end, 2, timedelta(seconds=TIMEOUT)) for end in range(2)))
    return (Link(groups[1], 1, 'encoder rank 1', TIMEOUT),
            Link(groups[0], 0, 'head rank 0', TIMEOUT))


class Kept(Receiver):
    """Keeps the messages that arrive, and why the link ended."""

    def __init__(self) -> None:
        self.messages: List[Tuple[Header, torch.Tensor, Optional[str]]] = []
        self.ended: List[Optional[str]] = []
        self._changed = threading.Condition()

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        return None

    def received(self, link: Link, header: Header, payload: torch.Tensor,
                 damage: Optional[str]) -> None:
        with self._changed:
            self.messages.append((header, payload, damage))
            self._changed.notify_all()

    def lost(self, link: Link, reason: Optional[str]) -> None:
        with self._changed:
            self.ended.append(reason)
            self._changed.notify_all()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Return once something happened, such as ``lambda: kept.ended``."""
        with self._changed:
            assert self._changed.wait_for(happened, TIMEOUT), (
                [header.kind.name for header, _, _ in self.messages][:50], self.ended)
