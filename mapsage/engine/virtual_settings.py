"""Rules for the virtual ranks of a run: how many there are, and what forbids several per process.

Pure. A run keeps its number of virtual ranks for life; the number of processes may change at every
start. Some settings need one process per virtual rank, because they work on processes.
``extensions/virtual_ranks.py`` applies the rules to a run.
"""

from __future__ import annotations

from typing import Mapping, Optional

from mmengine.config import Config

from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage_launcher.nodes.elastic import expected_ranks

from .env_cfg import short_name

_SYNC_BN = (
    'statistics over all ranks need all of them in the forward pass at the same moment '
    "(with norm_cfg=dict(type='BN') each virtual rank has its own, with 'GN' none are "
    'needed)'
)


def settle_virtual_ranks(
    configured: Optional[int], saved: Optional[int], processes: int, expected: Optional[int] = None
) -> VirtualRanks:
    """Return the virtual ranks of a run.

    Args:
        configured: ``env_cfg.virtual_ranks`` of the config.
        saved: Virtual ranks of the checkpoint from which the run resumes; None without a
            checkpoint, or if it does not say.
        processes: Number of processes that train.
        expected: Number of processes once all nodes of an elastic job have come; None for a job of
            a fixed size.

    Raises:
        VirtualRanksError: If config and checkpoint differ, or there are too many processes.
    """
    if configured is not None and saved is not None and configured != saved:
        raise VirtualRanksError(
            f'env_cfg.virtual_ranks={configured}, and the checkpoint is of a run with {saved}: the '
            f'number of virtual ranks is fixed for the life of a run, because the batch, the order '
            f'of the samples and the learning rate depend on it. Remove the setting to continue '
            f'with {saved}, or start a run of {configured} with load_from=<checkpoint> and another '
            f'work dir.'
        )
    if saved is not None and processes > saved:
        raise VirtualRanksError(
            f'the checkpoint is of a run with {saved} virtual rank(s), and {processes} processes '
            f'were started: start {saved} or fewer, or begin a run of {processes} with '
            f'load_from=<checkpoint> and another work dir.'
        )
    return VirtualRanks(saved or configured or expected or processes, processes)


def expected_processes(environ: Mapping[str, str]) -> Optional[int]:
    """Return how many processes train once all nodes of an elastic job have come.

    Args:
        environ: Environment of the process, which says how many ranks only encode.

    Returns:
        The number, or None if the job is not elastic.
    """
    ranks = expected_ranks(environ)
    return None if ranks is None else ranks - int(environ.get(ENCODERS_VARIABLE, '0'))


def obstacle(cfg: Config, strategy: str, sync_layers: bool = False) -> str:
    """Return the setting that needs one process for each virtual rank, and why.

    Args:
        cfg: Config of the run.
        strategy: Name of its strategy.
        sync_layers: Whether the model has SyncBN layers that the accelerator computes.

    Returns:
        A text such as ``'SyncBuffersHook: it averages ...'``; empty if nothing in the config does.
    """
    configs = [*(cfg.get('custom_hooks') or ()), *(cfg.get('default_hooks') or {}).values()]
    hooks = {short_name(config.get('type')) for config in configs if isinstance(config, dict)}
    wrapper = short_name(
        (cfg.get('model_wrapper_cfg') or {}).get('type', 'MMDistributedDataParallel')
    )
    for applies, setting, reason in (
        (
            strategy == MODEL_PARALLEL,
            'model parallelism',
            'a model on several devices has one batch in its pipeline',
        ),
        (
            'SyncBuffersHook' in hooks,
            'SyncBuffersHook',
            'it averages the buffers of processes and not of virtual ranks',
        ),
        (cfg.get('sync_bn'), f'sync_bn={cfg.get("sync_bn")!r}', _SYNC_BN),
        (sync_layers, 'SyncBN layers (norm_cfg.type)', _SYNC_BN),
        (
            wrapper != 'MMDistributedDataParallel',
            f'model_wrapper_cfg.type={wrapper!r}',
            'only VirtualDataParallel, which replaces MMDistributedDataParallel, runs one virtual '
            'rank after the other',
        ),
        (
            (cfg.get('randomness') or {}).get('diff_rank_seed'),
            'randomness.diff_rank_seed=True',
            'it seeds by processes; steps have a seed for each virtual rank without it',
        ),
    ):
        if applies:
            return f'{setting}: {reason}'
    return ''
