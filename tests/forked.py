"""Real ranks forked from one process that has imported everything: many scenarios for one start."""
from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Callable, List

from ranks import free_port

DIED = '(this rank ended without an answer)'


def fork_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any,
               timeout: float = 40) -> List[Any]:
    """Return what ``function(*args)`` returns on each of ``world_size`` forked ranks.

    A rank that ends itself answers :data:`DIED`. One that raises, or is not done after ``timeout``
    seconds, is an AssertionError with every rank's answer; nothing is left running. The calling
    process must not have started torch.distributed, nor a thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            _be_rank(rank, world_size, port, folder, function, args)
        pids.append(pid)
    deadline = time.monotonic() + timeout
    waiting = set(pids)
    while waiting and time.monotonic() < deadline:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    answers = [_answer(folder / f'{rank}.answer', pids[rank] in waiting)
               for rank in range(world_size)]
    if any(not good for good, _ in answers):
        raise AssertionError('\n'.join(f'--- rank {rank}: {text}'
                                       for rank, (_, text) in enumerate(answers)))
    return [value for _, value in answers]


def _answer(path: Path, hangs: bool) -> Any:
    if hangs:
        return False, 'hangs'
    return pickle.loads(path.read_bytes()) if path.exists() else (True, DIED)


def _be_rank(rank: int, world_size: int, port: str, folder: Path, function: Callable[..., Any],
             args: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    partial = folder / f'{rank}.partial'
    partial.write_bytes(pickle.dumps(answer))
    partial.rename(folder / f'{rank}.answer')
    # past the interpreter's end: what the parent has registered there is not this process's
    os._exit(0)
