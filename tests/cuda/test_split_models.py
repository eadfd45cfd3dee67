"""Training a model that is split over several kinds of devices, on a machine with cards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
import torch
from mmengine.device import get_max_cuda_memory
from mmengine.runner import LogProcessor
from support import Finished, check_finished, launch, write_tiny_config

SPLIT = """
env_cfg.update(accelerator={accelerator!r})
model_wrapper_cfg = dict(type='MMModelParallel', devices={devices!r})
"""


def train(folder: Path, tiny_data: Path, accelerator: str, devices: List[Any]) -> Finished:
    config = write_tiny_config(
        folder / 'split.py', tiny_data, SPLIT.format(accelerator=accelerator, devices=devices)
    )
    return launch(
        config,
        '--work-dir',
        folder / 'run',
        '--cfg-options',
        'train_cfg.max_iters=3',
        'train_cfg.val_interval=3',
        command=[sys.executable, 'tools/train.py'],
    )


def training_scalars(folder: Path) -> List[Dict[str, float]]:
    log = next((folder / 'run').glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if 'loss' in line]


@pytest.mark.parametrize('devices', [['cuda:0', 'cpu'], ['cpu', 'cuda:1'], ['cuda:0', 'cuda:1']])
def test_a_split_run_logs_the_memory_of_its_cards(
    tmp_path: Path, tiny_data: Path, devices: List[str]
) -> None:
    check_finished(train(tmp_path, tiny_data, 'cuda', devices))
    scalars = training_scalars(tmp_path)
    assert len(scalars) == 3
    # The head's card, or the only one, holds the logits of 64x64 pixels at least: over 1 MiB.
    assert all(line['memory'] >= 1 for line in scalars)


def test_simulated_cards_beside_real_ones_log_their_own_memory(
    tmp_path: Path, tiny_data: Path
) -> None:
    check_finished(train(tmp_path, tiny_data, 'sim', [0, 1]))
    scalars = training_scalars(tmp_path)
    assert len(scalars) == 3
    assert all(line['memory'] > 0 for line in scalars)


@pytest.mark.parametrize('full', [0, 1])
def test_the_logged_memory_is_that_of_the_fullest_card(full: int) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4).to(f'cuda:{card}') for card in (0, 1))
    for card in (0, 1):
        get_max_cuda_memory(torch.device('cuda', card))
    torch.empty(300 * 2**20, dtype=torch.uint8, device=f'cuda:{full}')
    assert 300 <= LogProcessor()._get_max_memory(SimpleNamespace(model=model)) < 400
