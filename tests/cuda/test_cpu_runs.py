"""A run on the CPU of a machine with cards leaves CUDA alone, also where the driver fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, List, Tuple

import frozen_config
import pytest
from support import ROOT, Finished, check_finished, launch, write_tiny_config

# Every process imports one of these at its start.
WORKING_DRIVER = """
import atexit
import torch

def fail(*arguments):
    raise RuntimeError('CUDA driver initialization failed')

def report():
    print(f'CUDA was initialized: {torch.cuda.is_initialized()}', flush=True)

atexit.register(report)
"""
FAILING_DRIVER = WORKING_DRIVER + 'torch._C._cuda_init = torch.Tensor.pin_memory = fail\n'
OPTIONS = """
train_cfg.update(max_iters=2, val_interval=2)
train_dataloader.update(pin_memory=True)
val_dataloader.update(pin_memory=True)
"""
CPU = ('--accelerator', 'cpu')


@pytest.fixture(params=['working', 'failing'])
def environ(request: Any, tmp_path: Path) -> dict:
    folder = tmp_path / 'start'
    folder.mkdir()
    (folder / 'sitecustomize.py').write_text(
        FAILING_DRIVER if request.param == 'failing' else WORKING_DRIVER
    )
    return dict(PYTHONPATH=os.pathsep.join(filter(None, [str(folder), os.getenv('PYTHONPATH')])))


def run(tool: str, *arguments: Any, environ: dict) -> Finished:
    return launch(*arguments, command=[sys.executable, f'tools/{tool}'], environ=environ, cold=True)


def check_without_cuda(finished: Finished) -> None:
    check_finished(finished)
    reports = [line for line in finished.output.splitlines() if 'CUDA was initialized' in line]
    assert reports and set(reports) == {'CUDA was initialized: False'}, finished.output[-3000:]


def train(folder: Path, tiny_data: Path, environ: dict) -> Tuple[Path, Path]:
    config = write_tiny_config(folder / 'tiny.py', tiny_data, OPTIONS)
    finished = run('train.py', config, '--work-dir', folder / 'run', *CPU, environ=environ)
    check_without_cuda(finished)
    assert 'memory:' not in finished.output
    return config, folder / 'run' / 'iter_2.pth'


def test_training_testing_and_prediction(tmp_path: Path, tiny_data: Path, environ: dict) -> None:
    model: List[Any] = [*train(tmp_path, tiny_data, environ)]
    tested = run('test.py', *model, '--work-dir', tmp_path / 'test', *CPU, environ=environ)
    check_without_cuda(tested)
    assert 'mIoU' in tested.output
    check_without_cuda(
        run(
            'predict.py',
            *model,
            tiny_data / 'img_dir' / 'val' / '0.png',
            '--out',
            tmp_path / 'maps',
            *CPU,
            environ=environ,
        )
    )


# The trainings of both drivers are above.
ONE_DRIVER = pytest.mark.parametrize('environ', ['working'], indirect=True)


# Forked ranks do not run the report, so that only a failing driver shows what they touch.
@pytest.mark.parametrize('environ', ['failing'], indirect=True)
def test_two_ranks(tmp_path: Path, tiny_data: Path, environ: dict) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, OPTIONS)
    finished = launch(
        config, '--work-dir', tmp_path / 'run', cold=True, environ={**environ, 'ACCELERATOR': 'cpu'}
    )
    check_without_cuda(finished)


@ONE_DRIVER
@pytest.mark.long
def test_caching_features(tmp_path: Path, tiny_data: Path, environ: dict) -> None:
    config = write_tiny_config(tmp_path / 'frozen.py', tiny_data, frozen_config.PLAIN + OPTIONS)
    check_without_cuda(
        run(
            'cache_features.py',
            config,
            '--work-dir',
            tmp_path / 'run',
            '--folder',
            tmp_path / 'cache',
            *CPU,
            environ=environ,
        )
    )


@ONE_DRIVER
def test_doctor(tmp_path: Path, tiny_data: Path, environ: dict) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, OPTIONS)
    check_without_cuda(run('doctor.py', config, *CPU, environ=environ))


# A fork cannot train: where there are cards, the first backward pass of a process starts threads.
FORK = """
import os, sys
from pathlib import Path
from toy_runs import toy_runner

toy_runner(Path(sys.argv[1]) / 'parent')[0].test()
if not os.fork():
    figures = toy_runner(Path(sys.argv[1]) / 'child')[0].test()
    os._exit(0 if 'value' in figures else 1)
assert os.wait()[1] == 0
"""


def test_a_fork_of_a_process_with_a_run_behind_it_runs_too(tmp_path: Path) -> None:
    (tmp_path / 'fork.py').write_text(FORK)
    path = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
    check_finished(
        launch(
            tmp_path,
            command=[sys.executable, str(tmp_path / 'fork.py')],
            cold=True,
            environ={'PYTHONPATH': path},
        )
    )
