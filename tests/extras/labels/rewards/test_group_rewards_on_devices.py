"""Group rewards on a model that is split over simulated devices give what one device gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from ranks import run_ranks
from small_segmentors import batch, resnet_fcn
from support import main_leg, no_simulated_cards

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.wrappers import MMModelParallel, OptimWrapper
from mapsage.extras.labels.rewards import GroupRewardTuning, PolygonCount

pytestmark = [
    main_leg,
    pytest.mark.skipif(no_simulated_cards() is not None, reason=f'sim: {no_simulated_cards()}'),
]


class Step:
    slot, share, loss_weight = 0, 0.5, 1.0


def train_with_rewards(devices: int) -> Dict[str, Any]:
    """Return losses and weights of two steps on ``devices`` simulated devices, 0 for the CPU."""
    model = revert_sync_batchnorm(resnet_fcn())
    wrapped: Any = model
    if devices:
        set_current_accelerator(resolve_accelerator('sim'))
        wrapped = MMModelParallel(model, devices=list(range(devices)))
    tuning = GroupRewardTuning([PolygonCount()], maps=3, region=8)
    tuning.bind(
        wrapped,
        lambda samples: {
            key: [each[key] for each in samples] for key in ('inputs', 'data_samples')
        },
    )
    step: Optional[Step] = Step()
    tuning.follow(lambda: step)
    optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.01))
    losses: List[Dict[str, float]] = []
    for seed in range(2):
        data = batch()
        samples = [
            dict(inputs=image, data_samples=sample)
            for image, sample in zip(data['inputs'], data['data_samples'])
        ]
        tuning.begin_batch(0, True)
        torch.manual_seed(seed)
        rewards = tuning(samples)
        assert rewards.std() > 0
        logs = wrapped.train_step(data, optimizer)
        losses.append({name: float(value) for name, value in logs.items()})
    return dict(losses=losses, weights=[each.detach().cpu() for each in model.parameters()])


@pytest.mark.parametrize('devices', [2, 3])
def test_a_split_model_learns_from_rewards_as_a_whole_one(devices: int, tmp_path: Path) -> None:
    (whole,) = run_ranks(train_with_rewards, 1, tmp_path / 'whole', 0)
    (split,) = run_ranks(train_with_rewards, 1, tmp_path / 'split', devices)
    assert {'loss_reward', 'aux.loss_ce', 'decode.loss_ce'} <= set(whole['losses'][0])
    # The devices of a backward pass add up the gradients of one activation in another order.
    # Whether later losses show that in their last bits depends on the processor's instructions.
    assert split['losses'][0] == whole['losses'][0]
    assert len(split['losses']) == len(whole['losses'])
    for step, expected in zip(split['losses'], whole['losses']):
        assert step == pytest.approx(expected, rel=1e-5)
    assert all(
        torch.allclose(one, other, atol=1e-6)
        for one, other in zip(split['weights'], whole['weights'])
    )
