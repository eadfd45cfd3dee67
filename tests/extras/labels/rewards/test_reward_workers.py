"""Rewards that processes compute are those of the training process, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT
from warm_python import warm_python

from mapsage.extras.labels.rewards import ComponentsFound, PolygonCount
from mapsage.extras.labels.rewards.reward_functions import Rewards


def _maps(tiles: int = 3, maps: int = 4) -> Any:
    random = np.random.RandomState(0)
    return (
        random.randint(0, 3, (tiles, maps, 20, 24)),
        random.randint(0, 3, (tiles, 20, 24)),
        [f'tile {number}' for number in range(tiles)],
    )


@pytest.mark.parametrize('workers', [1, 2, 5])
def test_workers_give_the_rewards_of_the_training_process(workers: int) -> None:
    # A function that cannot be pickled, and labels that are no uint8.
    functions = [ComponentsFound(), PolygonCount(), lambda predicted, truth: predicted.mean() - 300]
    maps, truth, tiles = _maps()
    here, beside = Rewards(functions), Rewards(functions, workers=workers)
    for offset in (0, 400, -7):
        np.testing.assert_array_equal(
            beside(maps + offset, truth, tiles), here(maps + offset, truth, tiles)
        )


def test_fewer_maps_than_workers() -> None:
    rewards = Rewards([PolygonCount()], workers=3)
    assert rewards(*_maps(1, 2)).shape == (1, 2, 1)


def test_an_error_of_a_function_is_raised_and_the_next_batch_gets_its_own_rewards() -> None:
    class Careful(Exception):
        def __reduce__(self) -> Any:
            raise TypeError('not to be pickled')

    def picky(predicted: np.ndarray, truth: np.ndarray) -> float:
        if predicted.max() > 9:
            raise Careful('label 10 is new')
        return float(predicted.sum())

    maps, truth, tiles = _maps()
    rewards = Rewards([picky], workers=2)
    with pytest.raises(RuntimeError, match='Careful: label 10 is new'):
        rewards(maps + 10, truth, tiles)
    np.testing.assert_array_equal(rewards(maps, truth, tiles)[..., 0], maps.sum((2, 3)))


def test_a_killed_worker_is_named() -> None:
    def deadly(predicted: np.ndarray, truth: np.ndarray) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    with pytest.raises(RuntimeError, match=r'exit statuses .*-9.*Set workers=1 of GroupReward'):
        Rewards([deadly], workers=2)(*_maps())


_RUN = """
import os
import signal
import sys
import numpy as np
from mapsage.extras.labels.rewards import PolygonCount
from mapsage.extras.labels.rewards.reward_functions import Rewards
rewards = Rewards([PolygonCount()], workers=2)
rewards(np.zeros((1, 4, 8, 8), int), np.zeros((1, 8, 8), int), ['a'])
print(*[process.pid for process in rewards._workers._processes], flush=True)
if sys.argv[1] == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(rewards._workers._processes[0].pid, signal.SIGTERM)
assert rewards(np.zeros((1, 4, 8, 8), int), np.zeros((1, 8, 8), int), ['a']).all()
if sys.argv[1] == 'failed':
    raise ValueError('the training failed')
"""


@pytest.mark.parametrize('ending', ['ended', 'failed', 'killed'])
def test_no_worker_outlives_the_training(ending: str, tmp_path: Path) -> None:
    program = tmp_path / 'run.py'
    program.write_text(_RUN)
    done = subprocess.run(
        [warm_python(), str(program), ending],
        cwd=str(ROOT),
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == dict(ended=0, failed=1, killed=-9)[ending], done.stderr
    pids = [int(text) for text in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == 'Z':
            return
        time.sleep(0.05)
    pytest.fail(f'process {pid} is still running')
