"""The rendezvous store, safe for several threads of a process.

In torch 1.10, two threads that ask at once get each other's answers and then wait forever. One lock
per process prevents that; the client of later versions has its own.
"""
from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

# Held for one round trip, and while a group is made: making one uses the store from inside torch.
store_lock = threading.RLock()
# A request has no deadline of its own: one to a keeper that is stopped would never return.
_ANSWER_SECONDS = 60.0
_stuck: Dict[int, threading.Thread] = {}  # by store: the request without an answer


class LockedStore:
    """A store that one thread at a time can use; no call waits for a key that is not set yet.

    Args:
        store: Store of torch of any kind.

    A request that is not answered within a minute raises RuntimeError, and so do those after it
    as long as its answer has not come.

    Attributes:
        requests: Number of requests that this object has made.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def add(self, key: str, more: int) -> int:
        """Add to a counter and return its value; adding 0 reads it."""
        return int(self._answer(lambda: self._store.add(key, more)))

    def set(self, key: str, text: str) -> None:
        """Store a text once; what UTF-8 cannot encode becomes a backslash escape."""
        self._answer(lambda: self._store.set(
            key, text.encode('utf-8', 'backslashreplace').decode()))
        self.add(f'{key}/set', 1)  # the store of torch 1.10 cannot tell whether a key is there

    def find(self, key: str) -> Optional[str]:
        """Return a text that has been set, None where it has not."""
        if not self.add(f'{key}/set', 0):
            return None
        return bytes(self._answer(lambda: self._store.get(key))).decode('utf-8', 'replace')

    def _answer(self, request: Callable[[], Any]) -> Any:
        answers: List[Tuple[Any, Optional[Exception]]] = []

        def ask() -> None:
            try:
                answers.append((request(), None))
            except Exception as error:  # raised below, by the thread that wants the answer
                answers.append((None, error))

        with store_lock:
            self.requests += 1
            before = _stuck.get(id(self._store))
            if before is None or not before.is_alive():
                _stuck.pop(id(self._store), None)
                thread = threading.Thread(target=ask, daemon=True, name='mapsage store')
                thread.start()
                thread.join(_ANSWER_SECONDS)
                if not answers:
                    _stuck[id(self._store)] = thread
        if not answers:
            raise RuntimeError(
                f'no answer from the rendezvous store in {_ANSWER_SECONDS:g} s')
        value, error = answers[0]
        if error is not None:
            raise error
        return value


def silent_ranks(store: LockedStore, name: str, rank: int, size: int,
                 seconds: float) -> List[int]:
    """Report under a name, and return the ranks of a group that do not.

    The first that reports reads the reports of all, and the others its finding: some requests for
    each rank, not for each pair of them.

    Args:
        store: Store of the group.
        name: Name of the roll call; used once.
        rank: Rank of this process in the group.
        size: Number of ranks.
        seconds: Time without a report after which those missing are taken for silent.
    """
    store.add(f'{name}/{rank}', 1)
    seen, first = 0, store.add(f'{name}/reports', 1) == 1
    pause, deadline = 0.01, time.monotonic() + (seconds if first else 10 * seconds)
    while time.monotonic() < deadline:
        if first:
            count = store.add(f'{name}/reports', 0)
            if count == size:
                break
            if count > seen:
                seen, deadline, pause = count, time.monotonic() + seconds, 0.01
        else:
            found = store.find(f'{name}/silent')
            if found is not None:
                return [int(each) for each in json.loads(found)]
        time.sleep(pause)
        pause = min(2 * pause, seconds / 6)
    silent = [each for each in range(size) if not store.add(f'{name}/{each}', 0)]
    if first:
        store.set(f'{name}/silent', json.dumps(silent))
    return silent
