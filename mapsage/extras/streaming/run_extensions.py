"""Heads over a frozen encoder: features from elsewhere, and heads that several ranks share.

``feature_source`` of the config asks for both. The shares of a head are in ``split_head/``. A rank
that only encodes has no Runner: ``encoder_rank.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Union

from mmengine.config import Config
from mmengine.runner import BaseLoop
from torch import nn

from mapsage.engine.run_extension import EngineRun, RunExtension

from .encoder_rank import EncoderRank, take_role
from .replica_settings import check_head_replicas, one_rank_a_replica, ranks_per_head
from .split_head.replica_parallel import HeadReplicas
from .split_head.replicas import make_replicas

# The model of a replay computes the same features as these sources in its own step.
_COMPUTED_IN_A_REPLAY = ('Streamed', 'Local')


class EncoderFeatures(RunExtension):
    """A hook replaces the images of a batch by their features; some ranks may only encode."""

    @classmethod
    def take_process(cls, cfg: Config) -> Optional[EncoderRank]:
        streamed = (cfg.get('feature_source') or {}).get('type') == 'Streamed'
        return take_role(cfg) if streamed else None

    @classmethod
    def prepare_replay(cls, cfg: Config) -> None:
        if (cfg.get('feature_source') or {}).get('type') in _COMPUTED_IN_A_REPLAY:
            cfg.pop('feature_source')

    def cross_check_obstacle(self, cfg: Config) -> str:
        reason = 'feature_source, whose features of a batch only one rank has'
        return reason if cfg.get('feature_source') else ''

    def fixes_layout(self, cfg: Config) -> bool:
        # Encoders elsewhere and caches know the config, and not what the run began with.
        return bool(cfg.get('feature_source'))

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        if not run.cfg.get('feature_source'):
            return []
        return [
            dict(type='FeatureSourceHook', source=run.cfg.feature_source, timeout=run.env.timeout)
        ]


class SharedHeads(RunExtension):
    """The ranks of a replica read the same samples, and a hook divides and gathers the head."""

    def wrap_model(self, run: EngineRun, model: nn.Module) -> Optional[nn.Module]:
        size = ranks_per_head(run.cfg)
        if size == 1:
            return None
        check_head_replicas(run.cfg, run.accelerator, run.env.backend)
        return HeadReplicas(model, make_replicas(size, run.env.timeout))

    def needs_one_rank_each(self, cfg: Config) -> str:
        size = ranks_per_head(cfg)
        reason = 'the ranks of a head replica train one batch together'
        return f'feature_source.ranks_per_head={size}: {reason}' if size > 1 else ''

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
