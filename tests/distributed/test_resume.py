"""A run that was killed and resumed ends as one that was not, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from support import Launch, check_finished, launch, write_tiny_config

# Dropout, random augmentation in worker processes, momentum and a schedule: all must come back.
STATEFUL = """
model['decode_head']['dropout_ratio'] = 0.5
train_dataloader['num_workers'] = {workers}
train_dataloader['persistent_workers'] = {workers} > 0
train_dataloader['sampler'] = dict(type={sampler!r}, shuffle=True)
{seed}
"""
KILL_AT_7 = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='StopBeforeIteration', iteration=7)]
"""
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


def load(path: Path) -> dict:
    return torch.load(str(path), map_location='cpu', **LOAD)


def check_bit_equal(one: dict, other: dict) -> None:
    assert one['state_dict'].keys() == other['state_dict'].keys()
    for name, value in one['state_dict'].items():
        assert torch.equal(value, other['state_dict'][name]), name
    first, second = one['optimizer']['state'], other['optimizer']['state']
    assert all(
        torch.equal(first[i]['momentum_buffer'], second[i]['momentum_buffer']) for i in first
    )
    assert one['param_schedulers'] == other['param_schedulers']


@pytest.mark.parametrize(
    'workers, sampler, seed',
    [
        (2, 'InfiniteSampler', ''),
        (0, 'DefaultSampler', ''),  # 4 batches an epoch: the resumed run starts in its second epoch
    ],
)
def test_killed_and_resumed(
    workers: int, sampler: str, seed: str, tiny_data: Path, tmp_path: Path
) -> None:
    extra = STATEFUL.format(workers=workers, sampler=sampler, seed=seed)
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, extra)
    check_finished(launch(config, '--work-dir', tmp_path / 'whole'))

    killed = write_tiny_config(tmp_path / 'killed.py', tiny_data, extra + KILL_AT_7)
    waits = Launch(
        killed,
        '--work-dir',
        tmp_path / 'cut',
        environ={
            'PYTHONPATH': str(Path(__file__).parents[1] / 'integration'),
            'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached'),
        },
    )
    waits.wait_for(tmp_path / 'reached')
    os.kill(waits.ranks()[0], signal.SIGKILL)
    cut = waits.finish()
    assert cut.status != 0 and cut.left_running == []
    assert not (tmp_path / 'cut' / 'iter_10.pth').exists()

    check_finished(launch(config, '--work-dir', tmp_path / 'cut', '--resume'))
    check_bit_equal(*(load(tmp_path / run / 'iter_10.pth') for run in ('whole', 'cut')))


def test_resume_takes_over_the_seed(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, 'randomness = dict(seed=None)')
    work = tmp_path / 'work'
    check_finished(launch(config, '--work-dir', work, ranks=1))
    whole = load(work / 'iter_10.pth')
    (work / 'iter_10.pth').unlink()
    check_finished(launch(config, '--work-dir', work, '--resume', ranks=1))
    check_bit_equal(whole, load(work / 'iter_10.pth'))
