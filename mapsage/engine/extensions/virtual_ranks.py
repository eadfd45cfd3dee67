"""Virtual ranks: how many a run has, and the loader, learning rate and replay that follow.

A run keeps its number of virtual ranks for life, so a resumed run takes it from its checkpoint. A
process trains several virtual ranks if there are fewer processes; some settings forbid that, because
they work on processes. :func:`settle_virtual_ranks` and :func:`obstacle` are pure and hold these rules.
The sums over virtual ranks are in ``wrappers/virtual_parallel.py``.
"""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Optional, Union

from mmengine.config import Config
from mmengine.runner import BaseLoop
from torch.utils.data import DataLoader, IterableDataset

from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.engine.env_cfg import short_name
from mapsage.engine.loading.block_loader import build_block_loader
from mapsage.engine.loading.build import build_keyed_loader, checked_dataset
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.host.runner import dataset_of
from mapsage_launcher.rank_notes import expected_ranks


class VirtualRankLoading(RunExtension):
    """A process that trains several virtual ranks reads the samples of all of them."""

    @contextmanager
    def building_train_loop(
        self, run: EngineRun, loop: Union[BaseLoop, Dict[str, Any]]
    ) -> Iterator[None]:
        if run.virtual_ranks.one_each or not isinstance(loop, dict):
            yield
            return
        config, run._train_dataloader = run._train_dataloader, _build_loader(run)
        try:
            yield
        finally:
            run._train_dataloader = config


def settle_ranks_of_run(run: EngineRun) -> VirtualRanks:
    """Return the virtual ranks of a run according to its config, checkpoint and processes.

    Raises:
        VirtualRanksError: If the three do not fit together.
    """
    saved = None if run.resume_choice is None else run.resume_choice.virtual_ranks
    configured, processes = run.env.virtual_ranks, run.world_size
    obstacle = _obstacle(run, run.cfg)
    if obstacle and configured is None:
        ranks = VirtualRanks(processes, processes)
        if saved not in (None, processes):
            run.logger.warning(
                f'the checkpoint is of a run with {saved} virtual ranks, and this one has '
                f'{processes} process(es) with {obstacle}. It continues with {processes} virtual '
                f'ranks, so its batches and results will differ. Start {saved} processes to '
                f'continue exactly.'
            )
    else:
        ranks = settle_virtual_ranks(configured, saved, processes, expected_processes(os.environ))
    if obstacle and not ranks.one_each:
        raise VirtualRanksError(
            f'{ranks.count} virtual ranks in {processes} process(es) with {obstacle}. '
            f'Start {ranks.count} processes, or do without it.'
        )
    return ranks


def log_virtual_ranks(run: EngineRun) -> None:
    """Log how the virtual ranks are divided among the processes, if there are several."""
    if run.virtual_ranks.count > 1:
        run.logger.info(run.virtual_ranks.describe())


@contextmanager
def counted_as_world(run: EngineRun) -> Iterator[None]:
    """Let MMEngine take the number of virtual ranks for the world size, which scales its rates."""
    processes, run._world_size = run._world_size, run.virtual_ranks.count
    try:
        yield
    finally:
        run._world_size = processes


def can_replay(run: EngineRun) -> bool:
    """Return whether ``tools/train.py --replay`` could carry out a step of a run."""
    if isinstance(dataset_of(run.train_loop), IterableDataset):
        return False
    if run.virtual_ranks.count == 1:
        return True
    loader = run.cfg.get('train_dataloader')
    if not isinstance(loader, dict) or not isinstance(loader.get('sampler'), dict):
        return False
    cfg = Config(dict(run.cfg.items()))
    for extension in run.extensions:
        extension.prepare_replay(cfg)
    return not _obstacle(run, cfg)


def _obstacle(run: EngineRun, cfg: Config) -> str:
    """Return the setting of a config that needs one process for each virtual rank, and why."""
    obstacles = [extension.needs_one_rank_each(cfg) for extension in run.extensions]
    general = obstacle(cfg, run.strategy.name, run.computes_sync_bn)
    return next(filter(None, [general, *obstacles]), '')


def _build_loader(run: EngineRun) -> DataLoader:
    """Build the training loader of all virtual ranks of this process."""
    config, ranks = run._train_dataloader, run.virtual_ranks
    if not isinstance(config, dict):
        raise VirtualRanksError(
            f'train_dataloader is a {type(config).__name__}, whose sampler knows '
            f'{ranks.processes} process(es) and not the {ranks.count} virtual ranks: expected its '
            f'config, a dict.'
        )
    dataset = config['dataset']
    if isinstance(dataset, dict):
        dataset = checked_dataset(copy.deepcopy(dataset))
    return build_block_loader(
        config,
        lambda rank_config: build_keyed_loader(rank_config, run.seed),
        dataset,
        ranks,
        run.rank,
    )


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
