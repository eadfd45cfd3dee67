"""One process that splits a model over two devices, or over a device and the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cards import logged, run_tool, write_start
from support import Finished, check_finished, write_tiny_config, write_tiny_data

SHORT = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='ReportPlacement')]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=4, val_interval=4)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 2
optim_wrapper.update(clip_grad=dict(max_norm=1.0))
"""
# Weights, gradients and momentum take 36 MiB; the activations of 32x32 pixels little next to that.
FAT = """
model['backbone'].update(base_channels=128)
model['decode_head'].update(in_channels=128)
model['data_preprocessor'].update(size=(32, 32))
train_dataloader['batch_size'] = 1
"""
TWO_CARDS = ['env_cfg.use_model_parallel=True']
CARD_AND_CPU = [
    'model_wrapper_cfg.type=MMModelParallel',
    "model_wrapper_cfg.devices=['cuda:0','cpu']",
]


def train(
    config: Path, work: Path, *settings: str, resume: bool = False, **options: Any
) -> Finished:
    environ = {'MAPSAGE_TEST_PLACEMENT': str(work.parent), **options.pop('environ', {})}
    return run_tool(
        'train',
        config,
        '--work-dir',
        work,
        *(['--resume'] if resume else []),
        '--cfg-options',
        *settings,
        environ=environ,
        **options,
    )


@pytest.mark.parametrize(
    'settings, cards, split',
    [(TWO_CARDS, 2, ['cuda:0', 'cuda:1']), (CARD_AND_CPU, 1, ['cpu', 'cuda:0'])],
    ids=['two cards', 'card and CPU'],
)
def test_a_split_model_trains_validates_and_resumes(
    settings: list, cards: int, split: list, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    start = f'load_from={write_start(config)}'
    check_finished(train(config, tmp_path / 'one', start))
    check_finished(
        train(config, tmp_path / 'split', start, *settings, 'train_cfg.max_iters=2', cards=cards)
    )
    finished = train(config, tmp_path / 'split', *settings, cards=cards, resume=True)
    check_finished(finished)
    assert 'strategy model_parallel_single_process' in finished.output
    placement = (tmp_path / '0.json').read_text()
    assert all(f'"{device}"' in placement for device in split)
    losses, expected = (logged(tmp_path / name) for name in ('split', 'one'))
    # The norm for clipping is summed device by device, which rounds differently on some processors.
    assert len(losses) == 4 and losses == pytest.approx(expected, rel=1e-6)
    assert len(logged(tmp_path / 'split', 'grad_norm')) == 4
    assert logged(tmp_path / 'split', 'mIoU')[-1:] == logged(tmp_path / 'one', 'mIoU')


def test_a_model_that_does_not_fit_one_card_trains_on_two(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / 'data', train=2, val=1, size=32)
    config = write_tiny_config(tmp_path / 'fat.py', data, SHORT + FAT)
    little = dict(cards=2, environ={'CUDA_DOUBLE_MEMORY': '32'})
    failed = train(config, tmp_path / 'one', 'env_cfg.use_model_parallel=False', **little)
    assert failed.status != 0
    assert 'CUDA out of memory' in failed.output.strip().splitlines()[-1]
    check_finished(train(config, tmp_path / 'two', *TWO_CARDS, **little))
    assert (tmp_path / 'two' / 'iter_4.pth').exists()
