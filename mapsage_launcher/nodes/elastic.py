"""Settings of an elastic job, and what its launcher and its ranks tell each other.

In an elastic job (`NNODES=2:4`) machines may leave and join while the training runs. The launchers
of all machines meet at a rendezvous store, which `rendezvous.py` runs outside of the job, so that
any machine may be lost. After a change every launcher ends its ranks, the launchers meet again, and
the ranks start from the last checkpoint. The agent that does this is in `elastic_agent.py`.

Ranks import names of variables and files from here, so this module does not import torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Mapping, Optional, Sequence, Tuple

from mapsage_launcher import addresses
from mapsage_launcher.errors import UserError
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE, VIRTUAL_RANKS_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store

# Torch's default port of this rendezvous.
DEFAULT_PORT = 29400
# Key under which the rendezvous store's machine writes its clock, in seconds since 1970.
CLOCK_KEY = 'mapsage/clock'
# Torch's rendezvous compares times that the machines write by their own clocks. A machine counts as
# dead after three missed signs of life, which is 9 s; signs of a healthy one are up to 3 s old. Two
# clocks must therefore be less than 6 s apart, and each less than 3 s from the store's clock. That
# difference is known to half a second, which leaves 2.5 s.
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 3, 3
MAX_CLOCK_SECONDS = 2.5
# How long a round waits for more machines once the smallest number has come. With torch's 30 s,
# every lost machine would cost half a minute.
_LAST_CALL_SECONDS = 5
# Torch's default.
_JOIN_SECONDS = 600
# Time between two writes of the store's clock.
_CLOCK_PERIOD_SECONDS = 1.0
# How long a launcher waits for the store at its start. The store may be started at the same time.
_STORE_SECONDS = 60.0
_RESTARTS = 5
# An iteration, and the time at which it was done.
_STEP = struct.Struct('<qd')

# Files in the folder of the launcher's notes, see also rank_notes.py. Ranks write their last step, and
# that they have met all others and notice lost ones by themselves.
STEP_FILE, MET_FILE = 'step', 'met'
# Set by the launcher for its ranks: a JSON object of times.
RESTART_VARIABLE = 'MAPSAGE_RESTART'


class ElasticError(UserError, ValueError):
    """An elastic job cannot be started with these settings, or not on this machine."""


@dataclass(frozen=True)
class Settings:
    """Settings of an elastic job.

    Attributes:
        nodes: Smallest and largest number of machines.
        host, port: Address of the rendezvous store.
        run_id: Name of the job in the store.
        restarts: Number of restarts in a row without progress, that is, without a step that no
            earlier start has reached.
        join_seconds: How long a round waits for the smallest number of machines.
    """

    nodes: Tuple[int, int]
    host: str
    port: int
    run_id: str
    restarts: int = _RESTARTS
    join_seconds: int = _JOIN_SECONDS

    @property
    def endpoint(self) -> str:
        """Address of the rendezvous store as torch takes it; an IPv6 address is in brackets."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{host}:{self.port}'


def job_name(arguments: Sequence[str]) -> str:
    """Return a name that all machines of a job agree on and that other jobs rarely have. Pure.

    Args:
        arguments: Command line of tools/train.py, ``CONFIG [--work-dir FOLDER] ...``.

    Returns:
        The name of the config, and a digest of the work dir as the command line spells it.
    """
    config = next((Path(word).stem for word in arguments[:1] if not word.startswith('-')), '')
    work_dir = ''
    for argument, following in zip(arguments, [*arguments[1:], '']):
        if argument == '--work-dir':
            work_dir = following
        elif argument.startswith('--work-dir='):
            work_dir = argument.partition('=')[2]
    digest = hashlib.blake2b(os.path.normpath(work_dir).encode(), digest_size=4).hexdigest()
    return f'{config or "mapsage"}{f"-{digest}" if work_dir else ""}'


def read_settings(nodes: str, environ: Mapping[str, str], name: str = 'mapsage') -> Settings:
    """Read ``NNODES`` and the variables of an elastic job. Pure.

    Args:
        nodes: Smallest and largest number of machines, ``'MIN:MAX'``.
        environ: Environment with ``RENDEZVOUS``, and possibly ``RDZV_ID``, ``MAX_RESTARTS`` and
            ``JOIN_TIMEOUT``.
        name: Name of the job if ``RDZV_ID`` is not set, see :func:`job_name`.

    Raises:
        ElasticError: If a value is not a valid number or address.
    """
    numbers = nodes.split(':')
    if (
        len(numbers) != 2
        or not all(number.isdigit() for number in numbers)
        or not 1 <= int(numbers[0]) <= int(numbers[1])
    ):
        raise ElasticError(
            f'NNODES={nodes!r}: expected the smallest and the largest number of '
            f'machines, such as 2:4.'
        )
    address = environ.get('RENDEZVOUS', '')
    host, _, port = (
        address.rpartition(':')
        if address.rpartition(':')[2].isdigit()
        else (address, '', str(DEFAULT_PORT))
    )
    if not host or not 0 < int(port) < 2**16:
        raise ElasticError(
            f'RENDEZVOUS={address!r}: expected HOST:PORT of the rendezvous store. Start it with '
            f'`python tools/rendezvous.py` on a machine that stays, and set RENDEZVOUS to what it '
            f'prints.'
        )
    if ':' in host and not (host.startswith('[') and host.endswith(']')):
        raise ElasticError(
            f'RENDEZVOUS={address!r}: an IPv6 address is written in brackets, such '
            f'as [fd00::1]:{DEFAULT_PORT}.'
        )
    return Settings(
        nodes=(int(numbers[0]), int(numbers[1])),
        host=host.strip('[]'),
        port=int(port),
        run_id=environ.get('RDZV_ID') or name,
        restarts=_read_number(environ, 'MAX_RESTARTS', _RESTARTS),
        join_seconds=_read_number(environ, 'JOIN_TIMEOUT', _JOIN_SECONDS),
    )


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise ElasticError(f'{name}={text!r}: expected a whole number.')
    return int(text)


