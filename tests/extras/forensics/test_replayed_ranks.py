"""One process carries out a step of several ranks again, with each rank's samples and numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from forked import fork_scenarios
from mmengine.registry import TASK_UTILS
from sampling_ranks import Answers, answers_of
from support import main_leg
from toy_runs import log_of, toy_config, toy_train

from mapsage.distributed.virtual_ranks import VirtualRanksError
from mapsage.extras.forensics.replay import ReplayError, replay

pytestmark = main_leg
STEP = 7  # of 8; the checkpoint is of step 4
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'train_dataloader.dataset.length': 23,  # rounded up to 4 batches of 2 on each of 3 ranks
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True),
}
ACCUMULATED = {'optim_wrapper.accumulative_counts': 3}
BF16 = {
    'optim_wrapper': dict(
        type='AmpOptimWrapper', dtype='bfloat16', optimizer=dict(type='SGD', lr=0.05)
    )
}
SAMPLED = {
    'train_dataloader.batch_size': 3,
    'custom_hooks': [
        dict(
            type='DynamicSamplingHook',
            score=dict(type='FirstNumber'),
            validity=dict(quantile=0.4),
            local_target=2,
            max_age=3,
        )
    ],
}
RUNS: Dict[str, Any] = {
    'sampled': (3, SAMPLED),
    '2': (2, {}),
    '3': (3, {}),
    'epochs': (3, EPOCHS),
    '5': (5, ACCUMULATED),
    'amp': (3, BF16),
    'virtual': (2, {'env_cfg.virtual_ranks': 5}),
}


@TASK_UTILS.register_module(force=True)
class FirstNumber:
    def score(self, sample: Any) -> float:
        return float(sample['inputs'][0])


def train(folder: Path, changes: Dict[str, Any]) -> Any:
    """Return the losses and sample numbers of STEP for each virtual rank of this process."""
    runner, seen = toy_train(folder, **changes)
    return seen.losses[STEP - 1], seen.samples[STEP - 1]


def unlike_threads(folder: Path) -> str:
    """Return the log of a run whose rank 1 has two threads."""
    if os.environ['RANK'] == '1':
        torch.set_num_threads(2)
    runner, _ = toy_train(folder)
    return log_of(runner) if runner.rank == 0 else ''


def run_scenarios(folder: Path) -> Dict[str, Any]:
    torch.set_num_threads(1)
    return fork_scenarios(
        {
            **{
                name: (train, world, folder / name, changes)
                for name, (world, changes) in RUNS.items()
            },
            'threads': (unlike_threads, 3, folder / 'threads'),
        },
        folder,
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('replay')


@pytest.fixture(scope='module')
def answers(folder: Path) -> Answers:
    return answers_of(run_scenarios, folder)


def replayed(run: Path, **changes: Any) -> List[Dict[str, Any]]:
    """Return what the replay of STEP has written, in the order of virtual ranks."""
    where = replay(toy_config(run, **dict(changes, runner_type='MapSageRunner')), STEP)
    return [
        torch.load(str(where / f'rank_{rank}.pth'))
        for rank in range(len(list(where.glob('rank_*.pth'))))
    ]


@pytest.mark.parametrize('name', RUNS)
def test_each_rank_has_its_loss_and_samples(name: str, answers: Answers, folder: Path) -> None:
    world, changes = RUNS[name]
    told = replayed(folder / name, **changes)
    ranks = changes.get('env_cfg.virtual_ranks', world)
    assert [each['virtual_rank'] for each in told] == list(range(ranks))
    first = [0, 3] if name == 'virtual' else range(world)  # virtual ranks that processes log
    for virtual_rank, (loss, samples) in zip(first, answers.of(name)):
        step = told[virtual_rank]
        assert step['losses']['loss'] == loss
        info = [each['metainfo'] for each in step['batch']['data_samples']]
        assert [each['number'] for each in info] == samples
        assert [each['sample_key'][0] for each in info] == samples
        assert len(step['gradient_norms']) == 6
    assert len({each['losses']['loss'] for each in told}) == ranks
    text = (folder / name / 'replay' / f'iter_{STEP}' / 'step.txt').read_text()
    assert 'bit for bit' in text and f'virtual rank {ranks - 1}' in text


def test_another_number_of_virtual_ranks_is_refused(answers: Answers, folder: Path) -> None:
    with pytest.raises(VirtualRanksError, match='env_cfg.virtual_ranks=4'):
        replayed(folder / '3', **{'env_cfg.virtual_ranks': 4})


def test_several_processes_are_refused(folder: Path) -> None:
    with pytest.raises(ReplayError, match='without a launcher'):
        replay(toy_config(folder / '3', launcher='pytorch'), STEP)


def test_ranks_that_compute_otherwise_are_named(answers: Answers) -> None:
    log = answers.of('threads')[0]
    assert 'the ranks do not compute alike' in log
    assert 'threads: 1 on rank(s) 0, 2 (' in log and '; 2 on rank(s) 1 (' in log
