"""The start of a process in three steps: its rank, its accelerator, its device and process group.

Training, prediction, the feature cache and encoder ranks all take these steps, and their order
matters: vendors' software reads the launcher's variables on first use, so :func:`identify_process`
comes first, and a process group needs the accelerator, so :func:`choose_accelerator` precedes
:func:`join_ranks`.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, Mapping, Optional, Union

import mmengine.device.utils
import torch.distributed as dist

from mapsage.accelerator import (
    Accelerator,
    AcceleratorError,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.distributed import (
    RankLostError,
    apply_launcher_environment,
    error_text,
    init_process_group,
    local_rank,
    resolve_strategy,
)
from mapsage.distributed.backend_watch import watch_backends
from mapsage.distributed.device_checks import check_own_cards
from mapsage.distributed.groups.process_group import select_device
from mapsage.distributed.launcher_notes import absent_ranks, note_joining
from mapsage.distributed.torchrun_rounds import current_round


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
