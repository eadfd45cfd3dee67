"""Torch's elastic agent for jobs in which machines leave and join.

Torch's agent starts the ranks of a machine and restarts them after a loss. :class:`ElasticAgent`
decides differently in four cases; `membership.py` finds out who takes part in a round. :func:`run`
is torchrun with this agent, until the job has ended.

A "round" is the time between two meetings of the launchers, with the same machines and ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Tuple

from mapsage_launcher.rank_notes import BROKEN_FILE, FINAL_FILE, ROUND_VARIABLE
from mapsage_launcher.stop_request import ASKED, LEFT

from .elastic import (
    MET_FILE,
    RESTART_VARIABLE,
    STEP_FILE,
    ElasticError,
    Settings,
    own_address,
    read_step,
    say,
    wait_for_store,
)
from .membership import Membership, describe_node

# The base class is torch's agent, which this package must not import before a job starts. So
# `agent_class` adds it, and a type checker knows nothing about it.
if TYPE_CHECKING:
    _TorchAgent = Any
else:
    _TorchAgent = object


class SpareError(Exception):
    """The job has ended while this machine waited for a free place in it.

    Its only argument is the :class:`Membership` of this machine.
    """


class ElasticAgent(_TorchAgent):
    """Torch's LocalElasticAgent for an elastic job; :func:`agent_class` makes it complete.

    It differs from torch's agent as follows:

    - Only restarts without progress count. Torch has one number for the whole job, so weeks with a
      loss a day would end it, and a fault that repeats at once would be retried just as often.
    - The ranks learn when the loss was noticed and when the machines had met again.
    - If the rendezvous store ends, the training continues without it.
    - A machine that joined late and never finished a step, or has a faulty device, leaves and the
      job continues. Torch would close the rendezvous for all machines.
    """

    # Set in the subclass, because torch calls the constructor.
    _settings: Settings
    _notes: Path

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        # Torch 1.10 has no local_addr; it uses this address only on the machine of rank 0.
        if not hasattr(spec, 'local_addr'):
            spec.master_addr = own_address(self._settings)
        self._membership = Membership(
            spec.rdzv_handler,
            (self._settings.host, self._settings.port),
            lambda: _connect(self._settings),
            (self._notes / MET_FILE).exists,
            say,
        )
        spec.rdzv_handler.num_nodes_waiting = self._membership.waiting
        super().__init__(spec, *args, **kwargs)
        self._furthest_step = -1
        # Whether the job continues without this machine after its ranks have failed.
        self._leaves_job = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the ranks until the job has ended on this machine, as torch's agent does.

        Raises:
            SpareError: If the job ended while this machine waited for a free place in it.
        """
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousTimeoutError,
        )

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
            self._membership.note('stopped' if (self._notes / LEFT).exists() else 'complete')
            self._membership.close()
        elif self._leaves_job:
            self._membership.leave()
        return result

    def _exit_barrier(self) -> None:
        # After a failure, torch 1.10 would wait here for the other machines.
        if self._worker_group.state not in _failed_states():
            super()._exit_barrier()

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.state in _failed_states():
            self._decide_restart(worker_group.spec.max_restarts, result.failures)
        return result

    def _decide_restart(self, max_restarts: int, failures: Mapping[int, Any]) -> None:
        """Set the number of remaining restarts after ranks have failed, and say why."""
        iteration, finished_at = read_step(self._notes)
        if iteration > self._furthest_step:
            self._furthest_step, self._remaining_restarts = iteration, max_restarts
        _tell_ranks(iteration=iteration, last_step=finished_at, noticed=time.time())
        # Before the first step the error comes from the config, the data or the code. Later it
        # may come from a single machine, without which the others can continue.
        final = iteration < 0 and (self._notes / FINAL_FILE).exists()
        broken = (self._notes / BROKEN_FILE).exists()
        self._leaves_job = broken or (iteration < 0 and bool(self._membership.first_round))
        if final or broken:
            self._remaining_restarts = 0
        failed_ranks = ', '.join(
            f'rank {rank} ({_describe_exit(failure.exitcode)})'
            for rank, failure in sorted(failures.items())
        )
        if broken:
            consequence = 'the fault is in this machine, which leaves the job'
        elif final:
            consequence = 'this error would come again, so the ranks are not restarted'
        elif self._remaining_restarts:
            consequence = (
                f'the ranks are restarted, {max_restarts - self._remaining_restarts + 1} of '
                f'{max_restarts} times in a row without getting further than step '
                f'{iteration + 1}'
            )
        else:
            consequence = (
                f'{max_restarts} starts in a row got no further than step {iteration + 1}: '
                f'this machine gives up (MAX_RESTARTS={max_restarts})'
            )
        say(f'elastic: ended: {failed_ranks or "a rank"}; {consequence}')

    def _restart_workers(self, worker_group: Any) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerState

        # Healthy ranks are restarted because the machines change.
        if worker_group.state == WorkerState.HEALTHY:
            iteration, finished_at = read_step(self._notes)
            _tell_ranks(iteration=iteration, last_step=finished_at, noticed=time.time())
            say(f'elastic: {self._membership.reason}; the ranks are restarted')
        super()._restart_workers(worker_group)

    def _rendezvous(self, worker_group: Any) -> None:
        _clear_notes(self._notes)
        if self._membership.arrive():
            say(
                f'elastic: all {self._settings.nodes[1]} places are taken; this machine waits for '
                f'one of the others to leave'
            )
        super()._rendezvous(worker_group)
        os.environ[ROUND_VARIABLE] = str(self._membership.formed())
        if RESTART_VARIABLE in os.environ:
            _tell_ranks(**dict(json.loads(os.environ[RESTART_VARIABLE]), formed=time.time()))


