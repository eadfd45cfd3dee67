"""EoMT and PMT on several ranks: killed and resumed, by iterations and by epochs; head replicas."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from mask_runs import config_of
from support import Launch, check_finished, launch, main_leg, rest_is_long

pytestmark = main_leg
LOAD: Dict[str, Any] = {'weights_only': False} if torch.__version__ >= '2' else {}
EMA = dict(type='EMAHook', momentum=0.3)
# By kind: ranks, changes of the config, step before which rank 1 is killed, and what is compared.
# PMT's checkpoint is inside an accumulation cycle, two steps after the end of an epoch.
RUNS: Dict[str, Any] = dict(
    eomt=(2, {'default_hooks.checkpoint.interval': 2}, 5, 'iter_8.pth'),
    pmt=(
        3,
        {
            'train_dataloader.sampler.type': 'DefaultSampler',
            'log_processor.by_epoch': True,
            'default_hooks.checkpoint.interval': 5,
        },
        7,
        'iter_9.pth',
    ),
)
AMP = dict(type='AmpOptimWrapper', dtype='bfloat16') if LOAD else {}
KILLED = dict(type='StopBeforeIteration', variable='MAPSAGE_TEST_REACHED')


@pytest.mark.parametrize('kind', rest_is_long(RUNS, 'eomt'))
def test_killed_and_resumed_with_the_same_bits(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    """With mixed precision, accumulation, the average of the weights, and masks that fade out."""
    ranks, changes, step, last = RUNS[kind]
    cfg = config_of(
        kind,
        tiny_data,
        tmp_path / 'config',
        steps=8,
        **{'custom_imports.imports': ['mapsage', 'fault_hooks'], **changes},
    )
    if kind == 'pmt':  # three batches an epoch
        cfg.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=3)
    cfg.optim_wrapper.update(AMP, accumulative_counts=2 if kind == 'pmt' else 1)
    cfg.custom_hooks += [EMA, dict(KILLED, iteration=step)]
    config = tmp_path / 'run.py'
    cfg.dump(str(config))
    faults = {'PYTHONPATH': str(Path(__file__).parents[1] / 'integration')}
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    check_finished(launch(config, '--work-dir', whole, ranks=ranks, environ=faults))

    run = Launch(
        config,
        '--work-dir',
        cut,
        ranks=ranks,
        environ=dict(faults, MAPSAGE_TEST_REACHED=str(tmp_path / 'reached')),
    )
    run.wait_for(tmp_path / 'reached')
    os.kill(run.ranks()[1], signal.SIGKILL)
    finished = run.finish()
    assert finished.status != 0 and finished.left_running == []
    assert not (cut / last).exists()
    resumed = launch(config, '--work-dir', cut, '--resume', 'must', ranks=ranks, environ=faults)
    check_finished(resumed)
    assert checkpoint_bits(whole / last) == checkpoint_bits(cut / last)
    before = masked(cut, 'iter_4.pth' if kind == 'eomt' else 'iter_5.pth')
    assert 0 < sum(before) < 2 and masked(cut, last) == [0, 0]  # resumed while masks fade out


def masked(work: Path, name: str) -> List[float]:
    state = torch.load(str(work / name), map_location='cpu', **LOAD)['state_dict']
    return state['decode_head.attn_mask_probs'].tolist()


@pytest.mark.long
def test_two_head_replicas_train_what_two_ranks_do(tiny_data: Path, tmp_path: Path) -> None:
    """PMT's queries and decoder held by two ranks each, with uneven masks a replica."""
    found = {}
    for name, ranks, source in (
        ('replicas', 5, dict(type='Streamed', encoders=1, ranks_per_head=2)),
        ('pair', 2, None),
    ):
        cfg = config_of('pmt', tiny_data, tmp_path / name, steps=4)
        cfg.optim_wrapper.clip_grad.max_norm = 1.0
        if source:
            cfg.feature_source = source
        cfg.dump(str(tmp_path / f'{name}.py'))
        check_finished(launch(tmp_path / f'{name}.py', '--work-dir', tmp_path / name, ranks=ranks))
        saved = torch.load(str(tmp_path / name / 'iter_4.pth'), map_location='cpu', **LOAD)
        found[name] = saved['state_dict']
    assert found['replicas'].keys() == found['pair'].keys()
    for key, value in found['pair'].items():
        torch.testing.assert_close(found['replicas'][key], value, rtol=1e-3, atol=2e-5, msg=key)
    assert found['pair']['decode_head.attn_mask_probs'].tolist() == [0, 0]
