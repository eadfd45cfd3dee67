"""Configs of few labels, stage two and rewards by the start script: the bits of a resumed run.

Eight ranks on simulated cards, two on the CPU.

Where ``MAPSAGE_NWPU`` names the folder of the NWPU polygons, those of configs/nwpu too.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Dict

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from support import ROOT, check_finished, launch, main_leg, no_simulated_cards

from mapsage.extras.demo import DemoParams, write_demo_data

pytestmark = main_leg
NO_SIM = no_simulated_cards()
NO_SIM_HERE = pytest.mark.skipif(NO_SIM is not None, reason=str(NO_SIM))
NWPU = os.environ.get('MAPSAGE_NWPU', '')
RANKS, STEPS = dict(cpu=2, sim=8), 2
SHORT = [
    '--cfg-options',
    f'train_cfg.max_iters={STEPS}',
    f'train_cfg.val_interval={STEPS}',
    'default_hooks.checkpoint.interval=1',
    'default_hooks.checkpoint.save_best=None',
    'default_hooks.logger.interval=1',
    'val_dataloader.dataset.indices=8',
    'train_dataloader.batch_size=2',
    *(
        f'{each}_dataloader.{setting}'
        for each in ('train', 'val')
        for setting in ('num_workers=0', 'persistent_workers=False')
    ),
]
# What the log of a run says that did what its config is for.
SAID = {
    'fixmatch_dropout': '[FixMatch] of 1 step(s): ',
    'stage_two': 'loss_jaccard: ',
    'reward': 'loss_reward: ',
}


@pytest.fixture(scope='module')
def environ(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, str]:
    """Data of the demo, and a model of each dataset that was never trained."""
    folder = tmp_path_factory.mktemp('few')
    write_demo_data(str(folder / 'demo'), DemoParams(val_scenes=1))
    (folder / 'demo' / 'scene.tif').unlink()  # of which the script would make a map
    init_default_scope('mmseg')
    for name in ('demo', 'nwpu'):
        cfg = Config.fromfile(str(_config(name, '')))
        torch.manual_seed(0)
        torch.save(
            dict(state_dict=MODELS.build(cfg.model).state_dict(), meta={}),
            str(folder / f'{name}.pth'),
        )
    return dict(MAPSAGE_DEMO=str(folder / 'demo'), MAPSAGE_NWPU=NWPU, STAGES=str(folder))


def _config(data: str, name: str) -> Path:
    return ROOT / 'configs' / data / f'efficientnet_lite0_fpn_{data}{name and "_" + name}.py'


def _train(
    environ: Dict[str, str], data: str, name: str, work: Path, accelerator: str, *options: str
) -> str:
    finished = launch(
        _config(data, name),
        '--work-dir',
        work,
        '--accelerator',
        accelerator,
        *SHORT,
        *options,
        ranks=RANKS[accelerator],
        environ=dict(environ, MAPSAGE_STAGE_ONE=f'{environ["STAGES"]}/{data}.pth'),
    )
    check_finished(finished)
    return finished.output


def _check(environ: Dict[str, str], data: str, name: str, folder: Path, accelerator: str) -> None:
    options = (
        ['train_dataloader.sampler.labeled=1', 'train_dataloader.sampler.unlabeled=1']
        if 'fixmatch' in name
        else []
    )
    if accelerator == 'sim':  # eccl's own sum depends on the buckets of gradients
        options.append('env_cfg.reduction=ordered')
    output = _train(environ, data, name, folder / 'whole', accelerator, *options)
    assert f'world size {RANKS[accelerator]}' in output
    kind = next(each for each in SAID if name.endswith(each))
    assert SAID[kind] in output
    (folder / 'again').mkdir()
    shutil.copy(str(folder / 'whole' / 'iter_1.pth'), str(folder / 'again'))
    again = _train(environ, data, name, folder / 'again', accelerator, *options, '--resume', 'must')
    assert f'Iter(train) [{STEPS}/{STEPS}]' in again and f'Iter(train) [1/{STEPS}]' not in again
    whole, resumed = (
        checkpoint_bits(folder / each / f'iter_{STEPS}.pth') for each in ('whole', 'again')
    )
    assert whole == resumed and len(whole) > 100
    if kind != 'fixmatch_dropout':  # it began from a model that was never trained
        assert 'the second stage begins from a model of mIoU ' in output
        assert 'the second stage begins' not in again
        told = [(folder / each / 'before_after.json').read_text() for each in ('whole', 'again')]
        assert told[0] == told[1] and {'mIoU', 'mBoundaryIoU', 'rare_recall', 'ECE'} <= set(
            json.loads(told[0])['after']
        )


EVERYWHERE = pytest.mark.parametrize('accelerator', ['cpu', pytest.param('sim', marks=NO_SIM_HERE)])


@EVERYWHERE
@pytest.mark.parametrize('name', ['16_fixmatch_dropout', 'stage_two', 'reward'])
def test_the_demo_on_ranks(
    environ: Dict[str, str], tmp_path: Path, name: str, accelerator: str
) -> None:
    _check(environ, 'demo', name, tmp_path, accelerator)


@pytest.mark.skipif(not NWPU, reason='MAPSAGE_NWPU is not set')
@EVERYWHERE
@pytest.mark.parametrize('name', ['16_fixmatch_dropout', 'stage_two', 'reward'])
def test_real_images_on_ranks(
    environ: Dict[str, str], tmp_path: Path, name: str, accelerator: str
) -> None:
    _check(environ, 'nwpu', name, tmp_path, accelerator)
