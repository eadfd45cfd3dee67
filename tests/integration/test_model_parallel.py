"""Model parallelism as a user meets it: the config's one line, on simulated devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch
from support import (
    Finished,
    check_finished,
    launch,
    no_simulated_cards,
    write_tiny_config,
    write_tiny_data,
)

pytestmark = pytest.mark.skipif(
    no_simulated_cards() is not None, reason=f'sim: {no_simulated_cards()}'
)

SETTINGS = """
env_cfg.update(accelerator='sim', use_model_parallel={wanted})
optim_wrapper.update(clip_grad=dict(max_norm=1.0))
"""
# Weights, gradients and momentum take 36 MiB; the activations of 32x32 pixels little next to that.
FAT = """
model['backbone'].update(base_channels=128)
model['decode_head'].update(in_channels=128)
model['data_preprocessor'].update(size=(32, 32))
train_dataloader['batch_size'] = 1
"""


def train(
    config: Path,
    work_dir: Path,
    *options: Any,
    devices: int = 4,
    memory: str = '2G',
    **environ: str,
) -> Finished:
    return launch(
        config,
        '--work-dir',
        work_dir,
        *options,
        command=[sys.executable, 'tools/train.py'],
        environ=dict(MAPSAGE_SIM_DEVICES=str(devices), MAPSAGE_SIM_MEMORY=memory, **environ),
    )


def losses(work_dir: Path) -> List[float]:
    logs = sorted(work_dir.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [line['loss'] for line in lines if 'loss' in line]


def last_line(finished: Finished) -> str:
    return finished.output.strip().splitlines()[-1]


def test_trains_validates_saves_and_resumes(tiny_data: Path, tmp_path: Path) -> None:
    one, four = (
        write_tiny_config(tmp_path / f'{wanted}.py', tiny_data, SETTINGS.format(wanted=wanted))
        for wanted in (False, True)
    )
    whole = train(one, tmp_path / 'one')
    check_finished(whole)
    check_finished(train(four, tmp_path / 'four', '--cfg-options', 'train_cfg.max_iters=5'))
    resumed = train(four, tmp_path / 'four', '--resume', '--verbose')
    check_finished(resumed)

    assert 'strategy model_parallel_single_process' in resumed.output
    assert 'EncoderDecoder is split over 4 device(s) by equal parameter bytes' in resumed.output
    for device in range(4):
        assert f'gcu:{device} ' in resumed.output
    assert 'mIoU' in resumed.output
    assert 'grad_norm' in resumed.output
    assert len(losses(tmp_path / 'four')) == 10
    assert losses(tmp_path / 'four') == pytest.approx(losses(tmp_path / 'one'), rel=1e-4)

    # Its checkpoints are those of the model: they load into one that is not split, and back.
    saved, reference = (
        torch.load(tmp_path / name / 'iter_10.pth', weights_only=False) for name in ('four', 'one')
    )
    assert list(saved['state_dict']) == list(reference['state_dict'])
    for name, tensor in saved['state_dict'].items():
        assert tensor.device.type == 'cpu'
        torch.testing.assert_close(tensor, reference['state_dict'][name], rtol=1e-3, atol=1e-4)
    tested = launch(
        one,
        tmp_path / 'four' / 'iter_10.pth',
        '--work-dir',
        tmp_path / 'test',
        command=[sys.executable, 'tools/test.py'],
    )
    check_finished(tested)


def test_a_model_that_does_not_fit_one_device_trains_on_four(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / 'data', train=2, val=1, size=32)
    one, four = (
        write_tiny_config(tmp_path / f'{wanted}.py', data, SETTINGS.format(wanted=wanted) + FAT)
        for wanted in (False, True)
    )
    short = ('--cfg-options', 'train_cfg.max_iters=2')
    failed = train(one, tmp_path / 'one', *short, memory='32M')
    assert failed.status != 0
    assert 'out of memory' in last_line(failed)
    check_finished(train(four, tmp_path / 'four', *short, memory='32M'))
    assert (tmp_path / 'four' / 'iter_2.pth').exists()


def test_a_map_that_does_not_fit(tiny_config: Path, tmp_path: Path) -> None:
    wrapper = 'model_wrapper_cfg'
    options = [
        'env_cfg.accelerator=sim',
        f'{wrapper}.type=MMModelParallel',
        f'{wrapper}.device_map.backbone=0',
        f'{wrapper}.device_map.decode_hed=1',
    ]
    finished = train(tiny_config, tmp_path, '--cfg-options', *options, devices=2)
    assert finished.status == 1
    said = last_line(finished)
    assert 'DeviceMapError' in said
    assert "device_map names 'decode_hed', which is not a module" in said
    assert "Did you mean 'decode_head'?" in said


DROPOUT = SETTINGS + "model['decode_head']['dropout_ratio'] = 0.5\n"


def test_dropout_on_the_last_card_is_repeated_by_a_resume(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, DROPOUT.format(wanted=True))
    own = dict(MAPSAGE_SIM_RANDOM='device')  # each card draws from a generator of its own
    check_finished(train(config, tmp_path / 'whole', **own))
    check_finished(
        train(config, tmp_path / 'resumed', '--cfg-options', 'train_cfg.max_iters=5', **own)
    )
    check_finished(train(config, tmp_path / 'resumed', '--resume', **own))
    whole, resumed = (
        torch.load(tmp_path / name / 'iter_10.pth', weights_only=False)['state_dict']
        for name in ('whole', 'resumed')
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
