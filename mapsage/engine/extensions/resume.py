"""``resume``: which checkpoint a run continues from, and what the checkpoint decides.

The loaders draw their order from the run's seed and are built before MMEngine reads a checkpoint.
Checkpoint and seed are therefore chosen first, when the model is wrapped or the training starts.
How a checkpoint is chosen is in ``engine/checkpoints/resume.py``.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop

from mapsage.distributed import all_ranks_or_none
from mapsage.distributed.virtual_ranks import VirtualRanksError
from mapsage.engine.checkpoints.resume import (
    Choice,
    batches_done,
    choose_checkpoint,
    folders_of,
    not_read_again,
)
from mapsage.engine.checkpoints.resume_report import kept_settings, settings_of
from mapsage.engine.checkpoints.writer_lease import take_lease
from mapsage.engine.guards import DataRecordHook, ValidationRecordHook
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE

from .virtual_ranks import log_virtual_ranks, settle_ranks_of_run


class Resume(RunExtension):
    """Continues a run with the seed, the virtual ranks and the position of its checkpoint."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        return [
            dict(type=DataRecordHook, accept=run.env.accept_other_data),
            dict(type=ValidationRecordHook),
        ]

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        # A validation is complete when all other hooks, later registered ones too, have acted.
        run._hooks.sort(key=lambda hook: isinstance(hook, ValidationRecordHook))
        if run._resume and run.resume_choice is None:
            run.resume_choice = choose_for_all_ranks(run)
            _check_virtual_ranks(run)
        if run._resume and run.resume_choice is not None:
            _begin_with(run, run.resume_choice)
        yield

    @contextmanager
    def resuming(self, run: EngineRun) -> Iterator[None]:
        built = isinstance(run.optim_wrapper, (OptimWrapper, OptimWrapperDict))
        configured = settings_of(run.optim_wrapper, run.param_schedulers) if built else {}
        yield
        if built:
            warning = kept_settings(
                configured, settings_of(run.optim_wrapper, run.param_schedulers)
            )
            if warning:
                run.logger.warning(warning)
        if isinstance(run.train_loop, EpochBasedTrainLoop):
            _continue_epoch(run, run.train_loop)


def choose_for_all_ranks(run: EngineRun) -> Choice:
    """Return the checkpoint that a run with ``resume`` begins with, the same on all ranks.

    Collective.

    Raises:
        ResumeError: If there are checkpoints and none can be read, or there must be one.
        RankError: On the other ranks, if rank 0 cannot choose.
    """
    if ELASTIC_VARIABLE in os.environ:
        # From now on an earlier writer of the work dir adds nothing to it.
        with all_ranks_or_none('becoming the writer of the work dir'):
            if is_main_process():
                take_lease(run.work_dir)
    # With resume=True, load_from may name an earlier checkpoint of rank 0's machine.
    if not (run._resume is True and run._load_from):
        for extension in run.extensions:
            newest = extension.choose_checkpoint(run)
            if newest is not None:
                newest.notes.extend(not_read_again(run._load_from, newest))
                return newest
    # Rank 0 chooses for all, so that no two ranks resume from different files.
    shared: List[Optional[Choice]] = [None]
    with all_ranks_or_none('choosing the checkpoint'):
        if is_main_process():
            shared = [
                choose_checkpoint(
                    run.work_dir, run._load_from, run._resume, folders_of(run.cfg, run.work_dir)
                )
            ]
    broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return shared[0]


def _check_virtual_ranks(run: EngineRun) -> None:
    """Check that the model was wrapped for the virtual ranks of a checkpoint chosen afterwards."""
    ranks = settle_ranks_of_run(run)
    if ranks != run.virtual_ranks:
        raise VirtualRanksError(
            f'the checkpoint is of a run with {ranks.count} virtual ranks, and the model was '
            f'wrapped for {run.virtual_ranks.count}: set resume in the config, before the Runner '
            f'is built.'
        )
    log_virtual_ranks(run)


def _begin_with(run: EngineRun, choice: Choice) -> None:
    """Have the training begin with the chosen checkpoint, or from the start without one."""
    for line in choice.skipped:
        run.logger.warning(f'skipped a checkpoint that cannot be read. {line}')
    for line in choice.notes:
        run.logger.warning(line)
    run._resume = choice.path is not None
    if choice.path is None:
        return
    run.logger.info(f'resuming from {choice.path}')
    run._load_from = choice.path
    if choice.seed is not None and run._randomness_cfg.get('seed') != choice.seed:
        run.logger.info(f'the run continues with the seed of its checkpoint, {choice.seed}')
        run._randomness_cfg = dict(run._randomness_cfg, seed=choice.seed)
        run.set_randomness(**run._randomness_cfg)


def _continue_epoch(run: EngineRun, loop: EpochBasedTrainLoop) -> None:
    """Continue inside the epoch in which the checkpoint was saved, if its length is the same."""
    done, length = batches_done(loop.epoch, loop.iter, run.message_hub.runtime_info)
    if done and length == len(loop.dataloader):
        # The loop skips these batches: mapsage/compat/loop_resume.py.
        loop.batches_done = done
    elif done:
        run.logger.warning(
            f'the checkpoint was saved after {done} of {length} batches of epoch {loop.epoch + 1}, '
            f'which now has {len(loop.dataloader)}: the epoch starts over, as under MMEngine. '
            f'Resume with the same virtual ranks and batch size to continue after these batches.'
        )
