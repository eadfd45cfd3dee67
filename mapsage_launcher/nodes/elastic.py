"""A job whose nodes come and go: torch's elastic agent, with its settings chosen on purpose.

The launchers of all nodes meet at a rendezvous store that none of them keeps (tools/rendezvous.py).
When a rank or a node is lost, or a node joins, every launcher ends its ranks, they meet again, and
the ranks start anew from the last checkpoint.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import struct
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mapsage_launcher import addresses
from mapsage_launcher.errors import UserError
from mapsage_launcher.nodes.membership import Membership

DEFAULT_PORT = 29400  # torch's own for this rendezvous
# The key under which tools/rendezvous.py writes its clock, in seconds since 1970.
CLOCK_KEY = 'mapsage/clock'
# Torch's rendezvous compares times that the nodes have written by their own clocks. A node counts
# as dead after three missed signs of life, 9 s; healthy ones are up to 3 s old. So two clocks must
# be less than 6 s apart, each less than 3 s from that of the store: 2.5 s, since that is known to
# half a second.
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 3, 3
MAX_CLOCK_SECONDS = 2.5
# How long a round waits for more nodes once the smallest number has come. Torch's 30 s would be
# waited out after every lost node.
_LAST_CALL_SECONDS = 5
_JOIN_SECONDS = 600  # torch's own
_CLOCK_PERIOD_SECONDS = 1.0  # between two times that the store's host writes down
_STORE_SECONDS = 60.0  # to wait for the store at the start; it may be started with the nodes
_RESTARTS = 5
_STEP = struct.Struct('<qd')  # an iteration, and the time when it was done
STEP_FILE = 'step'
ASKED, LEFT = 'stop', 'left'  # see stop_request.py
# Files that ranks leave for their launcher: their error is one of the settings or data, or one
# of this machine's devices; they have met the others and watch each other.
FINAL_FILE, BROKEN_FILE, MET_FILE = 'final', 'broken', 'met'
# What the launcher tells its ranks about the restart, a JSON object of times.
RESTART_VARIABLE = 'MAPSAGE_RESTART'
# Virtual ranks of a run that starts, unless its config says: those of all machines, even if some
# come later.
VIRTUAL_RANKS_VARIABLE = 'MAPSAGE_VIRTUAL_RANKS'
ELASTIC_VARIABLE = 'MAPSAGE_ELASTIC'  # MIN:MAX; set in the ranks of such a job
ROUND_VARIABLE = 'MAPSAGE_ROUND'  # how often the machines have met; equal on all


class ElasticError(UserError, ValueError):
    """An elastic job cannot be started with these settings, or not here."""


class SpareError(Exception):
    """The job has ended while this machine waited for a place in it; has its ``Membership``."""


@dataclass(frozen=True)
class Settings:
    """What the environment says about an elastic job.

    Attributes:
        nodes: Smallest and largest number of nodes.
        host, port: Address of the rendezvous store.
        run_id: Name of the job in the store.
        restarts: How often in a row the ranks may be started again without a step that no earlier
            start has reached.
        join_seconds: How long a round waits for the smallest number of nodes.
    """

    nodes: Tuple[int, int]
    host: str
    port: int
    run_id: str
    restarts: int = _RESTARTS
    join_seconds: int = _JOIN_SECONDS


def job_name(arguments: Sequence[str]) -> str:
    """Return a name that is equal on all machines of a job and, mostly, of no other job. Pure.

    Args:
        arguments: Those of tools/train.py, ``CONFIG [--work-dir FOLDER] ...``.

    Returns:
        The name of the config, and a digest of the work dir as it is written there.
    """
    config = next((Path(word).stem for word in arguments[:1] if not word.startswith('-')), '')
    place = ''
    for word, following in zip(arguments, [*arguments[1:], '']):
        if word == '--work-dir':
            place = following
        elif word.startswith('--work-dir='):
            place = word.partition('=')[2]
    digest = hashlib.blake2b(os.path.normpath(place).encode(), digest_size=4).hexdigest()
    return f"{config or 'mapsage'}{f'-{digest}' if place else ''}"


def read_settings(nodes: str, environ: Mapping[str, str], name: str = 'mapsage') -> Settings:
    """Read ``NNODES`` and the variables of an elastic job. Pure.

    Args:
        nodes: Numbers of nodes, ``'MIN:MAX'``.
        environ: Environment with ``RENDEZVOUS``, and possibly ``RDZV_ID``, ``MAX_RESTARTS`` and
            ``JOIN_TIMEOUT``.
        name: Name of the job where there is no ``RDZV_ID``, see :func:`job_name`.

    Raises:
        ElasticError: If a value is not a valid number or address.
    """
    parts = nodes.split(':')
    if len(parts) != 2 or not all(part.isdigit() for part in parts) \
            or not 1 <= int(parts[0]) <= int(parts[1]):
        raise ElasticError(f'NNODES={nodes!r}: expected the smallest and the largest number of '
                           f'machines, such as 2:4.')
    place = environ.get('RENDEZVOUS', '')
    host, _, port = place.rpartition(':') if place.rpartition(':')[2].isdigit() \
        else (place, '', str(DEFAULT_PORT))
    if not host or not 0 < int(port) < 2**16:
        raise ElasticError(
            f'RENDEZVOUS={place!r}: expected HOST:PORT of the rendezvous store. Start it with '
            f'`python tools/rendezvous.py` on a machine that stays, and set RENDEZVOUS to what it '
            f'prints.')
    if ':' in host and not (host.startswith('[') and host.endswith(']')):
        raise ElasticError(f'RENDEZVOUS={place!r}: an IPv6 address is written in brackets, such as '
                           f'[fd00::1]:{DEFAULT_PORT}.')
    return Settings(
        nodes=(int(parts[0]), int(parts[1])), host=host.strip('[]'), port=int(port),
        run_id=environ.get('RDZV_ID') or name,
        restarts=_number(environ, 'MAX_RESTARTS', _RESTARTS),
        join_seconds=_number(environ, 'JOIN_TIMEOUT', _JOIN_SECONDS))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise ElasticError(f'{name}={text!r}: expected a whole number.')
    return int(text)


def apply(settings: Settings, args: argparse.Namespace, ranks_per_node: int) -> str:
    """Change torchrun's parsed arguments and this process's environment; return a line about it."""
    least, most = settings.nodes
    args.rdzv_backend, args.rdzv_id = 'c10d', settings.run_id
    args.rdzv_endpoint = _endpoint(settings)
    conf = dict(is_host=0, join_timeout=settings.join_seconds, last_call_timeout=_LAST_CALL_SECONDS,
                close_timeout=10, heartbeat_timeout=5, keep_alive_interval=_KEEP_ALIVE_SECONDS,
                keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS)
    given = args.rdzv_conf  # what the user sets wins
    args.rdzv_conf = ','.join([*(f'{key}={value}' for key, value in conf.items()),
                               *([given] if given else [])])
    args.max_restarts, args.monitor_interval = settings.restarts, 0.5
    address = own_address(settings)
    if hasattr(args, 'local_addr'):
        args.local_addr = args.local_addr or address
    # Otherwise torch's agent keeps the address of the first round's rank 0 for ever.
    os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1'
    os.environ[ELASTIC_VARIABLE] = f'{least}:{most}'
    os.environ[VIRTUAL_RANKS_VARIABLE] = str(most * ranks_per_node)
    split = '' if 2 * least > most else (
        f'\nwarning: NNODES={least}:{most} lets two halves of a divided cluster both be large '
        f'enough. Only those that reach the rendezvous store can go on; a smallest number above '
        f'half of the largest is safer.')
    return (f'elastic: {least} to {most} machines meet at {args.rdzv_endpoint} as '
            f'{settings.run_id!r}; this one is {address}{split}')


def expected_ranks(environ: Mapping[str, str]) -> Optional[int]:
    """Return how many ranks there are once all nodes have come that may; None elsewhere."""
    text = environ.get(VIRTUAL_RANKS_VARIABLE, '')
    return int(text) if text.isdigit() else None


def own_address(settings: Settings) -> str:
    """Return the address from which this machine reaches the rendezvous store.

    Raises:
        ElasticError: If the others could not reach it.
    """
    try:
        return addresses.own_address(settings.host, settings.port)
    except addresses.AddressError as error:
        raise ElasticError(f'RENDEZVOUS: {error}') from error


def wait_for_store(settings: Settings, seconds: float = _STORE_SECONDS) -> None:
    """Wait until something answers at the address of the rendezvous store.

    Raises:
        ElasticError: If nothing does.
    """
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            socket.create_connection((settings.host, settings.port), 5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ElasticError(
                    f'no rendezvous store answers at {settings.host}:{settings.port} within '
                    f'{seconds:g} s ({error}). Start it there with `python tools/rendezvous.py '
                    f'--port {settings.port}`, and look at RENDEZVOUS and at firewalls.') from error
            if not told:
                say(f'waiting for the rendezvous store at {settings.host}:{settings.port} '
                    f'({error})')
                told = True
        time.sleep(1)


def check_clock(settings: Settings) -> None:
    """Compare this machine's clock with that of the store's host.

    Nothing happens where the store was not started by tools/rendezvous.py.

    Raises:
        ElasticError: If they are apart by more than torch's rendezvous bears.
    """
    from torch.distributed import TCPStore
    store = TCPStore(settings.host, settings.port, is_master=False, wait_for_workers=False,
                     timeout=timedelta(seconds=30))
    if not store.add(f'{CLOCK_KEY}/set', 0):
        return
    theirs = float(store.get(CLOCK_KEY))
    ahead = time.time() - theirs - _CLOCK_PERIOD_SECONDS / 2
    # What was written down is up to a period old.
    if abs(ahead) > MAX_CLOCK_SECONDS:
        raise ElasticError(
            f'the clock of {socket.gethostname()} is {abs(ahead):.1f} s '
            f'{"ahead of" if ahead > 0 else "behind"} that of {settings.host}, which keeps the '
            f'rendezvous store: more than {MAX_CLOCK_SECONDS:g} s, so that the machines would take '
            f'each other for dead. Set it, for example with `chronyc makestep`.')


def tell_clock(store: Any) -> None:
    """Write the clock of this machine into the store, for :func:`check_clock`, and wait a while."""
    store.set(CLOCK_KEY, repr(time.time()))
    store.add(f'{CLOCK_KEY}/set', 1)
    time.sleep(_CLOCK_PERIOD_SECONDS)


def write_step(file: int, iteration: int) -> None:
    """Write down that a training step is done, into an open file :data:`STEP_FILE`."""
    os.pwrite(file, _STEP.pack(iteration, time.time()), 0)


def read_step(notes: Path) -> Tuple[int, Optional[float]]:
    """Return the last step that was done here, and when; -1 and None before the first."""
    try:
        iteration, when = _STEP.unpack((notes / STEP_FILE).read_bytes())
        return iteration, when
    except (OSError, struct.error):  # none yet
        return -1, None


def agent_class(base: Any, notes: Path, settings: Settings) -> Any:
    """Return torch's LocalElasticAgent with what an elastic job needs besides.

    - Restarts count only as long as the training does not get further: torch has one number for
      the whole job, so that weeks with a loss a day would end it, and a fault that comes again at
      once would be tried as often.
    - The ranks learn when the loss was noticed and when the nodes had met again.
    - The end of the rendezvous store does not end a training that goes on without it.
    - A machine that has joined a job and never carried out a step, or whose devices are at fault,
      ends alone. Torch would close the rendezvous for all.

    Args:
        base: ``torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent``.
        notes: Folder in which the ranks leave their errors and the last step.
        settings: Settings of the job.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    failed = (WorkerState.FAILED, WorkerState.UNHEALTHY)

    class ElasticAgent(base):

        def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(spec, 'local_addr'):  # torch 1.10: only the address of rank 0 is used
                spec.master_addr = own_address(settings)
            self._membership = Membership(
                spec.rdzv_handler, (settings.host, settings.port), lambda: _connect(settings),
                (notes / MET_FILE).exists, say)
            spec.rdzv_handler.num_nodes_waiting = self._membership.waiting
            super().__init__(spec, *args, **kwargs)
            self._furthest = -1
            self._alone = False  # whether this machine's end is none of the job's

        def run(self, *args: Any, **kwargs: Any) -> Any:
            try:
                result = super().run(*args, **kwargs)
            except (SignalException, RendezvousTimeoutError, RendezvousConnectionError):
                self._membership.leave()
                raise
            except RendezvousClosedError:
                if self._membership.came_late:
                    raise
                raise SpareError(self._membership) from None
            if result is None:
                raise SpareError(self._membership)
            if not result.is_failed():
                self._membership.note('stopped' if (notes / LEFT).exists() else 'complete')
                self._membership.close()
            elif self._alone:
                self._membership.leave()
            return result

        def _exit_barrier(self) -> None:
            if self._worker_group.state not in failed:  # torch 1.10 would wait for the others
                super()._exit_barrier()

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.state in failed:
                self._weigh(worker_group.spec.max_restarts, result.failures)
            return result

        def _weigh(self, most: int, failures: Dict[int, Any]) -> None:
            iteration, when = read_step(notes)
            if iteration > self._furthest:
                self._furthest, self._remaining_restarts = iteration, most
            _tell_ranks(iteration=iteration, last_step=when, noticed=time.time())
            # Before the first step it is the config, the data or the code; later a machine may be
            # at fault that the others do without.
            final = iteration < 0 and (notes / FINAL_FILE).exists()
            broken = (notes / BROKEN_FILE).exists()
            self._alone = broken or (iteration < 0 and bool(self._membership.first_round))
            if final or broken:
                self._remaining_restarts = 0
            ends = ', '.join(f'rank {rank} ({_how(failure.exitcode)})'
                             for rank, failure in sorted(failures.items()))
            what = ('the fault is that of this machine, which leaves the job' if broken else
                    'this error would come again, so the ranks are not started anew' if final else
                    f'the ranks are started anew, {most - self._remaining_restarts + 1} of '
                    f'{most} times in a row without getting further than step {iteration + 1}'
                    if self._remaining_restarts else
                    f'{most} starts in a row got no further than step {iteration + 1}: this '
                    f'machine gives up (MAX_RESTARTS={most})')
            say(f'elastic: ended: {ends or "a rank"}; {what}')

        def _restart_workers(self, worker_group: Any) -> None:
            if worker_group.state == WorkerState.HEALTHY:
                iteration, when = read_step(notes)
                _tell_ranks(iteration=iteration, last_step=when, noticed=time.time())
                say(f'elastic: {self._membership.reason}; the ranks are started anew')
            super()._restart_workers(worker_group)

        def _rendezvous(self, worker_group: Any) -> None:
            # what the ranks of the last round have left; a request to stop may come between two
            for path in notes.glob('*'):
                if path.is_dir():
                    shutil.rmtree(str(path), ignore_errors=True)
                elif path.name not in (STEP_FILE, ASKED):
                    path.unlink()
            if self._membership.arrive():
                say(f'elastic: all {settings.nodes[1]} places are taken; this machine waits for '
                    f'one of the others to leave')
            super()._rendezvous(worker_group)
            os.environ[ROUND_VARIABLE] = str(self._membership.formed())
            if RESTART_VARIABLE in os.environ:
                _tell_ranks(**dict(json.loads(os.environ[RESTART_VARIABLE]), formed=time.time()))

    return ElasticAgent