def apply(settings: Settings, args: argparse.Namespace, ranks_per_node: int) -> str:
    """Change torchrun's parsed arguments and this process's environment for an elastic job.

    Args:
        settings: Settings of the job.
        args: Parsed arguments of torchrun.
        ranks_per_node: Number of ranks on each machine.

    Returns:
        A line about the job for the output.

    Raises:
        ElasticError: If the other machines could not reach this one.
    """
    least, most = settings.nodes
    args.rdzv_backend, args.rdzv_id = 'c10d', settings.run_id
    args.rdzv_endpoint = settings.endpoint
    conf = dict(
        is_host=0,
        join_timeout=settings.join_seconds,
        last_call_timeout=_LAST_CALL_SECONDS,
        close_timeout=10,
        heartbeat_timeout=5,
        keep_alive_interval=_KEEP_ALIVE_SECONDS,
        keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS,
    )
    # The user's values come last, so that they win.
    users_conf = [args.rdzv_conf] if args.rdzv_conf else []
    args.rdzv_conf = ','.join([*(f'{key}={value}' for key, value in conf.items()), *users_conf])
    args.max_restarts, args.monitor_interval = settings.restarts, 0.5
    address = own_address(settings)
    if hasattr(args, 'local_addr'):
        args.local_addr = args.local_addr or address
    # With torch's shared store, its agent keeps the address of the first round's rank 0 for ever.
    os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1'
    os.environ[ELASTIC_VARIABLE] = f'{least}:{most}'
    os.environ[VIRTUAL_RANKS_VARIABLE] = str(most * ranks_per_node)
    split_warning = (
        ''
        if 2 * least > most
        else (
            f'\nwarning: NNODES={least}:{most} lets two halves of a divided cluster both be large '
            f'enough. Only the half that reaches the rendezvous store can continue; a smallest number '
            f'above half of the largest is safer.'
        )
    )
    return (
        f'elastic: {least} to {most} machines meet at {args.rdzv_endpoint} as '
        f'{settings.run_id!r}; this one is {address}{split_warning}'
    )


def own_address(settings: Settings) -> str:
    """Return the address from which this machine reaches the rendezvous store.

    Raises:
        ElasticError: If the other machines could not reach this one at that address.
    """
    try:
        return addresses.own_address(settings.host, settings.port)
    except addresses.AddressError as error:
        raise ElasticError(f'RENDEZVOUS: {error}') from error


def wait_for_store(settings: Settings, seconds: float = _STORE_SECONDS) -> None:
    """Wait until a process answers at the address of the rendezvous store.

    Raises:
        ElasticError: If none answers in time.
    """
    deadline, announced = time.monotonic() + seconds, False
    while True:
        try:
            socket.create_connection((settings.host, settings.port), 5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ElasticError(
                    f'no rendezvous store answers at {settings.host}:{settings.port} within '
                    f'{seconds:g} s ({error}). Start it there with `python tools/rendezvous.py '
                    f'--port {settings.port}`, and look at RENDEZVOUS and at firewalls.'
                ) from error
            if not announced:
                say(
                    f'waiting for the rendezvous store at {settings.host}:{settings.port} ({error})'
                )
                announced = True
        time.sleep(1)


def check_clock(settings: Settings) -> None:
    """Compare this machine's clock with the clock of the rendezvous store's machine.

    Does nothing if another program than tools/rendezvous.py runs the store.

    Raises:
        ElasticError: If they differ by more than torch's rendezvous tolerates.
    """
    from torch.distributed import TCPStore

    store = TCPStore(
        settings.host,
        settings.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    if not store.add(f'{CLOCK_KEY}/set', 0):
        return
    store_time = float(store.get(CLOCK_KEY))
    # The time in the store is up to a period old; the middle of that range halves the error.
    ahead = time.time() - store_time - _CLOCK_PERIOD_SECONDS / 2
    if abs(ahead) > MAX_CLOCK_SECONDS:
        raise ElasticError(
            f'the clock of {socket.gethostname()} is {abs(ahead):.1f} s '
            f'{"ahead of" if ahead > 0 else "behind"} that of {settings.host}, which keeps the '
            f'rendezvous store: more than {MAX_CLOCK_SECONDS:g} s, so that the machines would take '
            f'each other for dead. Set it, for example with `chronyc makestep`.'
        )


def tell_clock(store: Store) -> None:
    """Write this machine's clock into the store, for :func:`check_clock`, and sleep for a period.

    Args:
        store: The rendezvous store, on the machine that runs it.
    """
    store.set(CLOCK_KEY, repr(time.time()))
    store.add(f'{CLOCK_KEY}/set', 1)
    time.sleep(_CLOCK_PERIOD_SECONDS)


def write_step(file: int, iteration: int) -> None:
    """Write that a training step is done into an open file :data:`STEP_FILE`."""
    os.pwrite(file, _STEP.pack(iteration, time.time()), 0)


def read_step(notes: Path) -> Tuple[int, Optional[float]]:
    """Return the last iteration that a rank of this machine finished, and its time.

    Args:
        notes: Folder of the launcher's notes.

    Returns:
        -1 and None before the first step.
    """
    try:
        iteration, finished_at = _STEP.unpack((notes / STEP_FILE).read_bytes())
        return iteration, finished_at
    except (OSError, struct.error):
        return -1, None


def say(line: str) -> None:
    """Print a line of the launcher."""
    sys.stdout.write(f'{line}\n')
    sys.stdout.flush()
