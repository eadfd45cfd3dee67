"""Run a function of a test file on several real ranks and return what each of them returned."""
from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from warm_python import warm_python

TESTS = Path(__file__).resolve().parent


def free_port() -> int:
    """Return a TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any,
              timeout: float = 60, environ: Any = None) -> List[Any]:
    """Run ``function(*args)`` as ranks 0 to ``world_size - 1``; return the results in that order.

    ``function`` is a top-level function of a test file; each rank is a Python of its own with the
    variables of torchrun. A rank that raises fails the test with its traceback, and so does one
    that is not done after ``timeout`` seconds; nothing is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = function.__code__.co_filename
    port = str(free_port())
    ranks = []
    try:
        for rank in range(world_size):
            task = folder / f'task{rank}.pkl'
            task.write_bytes(pickle.dumps((source, function.__name__, args)))
            ranks.append(_start(task, _variables(rank, world_size, port, environ or {})))
        _wait(ranks, time.monotonic() + timeout, folder)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [pickle.loads((folder / f'task{rank}.pkl.out').read_bytes())
            for rank in range(world_size)]


def _variables(rank: int, world_size: int, port: str, more: Dict[str, str]) -> Dict[str, str]:
    return {**os.environ, 'RANK': str(rank), 'LOCAL_RANK': str(rank),
            'WORLD_SIZE': str(world_size), 'LOCAL_WORLD_SIZE': str(world_size),
            'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port, 'OMP_NUM_THREADS': '1',
            'PJRT_DEVICE': 'CPU', **more}


def _start(task: Path, variables: Dict[str, str]) -> subprocess.Popen:
    with open(f'{task}.log', 'wb') as log:
        return subprocess.Popen([warm_python(), __file__, str(task)], env=variables, stdout=log,
                                stderr=subprocess.STDOUT)


def _wait(ranks: List[subprocess.Popen], deadline: float, folder: Path) -> None:
    while any(process.poll() is None for process in ranks):
        failed = any(process.poll() for process in ranks)
        if failed:
            time.sleep(0.5)  # the others may be about to say more
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    states = [process.poll() for process in ranks]
    if any(state != 0 for state in states):
        logs = [f'--- rank {rank}: {"hangs" if state is None else f"exit status {state}"}\n'
                + Path(folder / f'task{rank}.pkl.log').read_text(errors='replace')[-2500:]
                for rank, state in enumerate(states)]
        raise AssertionError('\n'.join(logs))


def _run_task(task: str) -> None:
    with open(task, 'rb') as file:
        source, name, args = pickle.load(file)
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    import mapsage  # noqa: F401  (as tests/conftest.py does)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, name)(*args)
    with open(f'{task}.out', 'wb') as file:
        pickle.dump(result, file)
    import torch.distributed as dist
    if dist.is_initialized():
        dist.destroy_process_group()  # left to the interpreter's end, gloo may abort the process


if __name__ == '__main__':
    _run_task(sys.argv[1])
