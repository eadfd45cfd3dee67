"""The reports about devices, reproduced on simulated cards, and the same runs under MapSage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support import check_finished, launch, write_tiny_config

from mapsage.accelerator import resolve_accelerator
from mapsage.distributed import init_process_group
from mapsage.extras.simulator.accelerator import SimAccelerator

reason = SimAccelerator.why_unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

REPORT = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='ReportPlacement')]
train_cfg['max_iters'] = 4
train_dataloader['batch_size'] = 1
val_cfg = val_dataloader = val_evaluator = None
test_cfg = test_dataloader = test_evaluator = None
"""


def train_with_plain_mmengine(config: str, work: str) -> str:
    """MMEngine's own Runner on a simulated card, its group started as the report did it."""
    from mmengine.config import Config
    from mmengine.runner import Runner

    dist.init_process_group('gloo')
    resolve_accelerator('sim').set_device(dist.get_rank())
    cfg = Config.fromfile(config)
    cfg.launcher, cfg.work_dir = 'pytorch', work
    for key in ('runner_type', 'env_cfg', 'default_hooks'):
        cfg.pop(key)
    try:
        Runner.from_cfg(cfg).train()
    except ValueError as error:
        return str(error)
    return 'it trained'


def test_plain_mmengine_raises_the_error_of_the_report(tiny_config: Path, tmp_path: Path) -> None:
    said = run_ranks(
        train_with_plain_mmengine, 2, tmp_path / 'ranks', str(tiny_config), str(tmp_path / 'work')
    )
    for words in said:
        assert words.startswith(
            'DistributedDataParallel device_ids and output_device arguments only work with'
        )
        assert "module parameters {device(type='cpu')}" in words


def losses(work: Path) -> List[float]:
    log = next(work.glob('*/vis_data/scalars.json'))
    return [json.loads(line)['loss'] for line in log.read_text().splitlines()]


def test_eight_simulated_cards_train_like_the_cpu(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, REPORT)
    placement = {}
    for accelerator in ('sim', 'cpu'):
        folder = tmp_path / accelerator
        folder.mkdir()
        check_finished(
            launch(
                config,
                '--work-dir',
                folder / 'work',
                ranks=8,
                timeout=300,
                environ={
                    'ACCELERATOR': accelerator,
                    'MAPSAGE_TEST_PLACEMENT': str(folder),
                    'PYTHONPATH': str(Path(__file__).parents[2] / 'integration'),
                },
            )
        )
        placement[accelerator] = [
            json.loads((folder / f'{rank}.json').read_text()) for rank in range(8)
        ]
    assert [each['devices'] for each in placement['sim']] == [[f'gcu:{n}'] for n in range(8)]
    assert len({each['digest'] for each in placement['sim']}) == 1
    assert len(losses(tmp_path / 'sim' / 'work')) == 4
    assert losses(tmp_path / 'sim' / 'work') == pytest.approx(
        losses(tmp_path / 'cpu' / 'work'), rel=1e-5
    )


def pool() -> List[Any]:
    """Pool one tile of every rank on each rank, from the cards and through host memory."""
    sim = resolve_accelerator('sim')
    init_process_group(sim, timeout=30)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = sim.device(rank)
    tile = torch.full((3, 4, 4), float(rank), device=device)
    pooled = [None] * world
    dist.all_gather_object(pooled, tile)
    try:
        torch.stack(pooled)
        error = 'none'
    except RuntimeError as caught:
        error = str(caught)
    dist.all_gather_object(pooled, tile.cpu())
    stacked = torch.stack([each.to(device) for each in pooled])
    return [error, str(stacked.device), stacked.mean(dim=(1, 2, 3)).tolist()]


def test_samples_pooled_from_several_cards(tmp_path: Path) -> None:
    for rank, (error, device, means) in enumerate(run_ranks(pool, 4, tmp_path)):
        assert 'Expected all tensors to be on the same device' in error
        assert device == f'gcu:{rank}'
        assert means == [0, 1, 2, 3]
