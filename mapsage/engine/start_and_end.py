"""Start and end of a run: its log's beginning, its work dir, requests to stop, its last hook calls.

Two trainings would overwrite each other's checkpoints, so a training claims its work dir by a
locked file, see ``mapsage/base/folder_claims.py``. ``end_run`` is a method of
:class:`mapsage.host.hook.MapSageHook`, not of MMEngine's hooks. Requests to stop are in
``mapsage_launcher/stop_request.py``, the answer in ``guards/stop_hook.py``.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import ContextManager, Iterable, Iterator, Optional

import torch.distributed as dist
from mmengine.dist import is_main_process

from mapsage.accelerator import explain
from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.distributed import RankError, all_ranks_or_none, error_text, lost_ranks_named
from mapsage.host.hook import mapsage_hooks
from mapsage.host.runner import MapSageRun, hooks_of_type
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE
from mapsage_launcher.stop_request import listening

from .config_report import config_headline, config_report
from .guards import StopHook
from .run_extension import EngineRun, RunExtension

_ADVICE = 'Wait for its end, stop it, or choose another --work-dir.'


def log_start(
    run: EngineRun, determinism: Optional[str], warnings: Iterable[Optional[str]]
) -> None:
    """Log the start of a run, after MMEngine's own report of the environment.

    Args:
        run: The run; its ranks have met.
        determinism: What the accelerator set for deterministic computation, if it set something.
        warnings: Warnings about the start; None and empty ones are left out.
    """
    backend = f', backend {dist.get_backend()}' if run.distributed else ''
    run.logger.info(
        f'{explain(run.accelerator, run.env.accelerator)}; world size {run.world_size}{backend}'
    )
    probes = run.accelerator.describe_probes()
    if probes:
        run.logger.info(probes)
    if determinism:
        run.logger.info(determinism)
    for warning in warnings:
        if warning:
            run.logger.warning(warning)
    if is_main_process():
        run.logger.info(config_report(run.cfg))
        headline = config_headline(run.cfg)
        if headline:
            run.logger.info(headline)


@contextmanager
def alone_in_work_dir(work_dir: str, logger: logging.Logger) -> Iterator[None]:
    """Keep other trainings out of a work dir while the block runs. Collective at its beginning.

    Rank 0 holds the claim for all ranks. The nodes of an elastic job share a claim, because one
    that is frozen or cut off must not stop the others; the writer's lease decides which of them
    writes.

    Args:
        work_dir: Folder of the run, which exists.
        logger: Logger for a warning if the file system has no locks.

    Raises:
        FolderClaimedError: On every rank, if another training writes there.
    """
    job = os.environ.get('TORCHELASTIC_RUN_ID', '') if ELASTIC_VARIABLE in os.environ else ''
    with ExitStack() as stack:
        try:
            with all_ranks_or_none('claiming the work dir'):
                if is_main_process():
                    warning = stack.enter_context(claimed(work_dir, ['the training'], _ADVICE, job))
                    if warning:
                        logger.warning(warning)
        except RankError as error:
            name, _, text = error.text.partition(': ')
            if name != FolderClaimedError.__name__:
                raise
            # Raised again without the rank, because no rank is to blame.
            raise FolderClaimedError(text) from error
        yield


def listening_for_stops(run: EngineRun) -> ContextManager[None]:
    """Take SIGTERM and SIGUSR1 for requests while the context is open, if a StopHook answers them."""
    return listening(bool(hooks_of_type(run, StopHook)))


class StopRequests(RunExtension):
    """Hooks that can end the run are sorted last, after hooks that were registered later."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        """Sort the hooks before the training begins."""
        run._hooks.sort(key=lambda hook: isinstance(hook, StopHook))
        yield


@contextmanager
def end_reported(runner: MapSageRun, task: str) -> Iterator[None]:
    """Name the ranks that are lost in the block, and call ``end_run(runner, error)`` after it.

    ``error`` is what the block raised, or None. Ranks do not wait for each other there, so the
    method must not enter a collective. What it raises becomes a warning in the log.

    Args:
        runner: The runner, whose instances of MapSageHook are called.
        task: Name of what the block does, for the error about lost ranks, such as ``'training'``.
    """
    error: Optional[BaseException] = None
    try:
        with lost_ranks_named(task):
            yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        for hook in mapsage_hooks(runner._hooks):
            try:
                hook.end_run(runner, error)
            # A user's subclass may raise anything, and the run has ended already.
            except Exception as failure:
                runner.logger.warning(f'{hook.name_in_messages}.end_run: {error_text(failure)}')