def agent_class(base: type, notes: Path, settings: Settings) -> type:
    """Return the class of the agent that torchrun creates.

    Args:
        base: ``torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent``.
        notes: Folder in which the ranks leave their errors and the last step.
        settings: Settings of the job.
    """
    return type('ElasticAgent', (ElasticAgent, base), dict(_settings=settings, _notes=notes))


def _failed_states() -> Tuple[Any, ...]:
    from torch.distributed.elastic.agent.server.api import WorkerState

    return WorkerState.FAILED, WorkerState.UNHEALTHY


def _clear_notes(notes: Path) -> None:
    """Remove the notes of the last round's ranks, except the last step and a request to stop.

    The request may come between two rounds.
    """
    for path in notes.glob('*'):
        if path.is_dir():
            shutil.rmtree(str(path), ignore_errors=True)
        elif path.name not in (STEP_FILE, ASKED):
            path.unlink()


def _tell_ranks(**times: Optional[float]) -> None:
    os.environ[RESTART_VARIABLE] = json.dumps(times)


def _describe_exit(status: int) -> str:
    return f'killed by signal {-status}' if status < 0 else f'status {status}'


def _connect(settings: Settings) -> Tuple[Any, Any]:
    """Return a new backend and store of torch's rendezvous."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    return create_backend(
        RendezvousParameters('c10d', settings.endpoint, settings.run_id, *settings.nodes, is_host=0)
    )


def run(torchrun: Any, args: argparse.Namespace, settings: Settings, notes: Path) -> None:
    """Run torchrun with the elastic agent until the job has ended.

    Args:
        torchrun: The module ``torch.distributed.run``.
        args: Its parsed arguments, see ``elastic.apply``.
        settings: Settings of the job.
        notes: Folder of the launcher's notes.

    Raises:
        ElasticError: If too few machines come, the job has already ended in this store, or the
            store does not come back.
        ChildFailedError, SignalException: As torchrun does.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher import api

    agent = agent_class(api.LocalElasticAgent, notes, settings)
    last_handler: List[Any] = []

    def make_agent(spec: Any, *more: Any, **named: Any) -> Any:
        last_handler[:] = [spec.rdzv_handler]
        return agent(spec, *more, **named)

    api.__dict__['LocalElasticAgent'] = make_agent
    while True:
        try:
            return torchrun.run(args)
        except RendezvousTimeoutError as error:
            raise ElasticError(_waited_in_vain(settings, last_handler)) from error
        except SpareError as error:
            (membership,) = error.args
            if membership.was_stopped():
                (notes / LEFT).touch()
            elif not membership.was_complete():
                raise ElasticError(
                    'an error ended the job on another machine, while this one '
                    'waited for a place in it.'
                ) from error
            say(
                f'elastic: the job has ended; this machine waited for one of its '
                f'{settings.nodes[1]} places in the end'
            )
            return None
        except RendezvousClosedError as error:
            raise ElasticError(
                f'the job {settings.run_id!r} has ended in the rendezvous store at '
                f'{args.rdzv_endpoint}: it is complete, or an error ended it on another machine. '
                f'To start it again, restart tools/rendezvous.py, or set RDZV_ID to another name '
                f'on all machines.'
            ) from error
        except RendezvousConnectionError:
            say(
                f'elastic: the rendezvous store at {args.rdzv_endpoint} does not answer; this '
                f'machine waits {settings.join_seconds} s for it'
            )
            wait_for_store(settings, settings.join_seconds)


def _waited_in_vain(settings: Settings, handlers: List[Any]) -> str:
    """Return the error of a machine that waited for others, or for a free place, in vain.

    Args:
        settings: Settings of the job.
        handlers: Torch's rendezvous handler; empty before the first rendezvous.
    """
    machines: List[str] = []
    if handlers:
        handler = handlers[0]
        # This machine has already taken itself off the list.
        nodes = {*handler._state_holder.state.participants, handler._this_node}
        machines = sorted(map(describe_node, nodes))
    if len(machines) > settings.nodes[0]:
        # Only torch 1.10 gets here: later versions let surplus machines wait for a free place.
        return (
            f'{", ".join(machines)} have come to the job {settings.run_id!r}, which takes '
            f'{settings.nodes[1]} machines, and this one found no place within '
            f'JOIN_TIMEOUT={settings.join_seconds} s.'
        )
    return (
        f'NNODES={settings.nodes[0]}:{settings.nodes[1]} needs {settings.nodes[0]} machines, '
        f'and {len(machines)} came within JOIN_TIMEOUT={settings.join_seconds} s: '
        f'{", ".join(machines) or "none"}. Start the others with the same RENDEZVOUS, CONFIG '
        f'and WORK_DIR, after which the job is called {settings.run_id!r} (or with one '
        f'RDZV_ID), or allow fewer.'
    )
