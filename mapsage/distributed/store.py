"""The rendezvous store, safe for several threads of a process.

In torch 1.10, two threads that ask at once get each other's answers and then wait forever. One lock
per process prevents that; the client of later versions has its own.
"""
from __future__ import annotations

import threading
from typing import Any, List

# Held for one round trip, and while a group is made: making one uses the store from inside torch.
store_lock = threading.RLock()


class LockedStore:
    """A store that one thread at a time can use; no call waits for a key that is not set yet.

    Args:
        store: Store of torch of any kind.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, more: int) -> int:
        """Add to a counter and return its value; adding 0 reads it."""
        with store_lock:
            return int(self._store.add(key, more))

    def set(self, key: str, text: str) -> None:
        """Store a text; what UTF-8 cannot encode becomes a backslash escape."""
        with store_lock:
            self._store.set(key, text.encode('utf-8', 'backslashreplace').decode())

    def get(self, key: str) -> str:
        """Return a text that has been set."""
        with store_lock:
            return bytes(self._store.get(key)).decode('utf-8', 'replace')

    def check(self, keys: List[str]) -> bool:
        """Return whether all keys have been set."""
        with store_lock:
            return bool(self._store.check(keys))
