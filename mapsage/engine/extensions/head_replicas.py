"""Head replicas: several ranks train one decode head, each a shard of it.

``feature_source.ranks_per_head`` asks for them. The model's wrapper is chosen in
``engine/wrapping.py``, and the shards are in ``features/split_head/``.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Union

from mmengine.runner import BaseLoop

from mapsage.engine.replica_settings import one_rank_a_replica, ranks_per_head
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.wrappers import HeadReplicas


class SharedHeads(RunExtension):
    """The ranks of a replica read the same samples, and a hook divides and gathers the head."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        if run.distributed and ranks_per_head(run.cfg) > 1:
            return [dict(type='HeadReplicaHook')]
        return []

    @contextmanager
    def building_train_loop(self, run: EngineRun, loop: Union[BaseLoop, Dict[str, Any]]
                            ) -> Iterator[None]:
        if not isinstance(run.model, HeadReplicas):
            yield
            return
        with one_rank_a_replica(run.model.replicas):
            yield
