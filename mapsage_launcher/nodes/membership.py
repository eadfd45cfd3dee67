"""Membership of this machine in torch's rendezvous: who takes part, and whether it must meet again.

While the ranks train, torch's agent asks one question: how many machines wait to join? The answer
here covers three more cases:

- The rendezvous store has ended. Nobody waits, and the store is asked again once it has been
  restarted.
- This machine is no longer on the list, because it or the store was silent for a while, or because
  the store is a new one. It puts itself back, or joins again if the others continued without it.
- A machine has left the list while the ranks start and do not watch each other yet.

The class reads and writes private state of torch's handler, which has no public interface for it.
The names that it uses are the same from torch 1.10 to 2.13.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Dict, Optional, Tuple

# Time between two attempts to reach a store that has ended.
_ASK_SECONDS = 2.0
_CONNECT_SECONDS = 0.5
_LEAVE_SECONDS = 5.0


class Membership:
    """The membership of this machine in a rendezvous.

    Args:
        handler: Torch's ``DynamicRendezvousHandler``.
        address: Host and port of the rendezvous store.
        connect: Function that returns a new backend and store of the rendezvous.
        watched: Function that returns whether the ranks watch each other by themselves.
        say: Function that prints a line of the launcher.

    Attributes:
        reason: Why the ranks have to be restarted, after :meth:`waiting` has returned a number
            above 0.
        first_round: Number of the first round that this machine took part in, from 0 on; None
            before that round.
        came_late: Whether the job had ended when this machine came to the last rendezvous.
    """

    def __init__(
        self,
        handler: Any,
        address: Tuple[str, int],
        connect: Callable[[], Tuple[Any, Any]],
        watched: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._handler, self._address = handler, address
        self._connect, self._watched, self._say = connect, watched, say
        self._count_waiting = handler.num_nodes_waiting
        self._end_key = f'mapsage/end/{handler.get_run_id()}'
        self._round = 0
        self._participants: Dict[Any, int] = {}
        self._store_ended = False
        self._next_attempt = 0.0
        self.reason = ''
        self.first_round: Optional[int] = None
        self.came_late = False

    def formed(self) -> int:
        """Store who takes part in the round that has just been completed; return its number."""
        state = self._handler._state_holder.state
        self._round, self._participants = state.round, dict(state.participants)
        if self.first_round is None:
            self.first_round = self._round
        return self._round

    def arrive(self) -> bool:
        """Prepare for a rendezvous; call it before each one.

        A rendezvous that was closed because the job was asked to stop is opened again.

        Returns:
            Whether all places are taken, so that this machine has to wait.
        """
        self.came_late = self._handler.is_closed()
        if self.came_late and self.first_round is None and self.was_stopped():
            with self._handler._heartbeat_lock:
                holder = self._handler._state_holder
                fresh = type(holder.state)()
                fresh.round = holder.state.round + 1
                vars(holder.state).update(vars(fresh))
                holder.mark_dirty()
                # Without effect if another machine has opened it in the meantime.
                holder.sync()
                self.came_late = holder.state.closed
        return self.first_round is None and not self.came_late and self._is_full()

    def waiting(self) -> int:
        """Return how many machines wait; replaces the handler's ``num_nodes_waiting``.

        A value of 1 also stands for another :attr:`reason` to restart the ranks.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        if self._store_ended and not self._reconnect():
            return 0
        try:
            # Surplus machines wait as well; torch would restart the ranks for them without end.
            count = self._count_waiting() and not self._is_full()
            self.reason = 'machines are waiting to join' if count else self._find_reason_to_meet()
        except RendezvousConnectionError:
            self._store_ended = True
            self._handler._stop_heartbeats()
            self._say(
                'elastic: the rendezvous store has ended. The training continues; until the '
                'store is started again at the same address, no machine can join, and the '
                'next loss of one makes all wait for it.'
            )
            return 0
        return int(bool(self.reason))

    def note(self, end: str) -> None:
        """Write into the store how the job has ended: ``'complete'`` or ``'stopped'``."""
        # RuntimeError: the store has ended.
        with contextlib.suppress(RuntimeError):
            self._handler._store.add(f'{self._end_key}/{end}/{self._round}', 1)

    def close(self) -> None:
        """Close the rendezvous, unless other machines have opened it again in the meantime."""
        handler = self._handler
        # As in torch: if the store has ended, there is nothing to close, and its errors differ
        # between versions.
        with contextlib.suppress(Exception):
            handler.is_closed()
            if handler._state_holder.state.round == self._round:
                handler.shutdown()
        handler._stop_heartbeats()
        handler.shutdown = lambda: True

    def was_complete(self) -> bool:
        """Return whether the store says that the job is complete."""
        return self._has_ended('complete')

    def was_stopped(self) -> bool:
        """Return whether the store says that the job was asked to stop, and all ranks have left."""
        return self._has_ended('stopped')

    def leave(self) -> None:
        """Take this machine off the list and keep the rendezvous open for the others."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        handler = self._handler
        # Torch's shutdown would close the rendezvous for all machines.
        handler.shutdown = lambda: True

        def exit_rendezvous() -> None:
            try:
                handler._stop_heartbeats()
                handler._op_executor.run(
                    dynamic_rendezvous._RendezvousExitOp(),
                    handler._get_deadline(timedelta(seconds=_LEAVE_SECONDS)),
                )
            # Any error of the store: the other machines notice the loss by themselves.
            except Exception:
                return

        # In a thread, because the store may not answer.
        thread = threading.Thread(target=exit_rendezvous, daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)

    def _has_ended(self, end: str) -> bool:
        handler = self._handler
        try:
            round_number = handler._state_holder.state.round
            return bool(handler._store.add(f'{self._end_key}/{end}/{round_number}', 0))
        except RuntimeError:  # the store has ended
            return False

    def _is_full(self) -> bool:
        state = self._handler._state_holder.state
        return state.complete and len(state.participants) >= self._handler.settings.max_nodes

    def _reconnect(self) -> bool:
        """Connect with the store if it has been restarted; return whether it has."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        if time.monotonic() < self._next_attempt:
            return False
        try:
            socket.create_connection(self._address, _CONNECT_SECONDS).close()
            backend, store = self._connect()
        except (OSError, RendezvousConnectionError):
            self._next_attempt = time.monotonic() + _ASK_SECONDS
            return False
        handler = self._handler
        with handler._heartbeat_lock:
            handler._store = store
            handler._state_holder._backend, handler._state_holder._token = backend, None
        handler._start_heartbeats()
        self._store_ended = False
        self._say('elastic: the rendezvous store answers again')
        return True

    def _find_reason_to_meet(self) -> str:
        """Return why the machines have to meet again; empty if they need not.

        Puts this machine, or all of the round, back on the list if the others have not continued
        without it.
        """
        with self._handler._heartbeat_lock:
            holder, this_node = self._handler._state_holder, self._handler._this_node
            state = holder.state
            if state.closed:
                return ''
            if this_node in state.participants:
                lost = (
                    []
                    if self._watched()
                    else sorted(set(self._participants) - set(state.participants))
                )
                return (
                    ''
                    if not lost
                    else (f'lost while the ranks started: {", ".join(map(describe_node, lost))}')
                )
            if not state.participants:
                # All machines were silent, or the store is a new one.
                returning = self._participants
                state.round, state.complete, state.deadline = self._round, True, None
            elif state.complete and state.round == self._round:
                returning = {this_node: self._participants[this_node]}
            else:
                return 'the other machines have met again'
            executor = self._handler._op_executor
            executor._state = state
            # Torch writes the time of this sign of life; whether it has a time zone depends on
            # torch's version, so the other times are copies of it.
            executor._keep_alive()
            state.participants.update(returning)
            state.last_heartbeats.update(dict.fromkeys(returning, state.last_heartbeats[this_node]))
            holder.mark_dirty()
            holder.sync()
            return ''


def describe_node(node: Any) -> str:
    """Return the address of a machine in the rendezvous and the process id of its launcher.

    Args:
        node: Torch's ``_NodeDesc``; its address is ``fqdn`` in torch 1.10.
    """
    return f'{getattr(node, "addr", None) or node.fqdn} (launcher {node.pid})'