def say(line: str) -> None:
    """Print a line of the launcher."""
    sys.stdout.write(f'{line}\n')
    sys.stdout.flush()


def _tell_ranks(**times: Optional[float]) -> None:
    os.environ[RESTART_VARIABLE] = json.dumps(times)


def _how(status: int) -> str:
    return f'killed by signal {-status}' if status < 0 else f'status {status}'


def _connect(settings: Settings) -> Tuple[Any, Any]:
    """Return a new backend and store of torch's rendezvous."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    return create_backend(RendezvousParameters('c10d', _endpoint(settings), settings.run_id,
                                               *settings.nodes, is_host=0))


def _endpoint(settings: Settings) -> str:
    host = f'[{settings.host}]' if ':' in settings.host else settings.host
    return f'{host}:{settings.port}'


def run(torchrun: Any, args: argparse.Namespace, settings: Settings, notes: Path) -> None:
    """Run torchrun until the job has ended, with its nodes as they come and go.

    Raises:
        ElasticError: If too few nodes come, the job has already ended in this store, or the store
            does not come back.
        ChildFailedError, SignalException: As torchrun does.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher import api
    agent = agent_class(api.LocalElasticAgent, notes, settings)
    seen: List[Any] = []

    def make(spec: Any, *more: Any, **named: Any) -> Any:
        seen[:] = [spec.rdzv_handler]
        return agent(spec, *more, **named)

    api.__dict__['LocalElasticAgent'] = make
    while True:
        try:
            return torchrun.run(args)
        except RendezvousTimeoutError as error:
            raise ElasticError(_waited_in_vain(settings, seen)) from error
        except SpareError as error:
            membership, = error.args
            if membership.was_stopped():
                (notes / LEFT).touch()
            elif not membership.was_complete():
                raise ElasticError('an error ended the job on another machine, while this one '
                                   'waited for a place in it.') from error
            say(f'elastic: the job has ended; this machine waited for one of its '
                f'{settings.nodes[1]} places in the end')
            return None
        except RendezvousClosedError as error:
            raise ElasticError(
                f'the job {settings.run_id!r} has ended in the rendezvous store at '
                f'{args.rdzv_endpoint}: it is complete, or an error ended it on another machine. '
                f'To start it again, restart tools/rendezvous.py, or set RDZV_ID to another name '
                f'on all machines.') from error
        except RendezvousConnectionError:
            say(f'elastic: the rendezvous store at {args.rdzv_endpoint} does not answer; this '
                f'machine waits {settings.join_seconds} s for it')
            wait_for_store(settings, settings.join_seconds)


def _waited_in_vain(settings: Settings, handlers: Any) -> str:
    came = []
    if handlers:  # this machine has already taken itself out
        handler = handlers[0]
        nodes = {*handler._state_holder.state.participants, handler._this_node}
        # the second is the name in torch 1.10
        came = sorted(f"{getattr(node, 'addr', None) or node.fqdn} (launcher {node.pid})"
                      for node in nodes)
    if len(came) > settings.nodes[0]:  # torch 1.10 has no spares
        return (f'{", ".join(came)} have come to the job {settings.run_id!r}, which takes '
                f'{settings.nodes[1]} machines, and this one found no place within '
                f'JOIN_TIMEOUT={settings.join_seconds} s.')
    return (f'NNODES={settings.nodes[0]}:{settings.nodes[1]} needs {settings.nodes[0]} machines, '
            f'and {len(came)} came within JOIN_TIMEOUT={settings.join_seconds} s: '
            f'{", ".join(came) or "none"}. Start the others with the same RENDEZVOUS, CONFIG and '
            f'WORK_DIR, after which the job is called {settings.run_id!r} (or with one RDZV_ID), '
            f'or allow fewer.')
