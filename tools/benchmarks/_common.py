"""What the benchmarks share."""

import datetime
import os
import platform
import socket
from pathlib import Path
from typing import Callable

import cv2
import numpy as np
import torch


def describe_machine() -> str:
    """Return one line: date, processor, cores, Python, torch."""
    model = 'unknown processor'
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists():
        names = [
            line.split(':', 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith('model name')
        ]
        model = names[0] if names else model
    return (
        f'{datetime.date.today()}, {model}, {os.cpu_count()} cores, Python '
        f'{platform.python_version()}, torch {torch.__version__}'
    )


def write_tiles(root: Path, count: int = 32, size: int = 128) -> Path:
    """Write ``count`` noise tiles with masks under ``root`` in LoveDA's layout."""
    random = np.random.RandomState(0)
    for kind, shape, top in (('img_dir', (size, size, 3), 256), ('ann_dir', (size, size), 8)):
        folder = root / kind / 'train'
        folder.mkdir(parents=True)
        for number in range(count):
            coarse = random.randint(0, top, (8, 8) + shape[2:]).astype(np.uint8)
            tile = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_NEAREST)
            cv2.imwrite(str(folder / f'{number}.png'), tile)
    return root


def fork_ranks(world: int, be_rank: Callable[[int, int, int], None]) -> None:
    """Run ``be_rank(rank, world, port)`` in forked processes and wait for them."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            be_rank(rank, world, port)
            os._exit(0)
        pids.append(pid)
    states = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(states), states
