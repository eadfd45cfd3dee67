"""Trainings of a head that one rank holds, or several ranks together, and how they are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from frozen_config import FROZEN

# What has a state of its own: dropout, the moments of AdamW, batch statistics; and what looks at
# the whole head: clipping, the check of the weights.
TRAINING = (
    FROZEN
    + """
model['decode_head'].update(dropout_ratio=0.3)
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.01),
    clip_grad=dict(max_norm=0.5))
custom_hooks = [dict(type='DeviceCheckHook', interval=5)]
"""
)
STEPS = 10
# float32: splitting changes the order of sums, ten steps of AdamW carry it on
CLOSE = dict(rtol=1e-4, atol=2e-5)


class Run:
    """What a training left behind."""

    def __init__(self, work: Path) -> None:
        lines = [
            json.loads(line)
            for path in sorted(work.glob('*/vis_data/scalars.json'))
            for line in path.read_text().splitlines()
        ]
        self.losses = [line['loss'] for line in lines if 'loss' in line]
        self.norms = [line['grad_norm'] for line in lines if 'grad_norm' in line]
        self.scores = [line['mIoU'] for line in lines if 'mIoU' in line]
        self.path = work / f'iter_{STEPS}.pth'
        checkpoint = torch.load(str(self.path), map_location='cpu', weights_only=False)
        self.weights: Dict[str, torch.Tensor] = checkpoint['state_dict']
        self.optimizer: Dict[str, Any] = checkpoint['optimizer']

    def moments(self) -> List[torch.Tensor]:
        return [
            value
            for _, state in sorted(self.optimizer['state'].items())
            for _, value in sorted(state.items())
        ]


def check_close(run: Run, other: Run) -> None:
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(other.losses, rel=1e-5)
    assert run.norms == pytest.approx(other.norms, rel=1e-4)
    assert max(run.norms) > 0.5  # clipped
    assert run.scores == pytest.approx(other.scores, abs=0.1) and run.scores
    assert list(run.weights) == list(other.weights)
    for name, weight in other.weights.items():
        assert torch.allclose(run.weights[name], weight, **CLOSE), name
    assert run.optimizer['param_groups'] == other.optimizer['param_groups']
    assert len(run.moments()) == len(other.moments()) > 0
    for mine, its in zip(run.moments(), other.moments()):
        assert torch.allclose(mine, its, **CLOSE)


def streamed(encoders: int, ranks_per_head: int, **more: Any) -> Dict[str, Any]:
    return dict(type='Streamed', encoders=encoders, ranks_per_head=ranks_per_head, **more)
