"""The Runner resolves the strategy before it builds anything, and clears what it must."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict

import pytest
from mmengine.config import Config

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import StrategyError
from mapsage.engine import ConfigError, MapSageRunner

LEFTOVERS = dict(
    RANK='3', WORLD_SIZE='8', LOCAL_RANK='3', MASTER_ADDR='10.255.255.1', MASTER_PORT='1'
)
TRUE = dict(use_model_parallel=True)
WRAPPER = dict(type='MMModelParallel')


@pytest.fixture(autouse=True)
def _own_environment() -> Any:
    before = dict(os.environ)
    for name in LEFTOVERS:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)
    set_current_accelerator(resolve_accelerator('cpu'))


def config(work: Path, launcher: str = 'none', wrapper: Any = None, **env_cfg: Any) -> Config:
    """A config whose model and data do not exist."""
    return Config(
        dict(
            work_dir=str(work),
            launcher=launcher,
            default_scope='mmseg',
            model_wrapper_cfg=wrapper,
            env_cfg=dict(accelerator='cpu', **env_cfg),
            experiment_name=f'{work.name}{launcher}',
            model=dict(type='NoSuchModel'),
            train_dataloader=dict(dataset=dict(type='NoSuchDataset')),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1)),
        )
    )


@pytest.mark.parametrize(
    'launcher, wrapper, env_cfg, variables, words',
    [
        ('none', None, TRUE, {}, 'needs two or more devices in one process, and 1 is visible'),
        ('none', WRAPPER, {}, {}, 'needs two or more devices in one process'),
        ('pytorch', None, TRUE, LEFTOVERS, "launcher 'pytorch' started 8"),
        ('pytorch', WRAPPER, {}, LEFTOVERS, "type MMModelParallel.*launcher 'pytorch' started 8"),
        ('pytorch', None, {}, dict(RANK='0'), 'WORLD_SIZE, MASTER_ADDR, .* not set'),
        ('none', None, {}, dict(LEFTOVERS, TORCHELASTIC_RUN_ID='none'), 'Add --launcher pytorch'),
    ],
)
def test_refused_before_the_model_is_built(
    launcher: str,
    wrapper: Any,
    env_cfg: dict,
    variables: Dict[str, str],
    words: str,
    tmp_path: Path,
) -> None:
    os.environ.update(variables)
    with pytest.raises(StrategyError, match=words):
        MapSageRunner.from_cfg(config(tmp_path, launcher, wrapper, **env_cfg))


def test_a_wrapper_that_contradicts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='=False contradicts'):
        MapSageRunner.from_cfg(config(tmp_path, wrapper=WRAPPER, use_model_parallel=False))


def test_leftovers_are_gone_when_the_model_is_built(tmp_path: Path) -> None:
    os.environ.update(LEFTOVERS)
    with pytest.raises(KeyError, match='NoSuchModel'):
        MapSageRunner.from_cfg(config(tmp_path))
    assert not set(LEFTOVERS) & set(os.environ)
