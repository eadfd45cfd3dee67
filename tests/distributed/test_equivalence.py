"""Several ranks with small batches do what one process does with the large one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import check_finished, launch

from mapsage.accelerator import AcceleratorError, resolve_accelerator


def final_weights(work: Path) -> dict:
    return torch.load(str(work / 'iter_10.pth'), map_location='cpu', **LOAD)['state_dict']


# This test wrote the checkpoints itself, and reads them past MapSage's loader.
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


def has_xla() -> bool:
    try:
        return resolve_accelerator('xla') is not None
    except AcceleratorError:
        return False


def train(config: Path, work: Path, ranks: int, batch: int, accelerator: str) -> dict:
    check_finished(
        launch(
            config,
            '--work-dir',
            work,
            '--cfg-options',
            f'train_dataloader.batch_size={batch}',
            'val_cfg=None',
            'val_dataloader=None',
            'val_evaluator=None',
            ranks=ranks,
            timeout=400,
            environ={'ACCELERATOR': accelerator},
        )
    )
    return final_weights(work)


def check_equal_up_to_rounding(one: dict, many: dict) -> None:
    assert one.keys() == many.keys()
    for name in one:
        torch.testing.assert_close(one[name], many[name], rtol=1e-4, atol=1e-6, msg=name)


def test_four_ranks_of_two_equal_one_of_eight(tiny_config: Path, tmp_path: Path) -> None:
    one = train(tiny_config, tmp_path / 'one', ranks=1, batch=8, accelerator='cpu')
    many = train(tiny_config, tmp_path / 'many', ranks=4, batch=2, accelerator='cpu')
    check_equal_up_to_rounding(one, many)


@pytest.mark.skipif(not has_xla(), reason='torch_xla is not installed: the xla leg runs this')
def test_two_xla_ranks_equal_one(tiny_config: Path, tmp_path: Path) -> None:
    one = train(tiny_config, tmp_path / 'one', ranks=1, batch=4, accelerator='xla')
    many = train(tiny_config, tmp_path / 'many', ranks=2, batch=2, accelerator='xla')
    check_equal_up_to_rounding(one, many)
