"""Run a function of a test file on several real ranks and return what each of them returned."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from warm_python import warm_python

TESTS = Path(__file__).resolve().parent


# Ports below those that Linux gives to outgoing connections and to port 0, in blocks.
PORTS, PORTS_IN_A_BLOCK = range(15000, 32000), 100
_claim: Optional[socket.socket] = None
_ports: Iterator[int] = iter(())


def free_port() -> int:
    """Return a TCP port that nobody listens on, and that no other test is given meanwhile.

    A rank binds the port seconds after this call. So that nobody takes it until then, it is none
    that the kernel chooses for anybody, and it comes from a block of ports that belongs to this
    process alone among all that run these tests.
    """
    global _claim, _ports
    if _claim is None:
        _claim, block = _claim_block()
        _ports = itertools.cycle(block)
    for port in itertools.islice(_ports, PORTS_IN_A_BLOCK):
        with socket.socket() as probe:
            # as torch's own store listens, so that a port in TIME_WAIT counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(('', port))
            except OSError:
                continue
            return port
    raise OSError(f'none of {PORTS_IN_A_BLOCK} ports is free')


def _claim_block() -> Tuple[socket.socket, range]:
    """Return a block of ports, and the socket that is bound for as long as the block is claimed.

    The name of an abstract socket is, like a port, unique in a network namespace, and free again
    when the process ends, however it ends.
    """
    for first in range(PORTS.start, PORTS.stop, PORTS_IN_A_BLOCK):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f'\0mapsage-tests-ports-{first}')
        except OSError:
            claim.close()
            continue
        return claim, range(first, first + PORTS_IN_A_BLOCK)
    raise OSError('other test sessions have claimed all ports')


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    timeout: float = 240,
    environ: Any = None,
) -> List[Any]:
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
    return [
        pickle.loads((folder / f'task{rank}.pkl.out').read_bytes()) for rank in range(world_size)
    ]


def _variables(rank: int, world_size: int, port: str, more: Dict[str, str]) -> Dict[str, str]:
    return {
        **os.environ,
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(world_size),
        'LOCAL_WORLD_SIZE': str(world_size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': port,
        'OMP_NUM_THREADS': '1',
        'PJRT_DEVICE': 'CPU',
        **more,
    }


def _start(task: Path, variables: Dict[str, str]) -> subprocess.Popen:
    with open(f'{task}.log', 'wb') as log:
        return subprocess.Popen(
            [warm_python(), __file__, str(task)],
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


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
        logs = [
            f'--- rank {rank}: {"hangs" if state is None else f"exit status {state}"}\n'
            + Path(folder / f'task{rank}.pkl.log').read_text(errors='replace')[-2500:]
            for rank, state in enumerate(states)
        ]
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
