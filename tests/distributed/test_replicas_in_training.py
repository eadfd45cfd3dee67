"""Head replicas under the launcher: what several ranks train together is what one rank trains."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
from frozen_config import FROZEN
from support import Launch, check_finished, launch, main_leg, write_tiny_config

pytestmark = main_leg

# What has a state of its own: dropout, the moments of AdamW, batch statistics; and clipping.
TRAINING = FROZEN + '''
model['decode_head'].update(dropout_ratio=0.3)
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.01),
    clip_grad=dict(max_norm=0.5))
'''
STEPS = 10
# float32: splitting changes the order of sums, ten steps of AdamW carry it on
CLOSE = dict(rtol=1e-4, atol=2e-5)


class Run:
    """What a training left behind."""

    def __init__(self, work: Path) -> None:
        lines = [json.loads(line) for path in sorted(work.glob('*/vis_data/scalars.json'))
                 for line in path.read_text().splitlines()]
        self.losses = [line['loss'] for line in lines if 'loss' in line]
        self.norms = [line['grad_norm'] for line in lines if 'grad_norm' in line]
        self.scores = [line['mIoU'] for line in lines if 'mIoU' in line]
        self.path = work / f'iter_{STEPS}.pth'
        checkpoint = torch.load(str(self.path), map_location='cpu', weights_only=False)
        self.weights: Dict[str, torch.Tensor] = checkpoint['state_dict']
        self.optimizer: Dict[str, Any] = checkpoint['optimizer']

    def moments(self) -> List[torch.Tensor]:
        return [value for _, state in sorted(self.optimizer['state'].items())
                for _, value in sorted(state.items())]


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


def check_equal(run: Run, other: Run) -> None:
    assert run.losses == other.losses and run.scores == other.scores
    for name, weight in other.weights.items():
        assert torch.equal(run.weights[name], weight), name
    assert all(map(torch.equal, run.moments(), other.moments()))


def streamed(encoders: int, ranks_per_head: int, **more: Any) -> Dict[str, Any]:
    return dict(type='Streamed', encoders=encoders, ranks_per_head=ranks_per_head, **more)


class Trainings:
    """Trains variants of one config, each in a folder of its own."""

    def __init__(self, config: Path) -> None:
        self.config = config

    def write(self, name: str, source: Optional[Dict[str, Any]], extra: str = '') -> Path:
        path = self.config.with_name(f'{name}.py')
        path.write_text(self.config.read_text() + extra
                        + (f'feature_source = {source!r}\n' if source else ''))
        return path

    def train(self, name: str, source: Optional[Dict[str, Any]], ranks: int, *options: str,
              extra: str = '') -> Run:
        path, work = self.write(name, source, extra), self.config.with_name(name)
        check_finished(launch(path, '--work-dir', work, *options, ranks=ranks))
        return Run(work)


@pytest.fixture(scope='module')
def trainings(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(write_tiny_config(tmp_path_factory.mktemp('replicas') / 'base.py', tiny_data,
                                       TRAINING))


@pytest.fixture(scope='module')
def alone(trainings: Trainings) -> Run:
    return trainings.train('alone', None, 1)


@pytest.fixture(scope='module')
def one_replica(trainings: Trainings) -> Run:
    return trainings.train('one', streamed(2, 2), 4)


def test_one_replica_trains_what_one_rank_trains(alone: Run, one_replica: Run) -> None:
    check_close(one_replica, alone)


def test_two_replicas_train_what_two_ranks_train(trainings: Trainings) -> None:
    check_close(trainings.train('two', streamed(1, 2), 5), trainings.train('pair', None, 2))


def test_a_replica_of_four_ranks(trainings: Trainings, alone: Run) -> None:
    check_close(trainings.train('four', streamed(1, 4), 5), alone)


def test_a_killed_run_goes_on_with_the_same_bits(trainings: Trainings, one_replica: Run) -> None:
    work = trainings.config.with_name('killed')
    path = trainings.write('killed', streamed(2, 2))
    run = Launch(path, '--work-dir', work, ranks=4)
    run.wait_for(work / 'iter_5.pth')
    run._kill_all()
    run.finish()
    (work / 'iter_10.pth').unlink(missing_ok=True)
    for folder in work.glob('2*'):  # losses of the run that was killed
        for scalars in folder.glob('vis_data/scalars.json'):
            lines = scalars.read_text().splitlines()
            scalars.write_text(''.join(f'{line}\n' for line in lines
                                       if json.loads(line).get('step', 0) <= 5))
    check_equal(trainings.train('killed', streamed(2, 2), 4, '--resume'), one_replica)
