"""Heads over a frozen encoder: features from elsewhere, and heads that several ranks share.

``feature_source`` of the config asks for both. The model's wrapper is chosen in
``engine/wrapping.py``, and the shares of a head are in ``features/split_head/``. A rank that only
encodes has no Runner: ``engine/ranks/encoder_rank.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Union

from mmengine.runner import BaseLoop

from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.extras.streaming.replica_settings import one_rank_a_replica, ranks_per_head
from mapsage.extras.streaming.split_head.replica_parallel import HeadReplicas


class EncoderFeatures(RunExtension):
    """A hook replaces the images of a batch by their features."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        if not run.cfg.get('feature_source'):
            return []
        return [
            dict(type='FeatureSourceHook', source=run.cfg.feature_source, timeout=run.env.timeout)
        ]


class SharedHeads(RunExtension):
    """The ranks of a replica read the same samples, and a hook divides and gathers the head."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        if run.distributed and ranks_per_head(run.cfg) > 1:
            return [dict(type='HeadReplicaHook')]
        return []

    @contextmanager
    def building_train_loop(
        self, run: EngineRun, loop: Union[BaseLoop, Dict[str, Any]]
    ) -> Iterator[None]:
        if not isinstance(run.model, HeadReplicas):
            yield
            return
        with one_rank_a_replica(run.model.replicas):
            yield
