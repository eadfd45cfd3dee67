"""The hook in one process: what it logs, when it looks, and what ends the run."""

from __future__ import annotations

import glob
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.engine.guards import DeviceCheckError, DeviceCheckHook
from mapsage.engine.guards.device_check_hook import DeviceReport, table
from mapsage.engine.loading.loader_workers import LoaderWorkerError


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    set_current_accelerator(resolve_accelerator('cpu'))


class Break(Hook):
    """Breaks the model before one iteration."""

    def __init__(self, iteration: int, how: str) -> None:
        self.iteration, self.how = iteration, how

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration and self.how == 'nan':
            runner.model.running_mean[0] = float('nan')
        elif runner.iter == self.iteration:
            runner.model.register_buffer('late', torch.empty(1, device='meta'))


def run(tiny_run: ModuleType, folder: Path, *hooks: Hook, interval: int = 2, **kwargs: Any) -> Any:
    model = tiny_run.TinyModel()
    model.register_buffer('running_mean', torch.zeros(3))
    model.register_buffer('mask', torch.tensor([0.0, -float('inf')]))  # a mask by design
    runner = tiny_run.build_runner(
        str(folder), [DeviceCheckHook(interval), *hooks], model, **kwargs
    )
    runner.train()
    return runner


def log_of(folder: Path) -> str:
    (path,) = glob.glob(str(folder / '*' / '*.log'))
    return Path(path).read_text()


def test_a_sound_run_logs_one_table(tmp_path: Path, tiny_run: ModuleType) -> None:
    assert run(tiny_run, tmp_path).iter == 4
    log = log_of(tmp_path)
    assert log.count('device check before training') == 1
    assert 'rank  host' in log and 'good' in log


@pytest.mark.parametrize(
    'how, words',
    [
        ('nan', "rank 0: buffer 'running_mean' holds NaN or infinity"),
        ('move', "rank 0: buffer 'late' is on meta, expected cpu"),
    ],
)
def test_a_fault_is_found_at_the_next_check(
    how: str, words: str, tmp_path: Path, tiny_run: ModuleType
) -> None:
    with pytest.raises(DeviceCheckError) as raised:
        run(
            tiny_run,
            tmp_path,
            Break(3, how),
            default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1)),
        )
    assert 'after iteration 4' in str(raised.value) and words in str(raised.value)
    assert list(raised.value.problems) == [0]
    # the check came before the checkpoint of its iteration
    assert not (tmp_path / 'iter_4.pth').exists() and (tmp_path / 'iter_3.pth').exists()


def test_between_checks_nothing_is_looked_at(tmp_path: Path, tiny_run: ModuleType) -> None:
    assert run(tiny_run, tmp_path, Break(3, 'nan'), interval=3).iter == 4
    assert run(tiny_run, tmp_path / 'off', Break(0, 'nan'), interval=0).iter == 4


def test_weights_that_are_broken_from_the_start(tmp_path: Path, tiny_run: ModuleType) -> None:
    model = tiny_run.TinyModel()
    model.weight.data.fill_(float('nan'))
    runner = tiny_run.build_runner(str(tmp_path), [DeviceCheckHook()], model)
    words = "before testing failed:\n  rank 0: parameter 'weight'"
    with pytest.raises(DeviceCheckError, match=words):
        runner.test()


def test_what_the_check_raises_is_its_answer(tmp_path: Path, tiny_run: ModuleType) -> None:
    class Stubborn(tiny_run.TinyModel):  # type: ignore[name-defined, misc]
        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError('no buffers today')

    runner = tiny_run.build_runner(str(tmp_path), [DeviceCheckHook()], Stubborn())
    words = "the check itself raised KeyError: 'no buffers today'"
    with pytest.raises(DeviceCheckError, match=words):
        runner.test()


def test_a_worker_that_dies_during_the_check_is_no_answer_of_it(
    tmp_path: Path, tiny_run: ModuleType
) -> None:
    class Interrupted(tiny_run.TinyModel):  # type: ignore[name-defined, misc]
        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            raise LoaderWorkerError('as torch raises it in a handler of SIGCHLD')

    runner = tiny_run.build_runner(str(tmp_path), [DeviceCheckHook()], Interrupted())
    with pytest.raises(LoaderWorkerError, match='handler of SIGCHLD'):
        runner.test()


def test_table() -> None:
    good = DeviceReport(host='a', device='gcu:0', tensors=12, mebibytes=1.26, digest='0a1b2c3d')
    bad = DeviceReport(host='node-b', device='gcu:11', problems=['x', 'y'])
    assert table([good, bad]).splitlines() == [
        'rank  host    device  tensors  MiB  weights   result',
        '0     a       gcu:0   12       1.3  0a1b2c3d  good',
        '1     node-b  gcu:11  0        0.0  -         2 problem(s)',
    ]


@pytest.mark.parametrize('arguments', [dict(interval=-1), dict(timeout=0)])
def test_arguments_are_checked(arguments: dict) -> None:
    with pytest.raises(ValueError, match=f'{next(iter(arguments))}='):
        DeviceCheckHook(**arguments)
