"""The rendezvous store of torch, made safe for several threads and for a keeper that hangs.

In torch 1.10, two threads that send requests at the same time get each other's answers and then
wait forever. A single lock per process prevents that. ``job_store.py`` decides which store a job
uses.
"""

from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, TypeVar

import torch.distributed as dist

# Held for one round trip, and while a group is made, because torch then uses the store itself.
store_lock = threading.RLock()
# torch sets no deadline for a request: it would wait forever for a keeper that is stopped.
_ANSWER_SECONDS = 60.0
# The request without an answer, by the id of its store.
_stuck: Dict[int, threading.Thread] = {}
_Answer = TypeVar('_Answer')


class LockedStore:
    """A store for one thread at a time. No call waits for a key that is not set yet.

    A request without an answer within a minute raises RuntimeError. Later requests do so too until
    that answer has come.

    Args:
        store: Store of torch, of any kind.

    Attributes:
        requests: Number of requests that this object has sent.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests = 0

    def add(self, key: str, more: int) -> int:
        """Add to a counter and return its value; adding 0 reads it."""
        return int(self._answer(lambda: self._store.add(key, more)))

    def set(self, key: str, text: str) -> None:
        """Store a text once; characters that UTF-8 cannot encode become backslash escapes."""
        self._answer(
            lambda: self._store.set(key, text.encode('utf-8', 'backslashreplace').decode())
        )
        # A counter marks the key as set, because the store of torch 1.10 cannot check for a key.
        self.add(f'{key}/set', 1)

    def find(self, key: str) -> Optional[str]:
        """Return the text of a key, or None if it has not been set."""
        if not self.add(f'{key}/set', 0):
            return None
        return bytes(self._answer(lambda: self._store.get(key))).decode('utf-8', 'replace')

    def _answer(self, request: Callable[[], _Answer]) -> _Answer:
        """Send a request on another thread, and return its answer or raise its error.

        Raises:
            RuntimeError: If there is no answer within a minute, or if an earlier request of this
                process to the same store still waits.
        """
        answers: List[_Answer] = []
        errors: List[Exception] = []

        def send() -> None:
            try:
                answers.append(request())
            # Handed to the thread that waits for the answer, which raises it.
            except Exception as error:
                errors.append(error)

        with store_lock:
            self.requests += 1
            stuck_thread = _stuck.get(id(self._store))
            if stuck_thread is None or not stuck_thread.is_alive():
                _stuck.pop(id(self._store), None)
                thread = threading.Thread(target=send, daemon=True, name='mapsage store')
                thread.start()
                thread.join(_ANSWER_SECONDS)
                if not answers and not errors:
                    _stuck[id(self._store)] = thread
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError(f'no answer from the rendezvous store in {_ANSWER_SECONDS:g} s')
        return answers[0]
