"""Reads which machine of how many this is, from the user's variables or from a scheduler's.

torchrun reads ``PET_*`` as defaults of its options, and Kubeflow's Trainer and several platforms set
them. The other schedulers have variables of their own. The functions are pure; `launch.py` changes
torchrun's arguments.
"""

from __future__ import annotations

import argparse
import re
from typing import Mapping, NamedTuple, Optional, Sequence

from mapsage_launcher.errors import UserError

DEFAULT_PORT = '29500'
# Options of torchrun that say where the machines meet. With one of them on the command line, no
# variable is read here.
_OPTIONS = (
    '--nnodes',
    '--node-rank',
    '--node_rank',
    '--standalone',
    '--rdzv-backend',
    '--rdzv_backend',
    '--rdzv-endpoint',
    '--rdzv_endpoint',
    '--master-addr',
    '--master_addr',
)


class SchedulerError(UserError, ValueError):
    """The variables of the user or of a scheduler do not say which machine of how many this is."""


class Machines(NamedTuple):
    """The machines of a job, and which one this is.

    Attributes:
        nodes: Number of machines, ``'2'``, or the least and the most of an elastic job, ``'2:4'``.
        rank: Number of this machine.
        address: Address of machine 0; '' if there is only one machine.
        port: Port of machine 0.
        source: Where the numbers come from, for the log; '' for the user's own variables.
    """

    nodes: str = '1'
    rank: str = '0'
    address: str = ''
    port: str = DEFAULT_PORT
    source: str = ''


def has_meeting_options(arguments: Sequence[str]) -> bool:
    """Return whether the options before the program say where machines meet."""
    until = next((i for i, word in enumerate(arguments) if word.endswith('.py')), len(arguments))
    return any(word.split('=')[0] in _OPTIONS for word in arguments[:until])


def read_machines(environ: Mapping[str, str]) -> Machines:
    """Return the machines of the job.

    ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` are the user's. What they leave
    out comes from a scheduler: ``PET_*``, SkyPilot, Volcano, Kubeflow's PyTorchJob, or a step of
    Slurm.

    Args:
        environ: Variables of the environment.

    Raises:
        SchedulerError: If a variable is no number, the address of machine 0 is unknown, or the
            user starts one machine where a scheduler has several.
    """
    scheduler = _from_scheduler(environ)
    count = environ.get('NNODES') or (scheduler.nodes if scheduler else '1')
    _check_number('NNODES', count, r'[1-9]\d*(:[1-9]\d*)?', 'a number of machines, or 2:4')
    if scheduler and environ.get('NNODES') == '1' and scheduler.nodes != '1':
        raise SchedulerError(
            f'NNODES=1, and {scheduler.source} says that this job has {scheduler.nodes} machines: '
            f'each of them would train alone. Unset NNODES, or remove the variable of the '
            f'scheduler (env -u NAME) if this start is for this machine alone.'
        )
    if count == '1':
        return Machines()
    machines = Machines(
        count,
        environ.get('NODE_RANK') or (scheduler.rank if scheduler else '0'),
        environ.get('MASTER_ADDR') or (scheduler.address if scheduler else ''),
        environ.get('MASTER_PORT') or (scheduler.port if scheduler else DEFAULT_PORT),
        scheduler.source if scheduler and not environ.get('NNODES') else '',
    )
    if ':' in count:
        return machines
    _check_number('NODE_RANK', machines.rank, r'\d+', 'the number of this machine')
    _check_number('MASTER_PORT', machines.port, r'\d+', 'a port')
    if int(machines.rank) >= int(count):
        raise SchedulerError(
            f'NODE_RANK={machines.rank} with {count} machines: expected 0 to {int(count) - 1}.'
        )
    if not machines.address:
        raise SchedulerError(
            f'NNODES={count} needs MASTER_ADDR, the address of machine 0.'
            + f' {machines.source} does not say it.' * bool(machines.source)
        )
    return machines


