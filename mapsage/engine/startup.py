"""Start and end of a process and of its run.

A process starts in three steps: its rank, its accelerator, its device and process group. Training,
prediction, the feature cache and encoder ranks all take these steps, and their order matters:
vendors' software reads the launcher's variables on first use, so :func:`identify_process` comes
first, and a process group needs the accelerator, so :func:`choose_accelerator` precedes
:func:`join_ranks`.

Two trainings would overwrite each other's checkpoints, so a training claims its work dir by a
locked file, see ``mapsage/base/folder_claims.py``. ``end_run`` is a method of
:class:`mapsage.host.hook.MapSageHook`, not of MMEngine's hooks. Requests to stop are in
``mapsage_launcher/stop_request.py``, the answer in ``guards/stop_hook.py``.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, contextmanager
from typing import ContextManager, Dict, Iterable, Iterator, Mapping, Optional, Union

import mmengine.device.utils
import torch.distributed as dist
from mmengine.dist import is_main_process

from mapsage.accelerator import (
    Accelerator,
    AcceleratorError,
    explain,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.distributed import (
    RankError,
    RankLostError,
    all_ranks_or_none,
    apply_launcher_environment,
    error_text,
    init_process_group,
    local_rank,
    lost_ranks_named,
    resolve_strategy,
)
from mapsage.distributed.backend_watch import watch_backends
from mapsage.distributed.device_checks import check_own_cards
from mapsage.distributed.groups.process_group import select_device
from mapsage.distributed.launcher_notes import absent_ranks, note_joining
from mapsage.distributed.torchrun_rounds import current_round
from mapsage.host.hook import mapsage_hooks
from mapsage.host.runner import MapSageRun, hooks_of_type
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE
from mapsage_launcher.stop_request import listening

from .config.report import config_headline, config_report
from .guards import StopHook
from .run_extension import EngineRun, RunExtension


def identify_process(launcher: str, port: Optional[int] = None) -> Dict[str, str]:
    """Make the launcher's variables describe this process.

    Afterwards ``local_rank()`` and all other readers of the environment are right: leftover
    variables of another launcher are removed, and the variables of Slurm and MPI are translated.

    Args:
        launcher: ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        port: Port at which the ranks of Slurm and MPI meet, ``env_cfg.dist_cfg.port``. As under
            MMEngine it takes precedence over ``MASTER_PORT``. None for ``MASTER_PORT``, or the
            launcher's default.

    Returns:
        The removed variables with their values; empty under a launcher.

    Raises:
        StrategyError: If the launcher's variables are missing, or if there are variables of a
            launcher that started several processes and was not named.
    """
    # Only the launcher decides which variables are stale, so the device count does not matter.
    stale = resolve_strategy(None, os.environ, 1, launcher=launcher).stale_variables
    cleared = {name: os.environ.pop(name) for name in stale}
    if launcher in ('slurm', 'mpi') and port is not None:
        os.environ['MASTER_PORT'] = str(port)
    if launcher != 'none':
        apply_launcher_environment(launcher)
    return cleared


def describe_cleared(variables: Mapping[str, str]) -> Optional[str]:
    """Return a warning about the variables that :func:`identify_process` cleared, or None."""
    if not variables:
        return None
    settings = ', '.join(f'{name}={value}' for name, value in variables.items())
    return (
        f'cleared the launcher variables {settings}: no launcher started this process, so they '
        f'are left over from another. If one did, name it with --launcher.'
    )


def choose_accelerator(name: str) -> Accelerator:
    """Put an accelerator in force, for MapSage and for MMEngine's ``get_device()``.

    Args:
        name: ``'auto'`` or an accelerator's name.

    Raises:
        AcceleratorError: If this machine cannot use it, or a variable of the environment lets it
            compute wrongly.
    """
    accelerator = set_current_accelerator(resolve_accelerator(name))
    problem = accelerator.environment_problem(os.environ)
    if problem is not None:
        raise AcceleratorError(problem)
    # get_device() reads this global of its module, so it works wherever the function was imported.
    mmengine.device.utils.DEVICE = accelerator.device_type
    return accelerator


def join_ranks(
    launcher: str, accelerator: Accelerator, backend: str, timeout: Union[int, float]
) -> None:
    """Select this rank's device and, under a launcher, start the process group.

    An existing process group is kept, because a process may build several Runners.

    Args:
        launcher: As for :func:`identify_process`.
        accelerator: The accelerator in force.
        backend: Communication backend; see :func:`mapsage.distributed.resolve_backend`.
        timeout: Seconds a collective may wait for the other ranks.

    Raises:
        AcceleratorError: If more ranks were started on this node than it has devices, or two
            ranks were given the same card.
        BackendError: If the accelerator cannot use the backend, or the timeout is not a valid time.
        RankLostError: If ranks of this machine have not come, with their numbers.
    """
    if launcher == 'none':
        select_device(accelerator)
        return
    if not dist.is_initialized():
        note_joining()
        _help_machines_to_join()
        try:
            init_process_group(accelerator, backend, timeout)
        except (RuntimeError, OSError) as error:
            if type(error) is not RuntimeError and not type(error).__module__.startswith('torch'):
                # An error of MapSage explains itself.
                raise
            absent = absent_ranks()
            if not absent:
                raise
            raise RankLostError(
                f'rank {os.environ.get("RANK")} waited {timeout:g} s for the others to join and '
                f'rank(s) {absent} have not come ({error_text(error).splitlines()[0]}). They hang, '
                f'were stopped, or still start: look at the last lines in their log.',
                absent,
            ) from error
        watch_backends(accelerator, timeout)
    check_own_cards(accelerator, local_rank())


def _help_machines_to_join() -> None:
    """Let machines join a job of plain torchrun; rank 0 warns if they could not."""
    if os.environ.get('RANK') != '0':
        return
    try:
        this_round = current_round()
        if this_round is not None:
            this_round.publish_address(os.environ)
    # The job itself can begin; only a machine that joins later would wait.
    except RuntimeError as error:
        sys.stderr.write(
            f'warning: the rendezvous store of torchrun does not answer '
            f'({error_text(error).splitlines()[0]}). A machine that joins would wait 60 s for '
            f'MASTER_ADDR, and all would end: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all '
            f'machines.\n'
        )
        sys.stderr.flush()


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
