"""Read a launcher's environment into the variables that torch.distributed reads.

The variables are those of MMEngine's ``init_dist``, without its calls to a vendor.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from typing import Any, Callable, Dict, Mapping, MutableMapping, Optional

from mapsage.base.errors import UserError

# Slurm jobs that share a node must not share a port, so the default is derived from the job id:
# 20000 is above the well-known services and the range ends below Linux's ephemeral ports (32768).
_SLURM_PORT_BASE, _SLURM_PORT_SPAN = 20000, 12000


# Environment variable with the number of encoders, set in every process of a job that was split.
ENCODERS_VARIABLE = 'MAPSAGE_ENCODERS'


class LauncherError(UserError, ValueError):
    """The environment lacks the variables of the named launcher."""

    on_every_rank = True


def launcher_environment(
    launcher: str, environ: Mapping[str, str], first_host: Optional[Callable[[str], str]] = None
) -> Dict[str, str]:
    """Return ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Pure: reads ``environ`` only, apart from ``first_host``.

    Args:
        launcher: Name of the launcher: ``'pytorch'`` (torchrun), ``'slurm'`` (srun) or ``'mpi'``
            (Open MPI).
        environ: Environment of the process.
        first_host: Function that returns the first host name of a Slurm node list; ``scontrol``
            when None.

    Raises:
        LauncherError: If the launcher is unknown or one of its variables is missing.
    """
    if launcher == 'pytorch':
        return _pytorch(environ)
    if launcher == 'mpi':
        return _mpi(environ)
    if launcher == 'slurm':
        return _slurm(environ, first_host or _scontrol_first_host)
    raise LauncherError(f'unknown launcher {launcher!r}: expected none, pytorch, slurm or mpi.')


def apply_launcher_environment(
    launcher: str, environ: MutableMapping[str, str] = os.environ
) -> int:
    """Write :func:`launcher_environment` into ``environ`` and return the local rank."""
    environ.update(launcher_environment(launcher, environ))
    return int(environ['LOCAL_RANK'])


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank on its node; 0 without a launcher.

    The Runner has removed variables of earlier launchers (``resolve_strategy``).
    """
    return int(environ.get('LOCAL_RANK', '0'))


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks of this process's job are on this machine. Pure.

    The launcher that started the ranks says so: torchrun, Open MPI or Slurm, in this order, since a
    launcher may run inside an allocation of another. Ranks that were started by hand are on one
    machine if all of them are local ones, or if they meet at a loopback address.

    Args:
        environ: Environment of the process, after :func:`apply_launcher_environment`.
    """

    def number(name: str) -> Optional[int]:
        text = environ.get(name, '')
        return int(text) if text.isdecimal() else None

    machines = number('GROUP_WORLD_SIZE')
    if machines is None and 'OMPI_COMM_WORLD_RANK' in environ:
        local, size = number('OMPI_COMM_WORLD_LOCAL_SIZE'), number('OMPI_COMM_WORLD_SIZE')
        machines = None if local is None or size is None else 1 if local == size else 2
    elif machines is None:
        machines = number('SLURM_STEP_NUM_NODES') or number('SLURM_NNODES')
    if machines is not None:
        return machines == 1
    if re.match(r'localhost$|127(\.\d+){3}$|::1$', environ.get('MASTER_ADDR', '')):
        return True
    # Those of a job that was split do not count the encoders, which may be on another machine.
    return (
        ENCODERS_VARIABLE not in environ
        and number('WORLD_SIZE') is not None
        and number('WORLD_SIZE') == number('LOCAL_WORLD_SIZE')
    )


def die_with_launcher() -> None:
    """Ask the kernel to kill this rank when the launcher's thread that started it ends.

    Linux only (``prctl(PR_SET_PDEATHSIG)``); elsewhere nothing happens. A rank of tools/launch.py
    has asked for it before its first import, see mapsage_launcher/ranks/fork_server.py.
    """
    if sys.platform == 'linux':
        _set_parent_death_signal(signal.SIGKILL)


def die_with_parent() -> None:
    """End this process when its parent ends, so that nothing is left running. Linux only.

    Call it in the main thread of a loader's worker. The kernel sends its signal also when only the
    thread that started this process ends, so a handler looks whether the parent is still there.
    """
    if sys.platform != 'linux':
        return
    started_by = multiprocessing.parent_process()
    parent = os.getppid() if started_by is None else started_by.pid

    def end_if_orphaned(*_: Any) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    # The one signal that a stopped process takes, too. If somebody else sends it, nothing happens.
    number = signal.SIGCONT
    try:
        signal.signal(number, end_if_orphaned)
    except ValueError:  # not the main thread; torch's own workers look every five seconds
        return
    _set_parent_death_signal(number)
    end_if_orphaned()  # the parent may have ended before


def _set_parent_death_signal(number: int) -> None:
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _need(environ: Mapping[str, str], launcher: str, hint: str, *names: str) -> Dict[str, str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise LauncherError(
            f'launcher {launcher!r} needs the environment variable(s) {", ".join(missing)}, which '
            f'are not set. {hint}, or use --launcher none for one process.'
        )
    return {name: environ[name] for name in names}


def _pytorch(environ: Mapping[str, str]) -> Dict[str, str]:
    # Kubeflow's PyTorchJob starts one process in each pod, without LOCAL_RANK. If two processes of
    # one machine take its first card, that is an error of `check_own_cards`.
    if 'RANK' in environ and environ.get('LOCAL_WORLD_SIZE', '1') == '1':
        environ = {'LOCAL_RANK': '0', **environ}
    return _need(
        environ,
        'pytorch',
        'Start with torchrun or scripts/start_8card_training.sh',
        'RANK',
        'WORLD_SIZE',
        'LOCAL_RANK',
        'MASTER_ADDR',
        'MASTER_PORT',
    )


def _mpi(environ: Mapping[str, str]) -> Dict[str, str]:
    got = _need(
        environ,
        'mpi',
        'Start with mpirun (Open MPI) and export MASTER_ADDR',
        'OMPI_COMM_WORLD_RANK',
        'OMPI_COMM_WORLD_SIZE',
        'OMPI_COMM_WORLD_LOCAL_RANK',
        'MASTER_ADDR',
    )
    return {
        'RANK': got['OMPI_COMM_WORLD_RANK'],
        'WORLD_SIZE': got['OMPI_COMM_WORLD_SIZE'],
        'LOCAL_RANK': got['OMPI_COMM_WORLD_LOCAL_RANK'],
        'LOCAL_WORLD_SIZE': environ.get('OMPI_COMM_WORLD_LOCAL_SIZE', got['OMPI_COMM_WORLD_SIZE']),
        'MASTER_ADDR': got['MASTER_ADDR'],
        'MASTER_PORT': environ.get('MASTER_PORT', '29500'),  # torch.distributed's own default
    }


def _slurm(environ: Mapping[str, str], first_host: Callable[[str], str]) -> Dict[str, str]:
    got = _need(
        environ,
        'slurm',
        'Start with srun (scripts/slurm_train.sh)',
        'SLURM_PROCID',
        'SLURM_NTASKS',
        'SLURM_LOCALID',
        'SLURM_NODELIST',
    )
    job = environ.get('SLURM_JOB_ID') or '0'
    if not re.match(r'[0-9]+$', job):
        raise LauncherError(
            f'SLURM_JOB_ID={job!r}, expected the number of a job: the port is '
            f'chosen by it. Start with srun, or export MASTER_PORT and unset it.'
        )
    found = {
        'RANK': got['SLURM_PROCID'],
        'WORLD_SIZE': got['SLURM_NTASKS'],
        'LOCAL_RANK': got['SLURM_LOCALID'],
        'MASTER_ADDR': environ.get('MASTER_ADDR') or first_host(got['SLURM_NODELIST']),
        'MASTER_PORT': (
            environ.get('MASTER_PORT') or str(_SLURM_PORT_BASE + int(job) % _SLURM_PORT_SPAN)
        ),
    }
    # the second variable is like '8(x2)' where all nodes run the same number
    per_node = re.match(
        r'(\d+)(\(x\d+\))?$',
        environ.get('SLURM_NTASKS_PER_NODE') or environ.get('SLURM_TASKS_PER_NODE') or '',
    )
    if per_node:
        found['LOCAL_WORLD_SIZE'] = per_node.group(1)
    return found


def _scontrol_first_host(node_list: str) -> str:
    try:
        out = subprocess.run(
            ['scontrol', 'show', 'hostnames', node_list],
            check=True,
            timeout=30,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(
            f'cannot read the first host of SLURM_NODELIST={node_list!r} with scontrol: {error}. '
            f'Export MASTER_ADDR yourself.'
        ) from error
    if not out.split():
        raise LauncherError(
            f'scontrol knows no host of SLURM_NODELIST={node_list!r}. Export MASTER_ADDR yourself.'
        )
    return out.split()[0]
