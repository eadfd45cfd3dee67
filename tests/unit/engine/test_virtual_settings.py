from __future__ import annotations

from typing import Any, Dict

import pytest
from mmengine.config import Config
from mmengine.model import MMDistributedDataParallel

from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.engine.env_cfg import short_name
from mapsage.engine.extensions.virtual_ranks import (
    expected_processes,
    obstacle,
    settle_virtual_ranks,
)
from mapsage_launcher.rank_notes import VIRTUAL_RANKS_VARIABLE


@pytest.mark.parametrize(
    ('asked', 'saved', 'processes', 'count'),
    [(None, None, 3, 3), (8, None, 3, 8), (None, 8, 3, 8), (8, 8, 3, 8)],
)
def test_the_checkpoint_and_then_the_config_say_how_many(
    asked: Any, saved: Any, processes: int, count: int
) -> None:
    assert settle_virtual_ranks(asked, saved, processes) == VirtualRanks(count, processes)


def test_ranks_that_only_encode_are_no_virtual_ranks() -> None:
    elastic = {VIRTUAL_RANKS_VARIABLE: '32'}
    assert expected_processes(elastic) == 32
    assert expected_processes({**elastic, ENCODERS_VARIABLE: '8'}) == 24
    assert expected_processes({ENCODERS_VARIABLE: '8'}) is None


def test_config_and_checkpoint_must_agree() -> None:
    with pytest.raises(VirtualRanksError, match=r'virtual_ranks=4.*a run with 8.*load_from='):
        settle_virtual_ranks(4, 8, 2)


def test_there_are_no_idle_processes() -> None:
    with pytest.raises(VirtualRanksError, match=r'5 processes for 4 virtual rank.* 1, 2, 4 divide'):
        settle_virtual_ranks(4, None, 5)


def test_more_processes_than_the_checkpoint_has_virtual_ranks_are_told_the_way_out() -> None:
    with pytest.raises(
        VirtualRanksError,
        match=(r'with 1 virtual rank.*and 8 processes .* start 1 or fewer, .* 8 with load_from='),
    ):
        settle_virtual_ranks(None, 1, 8)


@pytest.mark.parametrize(
    ('cfg', 'named'),
    [
        (dict(custom_hooks=[dict(type='mapsage.engine.SyncBuffersHook')]), 'SyncBuffersHook'),
        (
            dict(custom_hooks=[dict(type='EMAHook'), dict(type='SyncBuffersHook')]),
            'SyncBuffersHook',
        ),
        (dict(default_hooks=dict(timer=None, own=dict(type='SyncBuffersHook'))), 'SyncBuffersHook'),
        (dict(sync_bn='torch'), 'sync_bn'),
        (dict(model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel')), 'MMSeparate'),
        (dict(randomness=dict(diff_rank_seed=True)), 'diff_rank_seed'),
    ],
)
def test_what_needs_a_process_for_each_virtual_rank_is_named(
    cfg: Dict[str, Any], named: str
) -> None:
    assert named in obstacle(Config(cfg), 'single_device')


@pytest.mark.parametrize('kind', ['mmengine.MMDistributedDataParallel', MMDistributedDataParallel])
def test_a_type_may_have_a_scope_or_be_a_class(kind: Any) -> None:
    assert short_name(kind) == 'MMDistributedDataParallel'
    cfg: Any = dict(model_wrapper_cfg=dict(type=kind))
    assert obstacle(cfg, 'single_device') == ''


def test_a_plain_config_has_no_obstacle_but_model_parallelism() -> None:
    cfg = Config(
        dict(
            custom_hooks=[dict(type='EMAHook')],
            randomness=dict(seed=1),
            model_wrapper_cfg=dict(type='MMDistributedDataParallel'),
        )
    )
    assert obstacle(cfg, 'single_device') == ''
    told = obstacle(cfg, 'single_device', sync_layers=True)
    assert 'SyncBN layers' in told and "norm_cfg=dict(type='BN')" in told
    assert 'model parallelism' in obstacle(cfg, MODEL_PARALLEL)
