"""Ranks that see one card each, cards of several models, and deterministic matrix products."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support import launch, no_simulated_cards, write_tiny_config
from torch import nn

from mapsage.accelerator import AcceleratorError
from mapsage.distributed import local_rank
from mapsage.distributed.wrappers import MMDistributedDataParallel
from mapsage.engine.startup import choose_accelerator, identify_process, join_ranks

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def join(masks: List[str]) -> Dict[str, Any]:
    """What one rank gets that sees only the cards of its mask."""
    os.environ['TOPS_VISIBLE_DEVICES'] = masks[int(os.environ['RANK'])]
    identify_process('pytorch')
    accelerator = choose_accelerator('sim')
    try:
        join_ranks('pytorch', accelerator, 'auto', 30)
    except AcceleratorError as error:
        return dict(error=str(error))
    device = accelerator.device(local_rank())
    summed = torch.full((2,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(summed)
    model = MMDistributedDataParallel(nn.Linear(2, 2))
    return dict(
        error='',
        device=str(device),
        current=torch.gcu.current_device(),  # type: ignore
        card=accelerator.card(local_rank()),
        sum=summed.cpu().tolist(),
        weights=str(next(model.parameters()).device),
    )


def test_each_rank_sees_a_card_of_its_own(tmp_path: Path) -> None:
    ranks = run_ranks(join, 3, tmp_path, ['5', '0', '2'])
    assert [each['error'] for each in ranks] == [''] * 3
    assert [each['card'] for each in ranks] == ['SIM-5', 'SIM-0', 'SIM-2']
    for each in ranks:
        assert (each['device'], each['current'], each['weights']) == ('gcu:0', 0, 'gcu:0')
        assert each['sum'] == [6.0, 6.0]


def test_two_ranks_with_one_mask_are_refused(tmp_path: Path) -> None:
    for each in run_ranks(join, 3, tmp_path, ['5', '1', '5']):
        assert (
            'rank 0 is on the card of rank(s) [2]; rank 2 is on the card of rank(s) [0]'
            in each['error']
        )
        assert 'TOPS_VISIBLE_DEVICES' in each['error']


def test_two_cards_for_three_ranks_are_refused(tmp_path: Path) -> None:
    for each in run_ranks(join, 3, tmp_path, ['0,1'] * 3):
        assert '3 ranks were started on this node' in each['error']
        assert 'shows 2 device(s)' in each['error'] and 'TOPS_VISIBLE_DEVICES' in each['error']


DRIFT = """
custom_imports = dict(imports=['mapsage', 'device_faults'])
custom_hooks = [dict(type='DeviceCheckHook', interval=2), dict(type='DriftOfRank1', by={by})]
"""


@pytest.mark.parametrize(
    'models, by, ends',
    [
        ('A100,A100', 1e-6, 'is not equal to that of rank 0'),
        ('A100,H100', 1e-6, ''),
        ('A100,H100', 1e-1, 'is not equal to that of rank 0'),
    ],
)
def test_cards_of_two_models_may_round_differently(
    models: str, by: float, ends: str, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, DRIFT.format(by=by))
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        environ={
            'ACCELERATOR': 'sim',
            'MAPSAGE_SIM_DEVICES': '2',
            'MAPSAGE_SIM_MODELS': models,
            'PYTHONPATH': str(Path(__file__).parent),
        },
    )
    if ends:
        assert finished.status != 0 and ends in finished.final_error, finished.output[-4000:]
        return
    assert finished.status == 0, finished.output[-4000:]
    assert 'differ by rounding' in finished.output
    assert 'Simulated A100 and Simulated H100' in finished.output


LINEAR = """
custom_imports = dict(imports=['mapsage', 'device_faults'])
custom_hooks = [dict(type='MultiplyMatrices')]
randomness = dict(seed=1, deterministic=True)
"""


@pytest.mark.parametrize(
    'workspace, ends',
    [
        (None, ''),
        (':16:8', ''),
        ('nonsense', 'with :4096:8 or :16:8 only'),
    ],
)
def test_deterministic_runs_get_their_workspace(
    workspace: Any, ends: str, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, LINEAR)
    environ = {
        'ACCELERATOR': 'sim',
        'MAPSAGE_SIM_STRICT': 'cublas',
        'PYTHONPATH': str(Path(__file__).parent),
    }
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        environ={**environ, **({'CUBLAS_WORKSPACE_CONFIG': workspace} if workspace else {})},
    )
    if ends:
        assert finished.status != 0 and ends in finished.final_error, finished.output[-4000:]
        assert "CUBLAS_WORKSPACE_CONFIG='nonsense'" in finished.final_error
        return
    assert finished.status == 0, finished.output[-4000:]
    assert ('CUBLAS_WORKSPACE_CONFIG=:4096:8 is set' in finished.output) == (workspace is None)
    assert json.loads((tmp_path / 'work' / 'product.json').read_text()) == 'gcu:0'
