"""Where a launcher of an elastic job stands in torch's rendezvous.

Torch asks one thing while the ranks train: how many machines wait to join. This answers, besides:

- the store has ended: nobody waits, and it is asked again once it has been started anew;
- this machine is not on the list any more, since it or the store was silent for a while, or the
  store is a new one: it puts itself back, or joins anew where the others have gone on without it;
- a machine has left the list while the ranks start, and do not watch each other yet.
"""
from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Dict, Optional, Tuple

_ASK_SECONDS = 2.0  # between two looks for a store that has ended
_CONNECT_SECONDS = 0.5
_LEAVE_SECONDS = 5.0


class Membership:
    """The place of this machine in a rendezvous.

    It reads and writes the state of torch's handler, which has no public names for it; these are
    the same from torch 1.10 to 2.13.

    Args:
        handler: Torch's ``DynamicRendezvousHandler``.
        address: Host and port of the rendezvous store.
        connect: Function that returns a new backend and store of the rendezvous.
        watched: Function that returns whether the ranks watch each other by themselves.
        say: Function that prints a line of the launcher.

    Attributes:
        reason: Why the ranks have to be started anew, when :meth:`waiting` has said so.
        first_round: Number of the round that this machine has come to first, from 0 on; None before
            it.
        came_late: Whether the job had ended when this machine came to the last rendezvous.
    """

    def __init__(self, handler: Any, address: Tuple[str, int],
                 connect: Callable[[], Tuple[Any, Any]], watched: Callable[[], bool],
                 say: Callable[[str], None]) -> None:
        self._handler, self._address = handler, address
        self._connect, self._watched, self._say = connect, watched, say
        self._ask = handler.num_nodes_waiting
        self._end_key = f'mapsage/end/{handler.get_run_id()}'
        self._round = 0
        self._participants: Dict[Any, int] = {}
        self._ended = False
        self._next_look = 0.0
        self.reason = ''
        self.first_round: Optional[int] = None
        self.came_late = False

    def formed(self) -> int:
        """Note who takes part in the round that has just been completed; return its number."""
        state = self._handler._state_holder.state
        self._round, self._participants = state.round, dict(state.participants)
        if self.first_round is None:
            self.first_round = self._round
        return self._round

    def arrive(self) -> bool:
        """Call it before a rendezvous; return whether this machine comes to one with no place.

        One that was closed because the job was asked to stop is opened again.
        """
        self.came_late = self._handler.is_closed()
        if self.came_late and self.first_round is None and self.was_stopped():
            with self._handler._heartbeat_lock:
                holder = self._handler._state_holder
                fresh = type(holder.state)()
                fresh.round = holder.state.round + 1
                vars(holder.state).update(vars(fresh))
                holder.mark_dirty()
                holder.sync()  # in vain if another machine has come before
                self.came_late = holder.state.closed
        return self.first_round is None and not self.came_late and self._is_full()

    def waiting(self) -> int:
        """Return how many machines wait, in place of the handler's ``num_nodes_waiting``.

        1 also stands for another :attr:`reason` to start the ranks anew.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError
        if self._ended and not self._reconnect():
            return 0
        try:
            # those that are one too many wait as well, and torch would start anew for them for ever
            count = self._ask() and not self._is_full()
            self.reason = 'machines are waiting to join' if count else self._look()
        except RendezvousConnectionError:
            self._ended = True
            self._handler._stop_heartbeats()
            self._say('elastic: the rendezvous store has ended. The training goes on; until the '
                      'store is started again at the same address, no machine can join, and the '
                      'next loss of one makes all wait for it.')
            return 0
        return int(bool(self.reason))

    def note(self, end: str) -> None:
        """Write into the store how the job has ended: ``'complete'`` or ``'stopped'``."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            self._handler._store.add(f'{self._end_key}/{end}/{self._round}', 1)

    def close(self) -> None:
        """Close the rendezvous, unless others have opened it again since."""
        handler = self._handler
        with contextlib.suppress(Exception):  # as in torch, where the store has ended
            handler.is_closed()
            if handler._state_holder.state.round == self._round:
                handler.shutdown()
        handler._stop_heartbeats()
        handler.shutdown = lambda: True

    def was_complete(self) -> bool:
        """Return whether the job in the store is complete."""
        return self._ended_by('complete')

    def was_stopped(self) -> bool:
        """Return whether the job in the store was asked to stop, and all have left."""
        return self._ended_by('stopped')

    def leave(self) -> None:
        """Take this machine off the list and keep the rendezvous open for the others."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous
        handler = self._handler
        handler.shutdown = lambda: True  # torch would close it for all

        def go() -> None:
            try:
                handler._stop_heartbeats()
                handler._op_executor.run(
                    dynamic_rendezvous._RendezvousExitOp(),
                    handler._get_deadline(timedelta(seconds=_LEAVE_SECONDS)))
            except Exception:  # the others find out by themselves
                return

        thread = threading.Thread(target=go, daemon=True)  # the store may not answer
        thread.start()
        thread.join(_LEAVE_SECONDS)

    def _ended_by(self, end: str) -> bool:
        handler = self._handler
        try:
            place = handler._state_holder.state.round
            return bool(handler._store.add(f'{self._end_key}/{end}/{place}', 0))
        except RuntimeError:  # the store has ended since
            return False

    def _is_full(self) -> bool:
        state = self._handler._state_holder.state
        return state.complete and len(state.participants) >= self._handler.settings.max_nodes

    def _reconnect(self) -> bool:
        """Connect with the store if it has been started again; return whether it has."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError
        if time.monotonic() < self._next_look:
            return False
        try:
            socket.create_connection(self._address, _CONNECT_SECONDS).close()
            backend, store = self._connect()
        except (OSError, RendezvousConnectionError):
            self._next_look = time.monotonic() + _ASK_SECONDS
            return False
        handler = self._handler
        with handler._heartbeat_lock:
            handler._store = store
            handler._state_holder._backend, handler._state_holder._token = backend, None
        handler._start_heartbeats()
        self._ended = False
        self._say('elastic: the rendezvous store answers again')
        return True

    def _look(self) -> str:
        """Return why the ranks have to be started anew; empty if they need not."""
        with self._handler._heartbeat_lock:
            holder, node = self._handler._state_holder, self._handler._this_node
            state = holder.state
            if state.closed:
                return ''
            if node in state.participants:
                lost = [] if self._watched() else sorted(
                    set(self._participants) - set(state.participants))
                return '' if not lost else (
                    f'lost while the ranks started: {", ".join(map(_name, lost))}')
            if not state.participants:  # all were silent, or the store is a new one
                back = self._participants
                state.round, state.complete, state.deadline = self._round, True, None
            elif state.complete and state.round == self._round:
                back = {node: self._participants[node]}
            else:
                return 'the other machines have met anew'
            executor = self._handler._op_executor
            executor._state = state
            executor._keep_alive()  # whether its time has a zone depends on torch's version
            state.participants.update(back)
            state.last_heartbeats.update(dict.fromkeys(back, state.last_heartbeats[node]))
            holder.mark_dirty()
            holder.sync()
            return ''


def _name(node: Any) -> str:
    return f"{getattr(node, 'addr', None) or node.fqdn} (launcher {node.pid})"
