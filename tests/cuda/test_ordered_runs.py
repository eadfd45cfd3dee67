"""Runs whose gradients are added in order over NCCL have the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_bits import checkpoint_bits
from ranks import run_ranks
from toy_runs import toy_train

SETTINGS = {
    'env_cfg.accelerator': 'cuda',
    'env_cfg.virtual_ranks': 2,
    'env_cfg.reduction': 'ordered',
}


def train(folder: Path, changes: Any) -> None:
    toy_train(folder, **SETTINGS, **changes)


@pytest.mark.parametrize(
    'changes',
    [{}, {'model_wrapper_cfg': dict(type='MMDistributedDataParallel', bucket_cap_mb=0.0001)}],
)
def test_two_cards_and_one(changes: Any, tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(train, world, tmp_path / f'ranks{world}', tmp_path / f'{world}', changes)
    one, two = (checkpoint_bits(tmp_path / f'{world}' / 'iter_8.pth') for world in (1, 2))
    weights = {place for place in one if place.startswith(('/state_dict', '/optimizer'))}
    assert weights and {place: one[place] for place in weights} == {
        place: two[place] for place in weights
    }
