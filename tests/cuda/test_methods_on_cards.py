"""Dynamic sampling, FixMatch, mask transformers and LoRA on two devices and on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict

import pytest
import torch
from cards import launch_on_cards, load, logged, write_start
from frozen_config import FROZEN
from mask_runs import config_of
from semi_runs import write_semi_config, write_semi_data
from support import check_finished, write_tiny_config

# What devices draw at random differs from what the CPU draws: no dropout here.
SAMPLING = """
train_dataloader.update(batch_size=3, num_workers=1, persistent_workers=True)
custom_hooks = [dict(
    type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0.491),
    local_target=2, max_age=2, prefetch=True)]
train_cfg.update(max_iters=6, val_interval=6)
"""
LORA = (
    FROZEN
    + """
model['backbone'].update(frozen=False, normalization='web',
                         lora=dict(rank=4, targets=('q', 'v', 'mlp.fc1')))
train_cfg.update(max_iters=6, val_interval=6)
"""
)


def sampling(data: Path, folder: Path) -> Path:
    return write_tiny_config(folder / 'tiny.py', data, SAMPLING)


def lora(data: Path, folder: Path) -> Path:
    return write_tiny_config(folder / 'tiny.py', data, LORA)


def fixmatch(data: Path, folder: Path) -> Path:
    return write_semi_config(
        folder / 'semi.py',
        write_semi_data(folder / 'data'),
        "model['decode_head'].update(dropout_ratio=0)\n",
    )


def eomt(data: Path, folder: Path, kind: str = 'eomt') -> Path:
    # Masks that are switched off at random are drawn on the device: none are.
    cfg = config_of(kind, data, folder, custom_hooks=())
    if kind == 'pmt':
        cfg.model.decode_head.norm_cfg = dict(type='BN1d')
    cfg.dump(str(folder / 'mask.py'))
    return folder / 'mask.py'


def pmt(data: Path, folder: Path) -> Path:
    return eomt(data, folder, 'pmt')


METHODS: Dict[str, Callable[[Path, Path], Path]] = {
    method.__name__: method for method in (sampling, fixmatch, lora, eomt, pmt)
}


@pytest.mark.parametrize('name', METHODS)
def test_two_cards_train_like_two_cpu_ranks(name: str, tiny_data: Path, tmp_path: Path) -> None:
    config = METHODS[name](tiny_data, tmp_path)
    start = f'load_from={write_start(config)}'
    for accelerator in ('cuda', 'cpu'):
        finished = launch_on_cards(
            config,
            '--work-dir',
            tmp_path / accelerator,
            '--cfg-options',
            start,
            # Fast settings of a card may change last bits.
            'env_cfg.fast=False',
            environ={'ACCELERATOR': accelerator},
        )
        check_finished(finished)
        assert f'accelerator {accelerator} ' in finished.output
    losses, expected = (logged(tmp_path / name) for name in ('cuda', 'cpu'))
    assert len(set(losses)) == len(losses) > 2
    # Operators of the double and of the CPU take other paths; some processors show it in last bits.
    assert losses == pytest.approx(expected, rel=1e-6)
    cards, ranks = (load(max((tmp_path / name).glob('iter_*.pth'))) for name in ('cuda', 'cpu'))
    for key, value in ranks['state_dict'].items():
        torch.testing.assert_close(cards['state_dict'][key], value, rtol=1e-5, atol=1e-6, msg=key)
    assert ('dynamic_sampling' in cards) == (name == 'sampling')
    assert cards.get('dynamic_sampling') == ranks.get('dynamic_sampling')
