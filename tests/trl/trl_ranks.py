"""Programs on several ranks, each with its own output, for tests/trl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List, NamedTuple

from ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / 'examples'
HIDDEN = Path(__file__).with_name('without_mm')


class Ranks(NamedTuple):
    """What the ranks of a program ended with, and what they printed, in order."""

    statuses: List[int]
    outputs: List[str]


def run_ranks(program: Path, *arguments: Any, ranks: int = 2, timeout: float = 240) -> Ranks:
    """Run a program on ranks, as torchrun would, each with its own output."""
    environ = dict(
        os.environ,
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS='1',
        PYTHONPATH=os.pathsep.join(map(str, (HIDDEN, ROOT, EXAMPLES))),
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            text=True,
            env=dict(environ, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Ranks([process.returncode for process in processes], outputs)


def run_command(command: str, *arguments: Any, timeout: float = 240) -> str:
    """Run a page's ``torchrun`` command in the repository to its end; return what it printed."""
    launcher, *words = command.split()
    assert launcher == 'torchrun', command
    # On no fixed port, unlike torchrun's default.
    run = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            *words,
            *map(str, arguments),
        ],
        text=True,
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        env=dict(
            os.environ,
            OMP_NUM_THREADS='1',
            PYTHONPATH=os.pathsep.join(map(str, (HIDDEN, ROOT, EXAMPLES))),
        ),
    )
    assert run.returncode == 0, run.stdout[-4000:]
    return run.stdout


def command_of_page(page: str, program: str) -> str:
    """Return the command of a page of ``docs/how-to`` that runs an example."""
    lines = (ROOT / 'docs' / 'how-to' / page).read_text().splitlines()
    (command,) = (
        line.split('#')[0].strip()
        for line in lines
        if line.split('#')[0].strip().endswith(f' examples/{program}')
    )
    assert command in (EXAMPLES / program).read_text()
    return command
