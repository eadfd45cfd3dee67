"""Whole runs with dynamic sampling, through the user's launcher."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support import Launch, check_finished, launch, main_leg, write_tiny_config

from mapsage.distributed import open_channel
from mapsage.sampling import Candidate, TileHistory, Totals
from mapsage.sampling.statistics import StepStatistics

# What is marked main_leg is the same code on the other legs, under another loop, through which the
# first test here walks.

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}

# Dropout, augmentation in workers, a pool and sampling ahead: all must come back.
SAMPLED = """
model['decode_head']['dropout_ratio'] = 0.5
train_dataloader['batch_size'] = 3
train_dataloader['num_workers'] = 2
train_dataloader['persistent_workers'] = True
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [
    dict(type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low={low}),
         local_target=2, max_age=2, prefetch={prefetch}){more}]
"""
ENVIRON = {'PYTHONPATH': str(Path(__file__).parents[1] / 'integration')}


def load(path: Path) -> dict:
    return torch.load(str(path), map_location='cpu', **LOAD)


def check_bit_equal(one: dict, other: dict) -> None:
    assert all(
        torch.equal(value, other['state_dict'][name]) for name, value in one['state_dict'].items()
    )
    assert str(one['dynamic_sampling']) == str(other['dynamic_sampling'])


def test_killed_and_resumed_with_pool_and_prefetch(tiny_data: Path, tmp_path: Path) -> None:
    settings = dict(low=0.491, prefetch=True)  # nats: 7 of the 16 tiles
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SAMPLED.format(more='', **settings))
    check_finished(launch(config, '--work-dir', tmp_path / 'whole', environ=ENVIRON))
    cut = load(tmp_path / 'whole' / 'iter_5.pth')['dynamic_sampling']
    drawn = [json.loads(text)['drawn'] for text in cut['ranks']]
    assert min(drawn) > 5 * cut['batch_size']  # refills were drawn
    assert any('"keys"' in text for text in cut['ranks'])  # and the pool holds something

    killed = write_tiny_config(
        tmp_path / 'killed.py',
        tiny_data,
        SAMPLED.format(more=", dict(type='StopBeforeIteration', iteration=7)", **settings),
    )
    waits = Launch(
        killed,
        '--work-dir',
        tmp_path / 'cut',
        environ=dict(ENVIRON, MAPSAGE_TEST_REACHED=str(tmp_path / 'reached')),
    )
    waits.wait_for(tmp_path / 'reached')
    os.kill(waits.ranks()[0], signal.SIGKILL)
    assert waits.finish().status != 0
    check_finished(launch(config, '--work-dir', tmp_path / 'cut', '--resume', environ=ENVIRON))
    check_bit_equal(*(load(tmp_path / run / 'iter_10.pth') for run in ('whole', 'cut')))

    (tmp_path / 'cut' / 'iter_10.pth').unlink()
    alone = launch(config, '--work-dir', tmp_path / 'cut', '--resume', ranks=1, environ=ENVIRON)
    check_finished(alone)
    assert '2 virtual ranks in 1 process(es), 2 each' in alone.output
    check_bit_equal(*(load(tmp_path / run / 'iter_10.pth') for run in ('whole', 'cut')))


# Rank 0 reads tiles 1 and 3, rank 1 tiles 2 and 7, of which the last is dull.
IN_ORDER = """
train_dataloader['sampler'] = dict(type='InfiniteSampler', shuffle=False)
train_dataloader['dataset']['ann_file'] = {names!r}
train_dataloader['dataset']['pipeline'] = test_pipeline
train_cfg = dict(type='IterBasedTrainLoop', max_iters=1, val_interval=10)
default_hooks['checkpoint']['interval'] = 1
"""
SHRINK = """
custom_hooks = [dict(type='DynamicSamplingHook', score=dict(type='LabelScore'),
                     validity=dict(low=0.01), max_resample_times=0, shortfall='shrink')]
"""


@main_leg
def test_a_shrunk_step_is_the_step_of_one_process_on_all_samples(
    tiny_data: Path, tmp_path: Path
) -> None:
    for name, tiles in (('shrunk', '1 2 3 7'), ('alone', '1 2 3')):
        names = tmp_path / f'{name}.txt'
        names.write_text('\n'.join(tiles.split()))
        more = IN_ORDER.format(names=str(names)) + (
            SHRINK if name == 'shrunk' else "train_dataloader['batch_size'] = 3\n"
        )
        config = write_tiny_config(tmp_path / f'{name}.py', tiny_data, more)
        check_finished(
            launch(config, '--work-dir', tmp_path / name, ranks=2 if name == 'shrunk' else 1)
        )
    one, other = (load(tmp_path / name / 'iter_1.pth') for name in ('shrunk', 'alone'))
    for key, value in one['state_dict'].items():
        torch.testing.assert_close(value, other['state_dict'][key], msg=key)
    # SGD's first momentum is the gradient itself
    for number, state in one['optimizer']['state'].items():
        torch.testing.assert_close(
            state['momentum_buffer'], other['optimizer']['state'][number]['momentum_buffer']
        )


FAILS = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='DynamicSamplingHook', score=dict(type='FailingScore', rank=1),
                     validity=dict(low=0), prefetch={prefetch})]
train_dataloader['num_workers'] = {workers}
"""


@main_leg
@pytest.mark.parametrize('prefetch, workers', [(False, 0), (True, 1)])
def test_a_score_that_fails_on_one_rank_ends_the_run_with_its_error(
    prefetch: bool, workers: int, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(
        tmp_path / 'tiny.py', tiny_data, FAILS.format(prefetch=prefetch, workers=workers)
    )
    ended = launch(config, '--work-dir', tmp_path / 'work', environ=ENVIRON)
    assert ended.status != 0 and ended.left_running == []
    assert 'no pixels in tile' in ended.final_error
    assert ended.seconds < 40


def share_and_sum() -> Any:
    dist.init_process_group('gloo', timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    channel = open_channel(None, None, 'test')

    def scorer(samples: List[int]) -> List[float]:
        return [10.0 * rank + sample for sample in samples]

    history = TileHistory(scorer, momentum=0.5, recheck=10)
    mine: Dict[int, List[int]] = {0: [1, 2], 1: [], 2: [2, 3]}
    if rank:
        history([Candidate(0)])  # later than rank 0
    history([Candidate(k, k) for k in mine[rank]])
    history.share(channel)
    shared = history.shared_state().tolist()
    known = history([Candidate(k, k) for k in (1, 2, 3)])
    totals = Totals()
    step = StepStatistics(judged=12, fetched=rank, seconds=float(rank), used=4)
    step.traffic.sent_bytes = 2**40 + rank
    step.drop('too_low', rank)
    totals.add(step)
    return sorted(shared), known, vars(totals.over_ranks(channel))


def test_ranks_share_what_they_have_seen_and_sum_what_they_did(tmp_path: Path) -> None:
    every = run_ranks(share_and_sum, 3, tmp_path)
    for shared, known, totals in every:
        assert shared == [[1, 1, 1], [2, 22, 2], [3, 23, 2]]  # of tile 2 the later score
        assert known == [1, 22, 23]
        assert totals['judged'] == 12 and totals['fetched'] == 3 and totals['used'] == 12
        assert totals['sent_bytes'] == 3 * 2**40 + 3 and totals['seconds'] == 2
        assert totals['dropped'] == {'too_low': 3}
