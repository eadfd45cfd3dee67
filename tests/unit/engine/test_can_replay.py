"""A replay is advised where one process can have the virtual ranks of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict

import pytest
from mmengine.config import Config

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.engine.extensions import EXTENSIONS
from mapsage.engine.extensions.virtual_ranks import can_replay


@pytest.mark.parametrize(
    'virtual_ranks, cfg, possible',
    [
        (3, {}, True),
        (1, dict(sync_bn='torch'), True),
        (2, dict(sync_bn='torch'), False),
        (2, dict(feature_source=dict(type='Streamed', ranks_per_head=2)), True),
        (2, dict(feature_source=dict(type='Cached', ranks_per_head=2)), False),
        (2, dict(feature_source=dict(type='Prefetched')), True),
        (3, dict(custom_hooks=[dict(type='DynamicSamplingHook')]), True),
        (3, dict(custom_hooks=[dict(type='SyncBuffersHook')]), False),
        (2, dict(train_dataloader=dict(sampler=object())), False),
    ],
)
def test_a_replay_is_advised_where_one_process_can_have_the_virtual_ranks(
    virtual_ranks: int, cfg: Dict[str, Any], possible: bool
) -> None:
    given = Config(dict(dict(train_dataloader=dict(sampler=dict(type='InfiniteSampler'))), **cfg))
    run: Any = SimpleNamespace(
        cfg=given,
        extensions=[extension() for extension in EXTENSIONS],
        strategy=SimpleNamespace(name='distributed_data_parallel'),
        computes_sync_bn=False,
        virtual_ranks=VirtualRanks(virtual_ranks, virtual_ranks),
        train_loop=SimpleNamespace(dataloader=SimpleNamespace(dataset=[])),
    )
    assert can_replay(run) == possible
    assert given.get('feature_source') == cfg.get('feature_source')
