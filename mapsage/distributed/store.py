"""The rendezvous store, used by several threads of a process.

torch 1.10's client answers two threads that ask at once with each other's answer, and then neither
ever gets its own. One lock a process keeps them apart; later clients have one of their own.
"""
from __future__ import annotations

import threading
from typing import Any, List

# Held for one round trip, and while a group is made: making one uses the store from inside torch.
store_lock = threading.RLock()


class LockedStore:
    """Gives one thread at a time a store. Its calls do not wait for keys that are not there yet.

    Args:
        store: A store of torch, of any kind.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, more: int) -> int:
        """Add to a counter and return it; 0 reads it."""
        with store_lock:
            return int(self._store.add(key, more))

    def set(self, key: str, text: str) -> None:
        """Store a text; what UTF-8 cannot encode becomes a backslash escape."""
        with store_lock:
            self._store.set(key, text.encode('utf-8', 'backslashreplace').decode())

    def get(self, key: str) -> str:
        """Return a text that is known to be there."""
        with store_lock:
            return bytes(self._store.get(key)).decode('utf-8', 'replace')

    def check(self, keys: List[str]) -> bool:
        """Return whether all keys are there."""
        with store_lock:
            return bool(self._store.check(keys))
