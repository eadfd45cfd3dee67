"""Settings of a run in which several ranks train one head, a head replica.

``run_extensions.py`` applies them to a run.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import mmengine.dist.utils
from mmengine.config import Config

from mapsage.accelerator import Accelerator
from mapsage.distributed import resolve_backend
from mapsage.distributed.groups.staged import BACKEND as STAGED
from mapsage.extras.streaming.encoder_gate import FeatureSourceError
from mapsage.extras.streaming.split_head.replicas import Replicas
from mapsage.extras.streaming.split_head.tensor_parallel import check_torch


def ranks_per_head(cfg: Config) -> int:
    """Return how many ranks train one head; 1 unless ``feature_source.ranks_per_head`` is set."""
    return (cfg.get('feature_source') or {}).get('ranks_per_head', 1)


def check_head_replicas(cfg: Config, accelerator: Accelerator, backend: str) -> None:
    """Check that head replicas of several ranks can train a config. Pure.

    Args:
        cfg: Config of the run.
        accelerator: Accelerator of the run.
        backend: Value of ``env_cfg.dist_cfg.backend``.

    Raises:
        FeatureSourceError: If they cannot. The text names the setting, the reason and the remedy.
    """
    setting = f'feature_source.ranks_per_head={ranks_per_head(cfg)}'
    try:
        check_torch()
    except RuntimeError as error:
        raise FeatureSourceError(f'{setting}: {error}') from error
    if accelerator.name not in ('cpu', 'cuda') or resolve_backend(accelerator, backend).endswith(
        STAGED
    ):
        raise FeatureSourceError(
            f'{setting} on accelerator {accelerator.name!r} with backend {backend!r}: expected cpu '
            f'with gloo, or cuda with nccl, where torch.distributed.tensor works. Set '
            f'ranks_per_head=1, or --accelerator and env_cfg.dist_cfg.backend.'
        )
    incompatible = dict(
        model_wrapper_cfg=cfg.get('model_wrapper_cfg'),
        compile=cfg.get('compile'),
        **{
            'auto_scale_lr.enable': (cfg.get('auto_scale_lr') or {}).get('enable'),
            'randomness.diff_rank_seed': (cfg.get('randomness') or {}).get('diff_rank_seed'),
        },
    )
    for name, value in incompatible.items():
        if value:
            raise FeatureSourceError(
                f'{setting} with {name}={value!r}: this setting assumes that each rank trains a '
                f'whole model. Take it out of the config, or set ranks_per_head=1.'
            )


@contextmanager
def one_rank_a_replica(replicas: Replicas) -> Iterator[None]:
    """Make MMEngine treat each replica as one rank while the context is open.

    Samplers have no arguments for rank and world size. They ask ``mmengine.dist`` when they are
    built, so the context replaces its default group.

    Args:
        replicas: Head replicas of the job.
    """
    utils: Any = mmengine.dist.utils
    host_function, utils.get_default_group = utils.get_default_group, lambda: replicas.peers
    try:
        yield
    finally:
        utils.get_default_group = host_function
