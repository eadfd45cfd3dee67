"""A checkpoint that the main process saves alone, as MMEngine allows, makes no rank wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import mmengine.runner.runner
import pytest
import torch
from forked import fork_scenarios
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from ranks import run_ranks
from support import write_tiny_config, write_tiny_data

from mapsage.distributed import RankLostError
from mapsage.engine.guards import NonFiniteLossError
from mapsage.engine.runner import MapSageRunner

SAMPLED = """
train_dataloader['batch_size'] = 3
custom_hooks = [dict(type='DynamicSamplingHook', score=dict(type='LabelScore'),
                     validity=dict(low=0.491), local_target=2, max_age=2)]
"""
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


class Save(Hook):
    """Saves after iteration 5, as a user's hook does it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter != 4:
            return
        if self.how == 'bad weights' and is_main_process():
            next(iter(runner.model.parameters())).data.fill_(float('nan'))
        if self.how == 'together':
            with runner.saving_together():
                self.save(runner)
        elif self.how == 'all' or is_main_process():
            self.save(runner)

    def save(self, runner: Any) -> None:
        runner.save_checkpoint(runner.work_dir, 'own.pth', by_epoch=False)


def train(how: str, config: Path, work_dir: Path) -> str:
    """Train to the end; return the error if it was about a number."""
    cfg = Config.fromfile(str(config))
    cfg.launcher, cfg.work_dir, cfg.env_cfg.accelerator = 'pytorch', str(work_dir), 'cpu'
    cfg.train_cfg.val_interval = 100
    cfg.default_hooks.checkpoint.interval = 10
    if how.startswith('resume'):
        cfg.resume, cfg.load_from = True, str(work_dir.parent / how.split()[1] / 'own.pth')
    runner = MapSageRunner.from_cfg(cfg)
    if not how.startswith('resume'):
        runner.register_hook(Save(how), 'LOWEST')
    try:
        runner.train()
    except NonFiniteLossError as error:
        return str(error)
    except RankLostError:  # here rank 0 keeps the store, and it has ended
        return 'rank 0 is lost'
    return ''


def train_all(folder: Path) -> Dict[str, Any]:
    mmengine.runner.runner.collect_env = dict  # it asks a compiler, seconds a run
    config = write_tiny_config(folder / 'tiny.py', write_tiny_data(folder / 'data'), SAMPLED)
    told: Dict[str, Any] = {}
    for names in (['main', 'all', 'together', 'bad weights'], ['resume main', 'resume together']):
        told.update(
            fork_scenarios(
                {name: (train, 2, name, config, folder / name) for name in names}, folder
            )
        )
    return told


@pytest.fixture(scope='module')
def told(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('alone')
    return dict(run_ranks(train_all, 1, folder, folder, timeout=600)[0], folder=folder)


def load(told: Dict[str, Any], *path: str) -> dict:
    return torch.load(str(told['folder'].joinpath(*path)), map_location='cpu', **LOAD)


def log(told: Dict[str, Any], name: str) -> str:
    return next((told['folder'] / name).glob('*/*.log')).read_text()


@pytest.mark.parametrize('how', ['main', 'all'])
def test_no_rank_waits_and_what_is_missing_is_said(how: str, told: Dict[str, Any]) -> None:
    assert told[how] == ['', '']
    alone, together = load(told, how, 'own.pth'), load(told, 'together', 'own.pth')
    ranks: List[str] = alone['dynamic_sampling']['ranks']
    assert ranks[0] == together['dynamic_sampling']['ranks'][0]
    assert 'keys' not in ranks[1] and 'keys' in together['dynamic_sampling']['ranks'][1]
    assert 'saved by one rank: the pools of the others are missing' in log(told, how)
    assert 'saved by one rank' not in log(told, 'together')


def test_a_run_resumes_from_it_where_the_loader_stood(told: Dict[str, Any]) -> None:
    assert told['resume main'] == ['', '']
    alone, together = load(told, 'main', 'own.pth'), load(told, 'together', 'own.pth')
    drawn = [
        [json.loads(rank)['drawn'] for rank in checkpoint['dynamic_sampling']['ranks']]
        for checkpoint in (alone, together)
    ]
    assert drawn[0] == drawn[1]
    assert load(told, 'resume main', 'iter_10.pth')['meta']['iter'] == 10


def test_saved_together_it_holds_all(told: Dict[str, Any]) -> None:
    assert told['resume together'] == told['together'] == ['', '']
    whole, resumed = (load(told, name, 'iter_10.pth') for name in ('together', 'resume together'))
    assert all(
        torch.equal(value, resumed['state_dict'][name])
        for name, value in whole['state_dict'].items()
    )


def test_weights_that_are_not_finite_are_not_saved(told: Dict[str, Any]) -> None:
    assert isinstance(told['bad weights'], list), told['bad weights']
    assert 'holds NaN or infinity after iteration 5, rank 0' in told['bad weights'][0]
    assert told['bad weights'][1]
    assert not (told['folder'] / 'bad weights' / 'own.pth').exists()
