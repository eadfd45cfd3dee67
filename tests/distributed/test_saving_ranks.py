"""A save that fails on rank 0 ends all ranks; rank 0's clock decides for all when to save."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Dict, List

import mmengine.runner.runner
import pytest
from forked import fork_scenarios
from mmengine.hooks import Hook
from ranks import run_ranks
from toy_runs import toy_runner

from mapsage.distributed import RankError, RankLostError


class Notes(Hook):
    """Notes the iterations whose checkpoints this rank takes part in; some ranks are slow."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.saves: List[int] = []

    def gather_state(self, runner: Any) -> None:
        self.saves.append(runner.iter + 1)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        time.sleep(0.002 * (runner.rank == 1))


class DiskOfTheEnd(Hook):
    """Keeps rank 0's disk busy until ``until``: the end of the steps, or the next save."""

    def __init__(self, until: str) -> None:
        self.until, self.free = until, threading.Event()

    def before_train(self, runner: Any) -> None:
        runner._background._worker.submit(self.free.wait)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if self.until == 'save' and runner.iter + 1 == 4:  # CheckpointHook comes next, and waits
            threading.Timer(0.3, self.free.set).start()
        elif runner.iter + 1 == dict(step=4, save=0, end=6)[self.until]:
            self.free.set()
            if self.until == 'step' and runner.rank == 0:  # until the save before has failed
                runner._background._worker.submit(int).result()


def clock(folder: Path, minutes: float, more: Dict[str, Any]) -> List[int]:
    notes = Notes()
    runner, _ = toy_runner(
        folder,
        hooks=[notes],
        **{
            'default_hooks.checkpoint.interval': -1,
            'train_cfg.max_iters': 20,
            'train_cfg.val_interval': 100,
            'default_hooks.checkpoint.interval_minutes': minutes,
            'default_hooks.checkpoint.max_keep_ckpts': 2,
            **more,
        },
    )
    runner.train()
    return notes.saves


def fails(folder: Path, until: str) -> Any:
    interval = dict(step=3, save=2, end=6)[until]
    (folder / 'run' / f'iter_{interval}.pth').mkdir(parents=True, exist_ok=True)  # in the way
    runner, record = toy_runner(
        folder / 'run',
        hooks=[DiskOfTheEnd(until)],
        **{
            'train_cfg.max_iters': 6,
            'train_cfg.val_interval': 100,
            'default_hooks.checkpoint.interval': interval,
        },
    )
    try:
        runner.train()
    except (RankError, RankLostError, OSError) as error:
        return type(error).__name__, str(error), len(record.losses)
    return 'nothing'


def all_scenarios(folder: Path) -> Dict[str, Any]:
    mmengine.runner.runner.collect_env = dict  # it asks a compiler, seconds a run
    return fork_scenarios(
        dict(
            always=(clock, 3, Path, 1e-9, {}),
            sometimes=(clock, 3, Path, 0.03 / 60, {}),
            accumulating=(clock, 5, Path, 0.03 / 60, {'optim_wrapper.accumulative_counts': 3}),
            step=(fails, 3, Path, 'step'),
            save=(fails, 3, Path, 'save'),
            end=(fails, 2, Path, 'end'),
        ),
        folder,
    )


@pytest.fixture(scope='module')
def told(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('saves')
    return run_ranks(all_scenarios, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('name', ['always', 'sometimes', 'accumulating'])
def test_all_ranks_save_when_the_clock_of_rank_0_says_so(name: str, told: Dict[str, Any]) -> None:
    saves = told[name]
    assert isinstance(saves, list), saves
    assert all(each == saves[0] for each in saves)
    assert saves[0][-1] == 20 and len(saves[0]) > 2
    assert name != 'always' or saves[0] == list(range(1, 21))


@pytest.mark.parametrize('when', ['step', 'save', 'end'])
def test_an_error_of_the_disk_ends_all_ranks(when: str, told: Dict[str, Any]) -> None:
    assert isinstance(told[when], list), told[when]
    first, *others = told[when]
    assert first[0] == 'SaveError' and '.pth was not written' in first[1]
    assert first[2] == dict(step=4, save=3, end=6)[when]  # steps that were done
    for other in others:
        if when == 'step' and other[0] == 'RankLostError':
            continue  # here rank 0 keeps the store with its note, and it has ended
        assert other[0] == 'RankError' and 'rank 0 failed' in other[1]
        assert '.pth was not written' in other[1] and 'continue with --resume' in other[1]