def _from_scheduler(environ: Mapping[str, str]) -> Optional[Machines]:
    """Return what the first scheduler says that set its variables; None without a scheduler."""
    if environ.get('PET_NNODES'):
        return Machines(
            _number(environ, 'PET_NNODES', r'[1-9]\d*(:[1-9]\d*)?'),
            environ.get('PET_NODE_RANK') or '0',
            environ.get('PET_MASTER_ADDR', ''),
            environ.get('PET_MASTER_PORT') or DEFAULT_PORT,
            'PET_NNODES',
        )
    if environ.get('SKYPILOT_NUM_NODES'):
        return Machines(
            _number(environ, 'SKYPILOT_NUM_NODES'),
            environ.get('SKYPILOT_NODE_RANK') or '0',
            ''.join(environ.get('SKYPILOT_NODE_IPS', '').split()[:1]),
            source='SKYPILOT_NUM_NODES',
        )
    if environ.get('KUBERNETES_SERVICE_HOST') and 'LOCAL_RANK' not in environ:
        # A PyTorchJob: RANK is the number of the pod.
        if environ.get('WORLD_SIZE') and environ.get('RANK'):
            return Machines(
                _number(environ, 'WORLD_SIZE'),
                _number(environ, 'RANK', r'\d+'),
                source='WORLD_SIZE',
            )
    return _from_volcano(environ) or _from_slurm(environ)


def _from_volcano(environ: Mapping[str, str]) -> Optional[Machines]:
    tasks = [name for name in environ if re.match(r'VC_.+_HOSTS$', name)]
    if not tasks:
        return None
    hosts = [host for name in tasks for host in environ[name].split(',') if host]
    if len(tasks) > 1 and len(hosts) > 1 and not environ.get('NNODES'):
        raise SchedulerError(
            f'the job of Volcano has several tasks ({", ".join(sorted(tasks))}), and no variable '
            f'says which one this pod belongs to: set NNODES, NODE_RANK and MASTER_ADDR, or use '
            f'one task for all pods.'
        )
    rank = environ.get('VC_TASK_INDEX') or '0'
    return Machines(str(len(hosts) or 1), rank, hosts[0] if hosts else '', source=tasks[0])


def _from_slurm(environ: Mapping[str, str]) -> Optional[Machines]:
    name = 'SLURM_STEP_NUM_NODES' if environ.get('SLURM_STEP_NUM_NODES') else 'SLURM_NNODES'
    if not environ.get(name):
        return None
    count = _number(environ, name)
    if count != '1' and not environ.get('NNODES'):
        raise SchedulerError(
            f'{name}={count}, and this command starts the ranks of one machine. Start all '
            f'with sbatch scripts/slurm_train.sh CONFIG, or set NNODES, NODE_RANK and MASTER_ADDR.'
        )
    return Machines(count, environ.get('SLURM_NODEID') or '0', source=name)


def _number(environ: Mapping[str, str], name: str, pattern: str = r'[1-9]\d*') -> str:
    _check_number(name, environ[name], pattern, 'a number')
    return environ[name]


def _check_number(name: str, text: str, pattern: str, expected: str) -> None:
    if not re.fullmatch(pattern, text, re.ASCII):
        raise SchedulerError(f'{name}={text!r}: expected {expected}.')


def apply(machines: Machines, args: argparse.Namespace) -> str:
    """Change torchrun's parsed arguments for the machines; return a line for the log, or ''."""
    args.nnodes, args.standalone = machines.nodes, machines.nodes == '1'
    if ':' in machines.nodes:
        args.rdzv_backend = 'c10d'
    elif machines.nodes != '1':
        args.rdzv_backend, args.rdzv_endpoint = 'static', ''
        args.node_rank, args.master_port = int(machines.rank), int(machines.port)
        args.master_addr = machines.address
    if not machines.source:
        return ''
    return f'machine {machines.rank} of {machines.nodes}, as {machines.source} says'
