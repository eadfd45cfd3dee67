"""FixMatch by epochs in mixed precision: a run that loses rank 1 continues to the same bits."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from forked import DIED, fork_ranks
from mmengine.hooks import Hook
from sampling_ranks import Answers, answers_of
from semi_runs import semi_train, write_semi_data
from support import main_leg

pytestmark = main_leg
V = 5
# Two steps an epoch: 5 labeled images and 11 unlabeled ones, on five ranks one and two of them.
CHANGES: Dict[str, Any] = {
    'env_cfg.virtual_ranks': V,
    'param_scheduler': [],
    'train_cfg': dict(_delete_=True, by_epoch=True, max_epochs=3, val_interval=3),
    'train_dataloader.sampler.infinite': False,
    'default_hooks.logger.interval': 1,
    'default_hooks.checkpoint': dict(by_epoch=True, interval=1),
}
# torch 1.10 has no upsampling of bfloat16 on the CPU.
if torch.__version__ >= '2':
    CHANGES.update({'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'})


class Rank1KilledBefore(Hook):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration and os.environ.get('RANK') == '1':
            os.kill(os.getpid(), signal.SIGKILL)


def trained(data: Path, folder: Path, processes: int, until: int) -> Any:
    """Return the losses of a run, or the error by which a rank has noticed the lost one."""
    torch.set_num_threads(1)
    if processes == 1:
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)
    try:
        _, followed = semi_train(data, folder, [Rank1KilledBefore(until)], resume='auto', **CHANGES)
    except Exception as error:  # any: which one depends on the call that meets the gap
        return f'{type(error).__name__}: {error}'
    return followed.losses


def run_scenarios(folder: Path) -> Dict[str, Any]:
    data = write_semi_data(folder / 'data')
    told = {'whole': fork_ranks(trained, 5, folder / 'five', data, folder / 'whole', 5, 99)}
    for processes, until in ((3, 3), (1, 99)):
        told[f'moved {processes}'] = fork_ranks(
            trained,
            processes,
            folder / f'moving {processes}',
            data,
            folder / 'moved',
            processes,
            until,
        )
    return told


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('epochs')


@pytest.fixture(scope='module')
def answers(folder: Path) -> Answers:
    return answers_of(run_scenarios, folder)


def test_a_run_that_loses_rank_1_goes_on_to_the_same_bits(answers: Answers, folder: Path) -> None:
    first, killed, last = answers.of('moved 3')
    assert killed == DIED and all(isinstance(each, str) for each in (first, last))
    losses = answers.of('whole')[0]
    assert len(losses) == len(set(losses)) == 6
    assert answers.of('moved 1')[0] == losses[2:]  # from the end of the first epoch
    for epoch in (1, 2, 3):
        bits = [
            checkpoint_bits(folder / each / f'epoch_{epoch}.pth') for each in ('whole', 'moved')
        ]
        assert bits[0] == bits[1] and len(bits[0]) > 50


def test_the_tables_of_all_ranks_say_what_one_process_says(answers: Answers, folder: Path) -> None:
    """Pixels, passed and right ones of each class; the teachers have the same bits."""
    assert answers.of('moved 1')
    tables: List[Any] = []
    for name in ('whole', 'moved'):
        text = ''.join(path.read_text() for path in sorted((folder / name).glob('*/*.log')))
        tables.append(re.findall(r'\[FixMatch\] (of 1 step.*?)\n\d\d\d\d/', text, re.S))
    assert len(tables[0]) == 6 and tables[1][-4:] == tables[0][-4:]
