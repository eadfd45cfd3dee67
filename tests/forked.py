"""Real ranks forked from one process that has imported everything: many scenarios for one start."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

from ranks import free_port

DIED = '(this rank ended without an answer)'


# Scenarios that run at the same moment: most of them wait for a deadline, most of the time.
AT_ONCE = 4
PATIENT = 240.0  # seconds: a test that waits for this deadline is a test that fails


class Ranks:
    """Forked ranks that run ``function(*args)``; see :func:`fork_ranks`."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        folder: Path,
        *args: Any,
        timeout: float = PATIENT,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self._folder, self._pids = folder, []
        for rank in range(world_size):
            pid = os.fork()
            if not pid:
                _be_rank(rank, world_size, port, folder, function, args)
            self._pids.append(pid)
        self._deadline = time.monotonic() + timeout
        self._waiting = set(self._pids)

    def ended(self) -> bool:
        """Return whether all have ended, or are out of time."""
        self._waiting -= {pid for pid in self._waiting if os.waitpid(pid, os.WNOHANG)[0]}
        return not self._waiting or time.monotonic() > self._deadline

    def answers(self) -> List[Any]:
        """Return the answers, in rank order, once they have :meth:`ended`."""
        for pid in self._waiting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answers = [
            _answer(self._folder / f'{rank}.answer', pid in self._waiting)
            for rank, pid in enumerate(self._pids)
        ]
        if any(not good for good, _ in answers):
            raise AssertionError(
                '\n'.join(f'--- rank {rank}: {text}' for rank, (_, text) in enumerate(answers))
            )
        return [value for _, value in answers]


def fork_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    timeout: float = PATIENT,
) -> List[Any]:
    """Return what ``function(*args)`` returns on each of ``world_size`` forked ranks.

    A rank that ends itself answers :data:`DIED`. One that raises, or is not done after ``timeout``
    seconds, is an AssertionError with every rank's answer; nothing is left running. The calling
    process must not have started torch.distributed, nor a thread.
    """
    ranks = Ranks(function, world_size, folder, *args, timeout=timeout)
    while not ranks.ended():
        time.sleep(0.01)
    return ranks.answers()


def fork_scenarios(
    scenarios: Dict[Any, Sequence[Any]], folder: Path, timeout: float = PATIENT
) -> Dict[Any, Any]:
    """Fork the ranks of each scenario, :data:`AT_ONCE` scenarios at a time.

    Args:
        scenarios: ``(function, ranks, *arguments)`` by name; ``Path`` as an argument means the
            scenario's own folder.
        folder: Where those are made.
        timeout: Seconds for each scenario.

    Returns:
        By name, the ranks' answers, or the text of the AssertionError.
    """
    told: Dict[Any, Any] = {}
    left, running = list(scenarios.items()), {}
    while left or running:
        while left and len(running) < AT_ONCE:
            name, (function, world, *args) = left.pop(0)
            place = folder / f'scenario {len(told) + len(running)}'
            args = [place if arg is Path else arg for arg in args]
            running[name] = Ranks(function, world, place, *args, timeout=timeout)
        for name in [name for name, ranks in running.items() if ranks.ended()]:
            try:
                told[name] = running.pop(name).answers()
            except AssertionError as error:
                told[name] = str(error)
        time.sleep(0.01)
    return {name: told[name] for name in scenarios}


def _answer(path: Path, hangs: bool) -> Any:
    if hangs:
        return False, 'hangs'
    return pickle.loads(path.read_bytes()) if path.exists() else (True, DIED)


def _be_rank(
    rank: int, world_size: int, port: str, folder: Path, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=port,
    )
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    partial = folder / f'{rank}.partial'
    partial.write_bytes(pickle.dumps(answer))
    partial.rename(folder / f'{rank}.answer')
    # past the interpreter's end: what the parent has registered there is not this process's
    os._exit(0)
