"""A fault on one rank is one DeviceCheckError on all of them, and says which rank has it."""

from __future__ import annotations

import importlib.util
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import mmengine.runner.runner
import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from mmengine.hooks import Hook
from ranks import run_ranks
from support import launch, write_tiny_config

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import device_checks
from mapsage.engine.guards import DeviceCheckError, DeviceCheckHook

TINY_RUN = Path(__file__).resolve().parents[1] / 'tiny_run.py'
ODD = 1  # the rank that has the fault


class Sabotage(Hook):
    """Does on rank :data:`ODD` what the fault's name says."""

    priority = 'HIGH'  # before the check of the same iteration

    def __init__(self, fault: str) -> None:
        self.fault = fault if dist.get_rank() == ODD else ''

    def before_train(self, runner: Any) -> None:
        model = runner.model.module
        if self.fault == 'buffer late':
            model.register_buffer('late', torch.empty(2, device='meta'))
        if self.fault == 'weights before':
            model.weight.data += 1
        if self.fault == 'raises':
            model.named_buffers = None  # what the hook calls now raises TypeError

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.fault == 'batch':
            data_batch['inputs'] = [image[:1] for image in data_batch['inputs']]

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        model = runner.model.module
        if self.fault == 'weights during' and runner.iter == 2:
            model.weight.data += 1
        if self.fault == 'nan' and runner.iter == 3:  # DDP would spread an earlier one
            model.weight.data.fill_(float('nan'))
        if self.fault == 'statistics' and runner.iter == 2:
            model.table += 1


def train(fault: str, work_dir: Path) -> Dict[str, Any]:
    """Train 4 iterations with checks every 2, and return the error that ended it."""
    dist.init_process_group('gloo', timeout=timedelta(seconds=120))
    set_current_accelerator(resolve_accelerator('cpu'))
    spec = importlib.util.spec_from_file_location('tiny_run', TINY_RUN)
    assert spec is not None and spec.loader is not None
    tiny_run = importlib.util.module_from_spec(spec)
    sys.modules['tiny_run'] = tiny_run
    spec.loader.exec_module(tiny_run)
    model = tiny_run.TinyModel()
    model.register_buffer('table', torch.zeros(3))
    runner = tiny_run.build_runner(
        str(work_dir / str(dist.get_rank())),
        [DeviceCheckHook(interval=2), Sabotage(fault)],
        model,
        launcher='pytorch',
        default_hooks=None,
        cfg=dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel', broadcast_buffers=False)),
    )
    # now, when both ranks have wrapped their model on the CPU
    if fault == 'wrong collective' and dist.get_rank() == ODD:

        def wrong(device: torch.device) -> Any:
            return device_checks._broadcast(device)[0] + 1, torch.zeros(5)

        device_checks._COLLECTIVES['broadcast'] = wrong
    if fault == 'stalled collective':
        runner._hooks = [hook for hook in runner._hooks if type(hook) is not DeviceCheckHook]
        runner.register_hook(DeviceCheckHook(timeout=6))
        if dist.get_rank() == ODD:
            device_checks._COLLECTIVES['broadcast'] = lambda device: time.sleep(600)
    try:
        runner.train()
    except DeviceCheckError as error:
        return dict(message=str(error), problems=error.problems, iteration=runner.iter)
    return dict(message='', problems={}, iteration=runner.iter)


FAULTS: Dict[str, List[Any]] = {
    # name: iterations done, words
    'none': [4],
    'statistics': [4],
    'buffer late': [0, 'before training', "buffer 'late' is on meta, expected cpu"],
    'weights before': [0, 'before training', "'weight' is not equal to that of rank 0"],
    'raises': [0, 'before training', "the check itself raised TypeError: 'NoneType' object"],
    'wrong collective': [0, 'before training', 'broadcast of cpu tensors over gloo answers [3.0, '],
    'batch': [
        0,
        'of the first batch',
        'batch.inputs is 2 x torch.uint8 of shape (1, ',
        'expected 2 x torch.uint8 of shape (3, ',
    ],
    'weights during': [3, 'after iteration 4', "'weight' is not equal to that of rank 0"],
    'nan': [3, 'after iteration 4', "parameter 'weight' holds NaN or infinity"],
    'stalled collective': [0, 'before training', 'broadcast over gloo did not end within 6 s'],
}


def train_all(folder: Path) -> Dict[str, Any]:
    mmengine.runner.runner.collect_env = dict  # it asks a compiler, seconds a run
    return fork_scenarios({fault: (train, 2, fault, folder / fault) for fault in FAULTS}, folder)


@pytest.fixture(scope='module')
def told(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('faults')
    return run_ranks(train_all, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_is_one_error_on_every_rank(fault: str, told: Dict[str, Any]) -> None:
    every = told[fault]
    assert isinstance(every, list), every
    iteration, *words = FAULTS[fault]
    assert every[0] == every[1]
    assert every[0]['iteration'] == iteration
    if not words:
        assert every[0]['message'] == ''
        return
    for word in words:
        assert word in every[0]['message']
    assert ODD in every[0]['problems']
    if fault != 'stalled collective':
        assert list(every[0]['problems']) == [ODD]


LAUNCHED = """
custom_imports = dict(imports=['mapsage', 'device_faults'])
custom_hooks = [dict(type='DeviceCheckHook', interval=2), dict(type='{hook}')]
"""


@pytest.mark.parametrize(
    'hook, words',
    [
        (
            'BatchOfRank1',
            [
                'of the first batch failed',
                'rank 1: batch.inputs is 2 x torch.float32',
                'expected 2 x torch.uint8',
            ],
        ),
        (
            'WeightOfRank1',
            ['after iteration 4 failed', 'rank 1: ', 'is not equal to that of rank 0'],
        ),
    ],
)
def test_a_fault_under_the_launcher(
    hook: str, words: List[str], tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, LAUNCHED.format(hook=hook))
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        environ={'ACCELERATOR': 'cpu', 'PYTHONPATH': str(Path(__file__).parent)},
    )
    assert finished.status != 0 and finished.left_running == []
    for word in ['DeviceCheckError', *words]:
        assert word in finished.final_error, finished.output[-6000:]
    assert not (tmp_path / 'work' / 'iter_5.pth').exists()
