"""Virtual ranks: how many a run has, and the loader, learning rate and replay that follow.

A run keeps its number of virtual ranks for life, so a resumed run takes it from its checkpoint. A
process trains several virtual ranks if there are fewer processes. The rules, which are pure, are in
``engine/virtual_settings.py``; the sums over virtual ranks are in
``wrappers/virtual_parallel.py``.
"""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Union

from mmengine.config import Config
from mmengine.runner import BaseLoop
from torch.utils.data import DataLoader, IterableDataset

from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.engine import virtual_settings
from mapsage.engine.loading.block_loader import build_block_loader
from mapsage.engine.loading.build import build_keyed_loader, checked_dataset
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.host.runner import dataset_of


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
        ranks = virtual_settings.settle_virtual_ranks(
            configured, saved, processes, virtual_settings.expected_processes(os.environ)
        )
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
    general = virtual_settings.obstacle(cfg, run.strategy.name, run.computes_sync_bn)
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
