"""The watch of a node: a small process that notices lost ranks and nodes, and ends the other ranks.

It is a separate process because a rank may hold its interpreter for minutes, in a validation, a
garbage collection or a native call, and must not be taken for dead then. Each watch beats to the
watch of the first node, which beats back: N - 1 connections. A watch also keeps a connection to
every rank of its node; a rank says goodbye before it ends. The watch reports a loss in three cases:

- A connection breaks without a goodbye: the rank has ended.
- The kernel reports for longer than the timeout that a rank is stopped (SIGSTOP): it is frozen.
- A node is silent for longer than the timeout: it is frozen, switched off or cut off, or large
  packets do not arrive. The first sign may take a minute, because a loaded machine starts processes
  late.

The first report goes to all nodes. Ranks have a grace period in which their collectives may break
and report the loss with more detail; then they end, or are killed. The ranks' side is in
`mapsage/extras/elastic/heartbeat.py`. The process starts in milliseconds, because it imports
only this package (:func:`watch_command`).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Tuple

from mapsage_launcher.liveness import Liveness
from mapsage_launcher.nodes.line import MAX_LINE_BYTES, Line, Message
from mapsage_launcher.trust import handshake
from mapsage_launcher.trust.guard import Guard

# Time after the grace period in which a rank may end by itself.
_KILLED_AFTER_SECONDS = 5.0
# A connection to a guard whose table strangers keep full waits 3 s.
_HANDSHAKE_SECONDS = 5.0
# Pause between two accepts while the process may open no descriptor.
_NO_DESCRIPTOR_SECONDS = 0.1
# Time for a node's first sign of life.
_FIRST_SECONDS = 60.0
# A beat between nodes fills whole packets, also on links with jumbo frames (MTU 9000). Where only
# small packets arrive, beats stop with the gradients.
_BEAT = 'x' * 9000
# States of a process, in the letters of the kernel.
_ENDED = ('Z', 'X', '')
_NOT_RUNNING = ('T', *_ENDED)
# Size of the message in which a node says its number.
_MAX_GREETING_BYTES = 256
# Largest number of connections from this user's processes that have not said their rank.
_MAX_UNKNOWN = 32
# Purpose of the handshake.
_PURPOSE = 'watch'


# Python runs isolated (-I -S): it imports nothing from the current folder or from site-packages.
# The folder that holds this package is therefore an argument.
_PROGRAM = (
    'import sys; sys.path.append(sys.argv[1]); '
    'from mapsage_launcher.nodes.node_watch import main; main(*sys.argv[2:])'
)
_ROOT = Path(__file__).resolve().parents[2]


def watch_command(local: int, listener: Optional[int]) -> List[str]:
    """Return the command that starts a watch; it reads the job from its standard input.

    Args:
        local: Descriptor of the socket at which the ranks of this node connect.
        listener: Descriptor of the socket at which the other nodes connect; None except on the
            first node.
    """
    return [
        sys.executable,
        '-I',
        '-S',
        '-c',
        _PROGRAM,
        str(_ROOT),
        str(local),
        '-' if listener is None else str(listener),
    ]


class Watch:
    """The watch over one node.

    Args:
        node: Number of this node.
        hosts: Host name of each node, by number.
        ranks: Global ranks of each node, by number.
        first: Address of the first node's watch: host, port and number of the listener.
        secret: Secret of the job, in hexadecimal digits.
        timeout: Seconds without a sign after which a rank or node is lost.
        grace: Seconds that ranks have for their own report after one of them has ended.
        parent: Process that has started the watch; it may have ended already.
        local: Socket at which the ranks of this node connect.
        listener: Socket at which the other nodes connect; only on the first node.
    """

    def __init__(
        self,
        node: int,
        hosts: Dict[int, str],
        ranks: Dict[int, List[int]],
        first: Tuple[str, int, str],
        secret: str,
        timeout: float,
        grace: float,
        parent: int,
        local: socket.socket,
        listener: Optional[socket.socket],
    ) -> None:
        self._node, self._hosts, self._ranks = node, hosts, ranks
        self._root = min(hosts)
        self._first, self._timeout = first, timeout
        self._key = bytes.fromhex(secret), _PURPOSE, bytes.fromhex(first[2])
        self._grace = grace
        self._parent = parent
        self._liveness = Liveness(timeout)
        self._selector = selectors.DefaultSelector()
        # Connections of local processes that have not said their rank.
        self._unknown: List[Line] = []
        self._local: Dict[int, Line] = {}
        self._pids: Dict[int, int] = {}
        # How often in a row a rank was seen stopped.
        self._times_stopped: Dict[int, int] = {}
        # Ranks that have said goodbye or have ended.
        self._left: List[int] = []
        self._nodes: Dict[int, Line] = {}
        self._verdict: Optional[Message] = None
        self._kill_at = float('inf')
        # Nodes that were connected at some time.
        self._met: List[int] = []
        self._peers = (
            [peer for peer in hosts if peer != node] if node == self._root else [self._root]
        )
        # Whether all nodes are connected with the first one.
        self._ready = not self._peers
        for peer in self._peers:
            self._liveness.watch(
                peer, partial(self._beat, peer), partial(self._silent, peer), _FIRST_SECONDS
            )
        self._listen(local)
        if listener is not None:
            Guard(
                listener,
                lambda: handshake.ListenerHandshake(*self._key),
                lambda connection: self._accept_node(Line(connection)),
            )

    def run(self) -> None:
        """Watch until the ranks of this node have ended."""
        interval, next_check = self._liveness.interval, 0.0
        while not self._over():
            for key, _ in self._selector.select(interval / 4):
                key.data()
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + interval
                self._connect()
                self._liveness.tick()
                self._check_ranks()
            if time.monotonic() >= self._kill_at:
                self._kill(self._pids)
        if self._verdict is None:
            for line in self._nodes.values():
                line.send(bye=self._node)

    def _over(self) -> bool:
        if set(self._ranks[self._node]) <= set(self._left):
            return True
        # Some ranks may have ended before they connected.
        return os.getppid() != self._parent and set(self._local) <= set(self._left)

    # --- connections

    def _listen(self, listener: socket.socket) -> None:
        def accept() -> None:
            try:
                self._accept_rank(Line(listener.accept()[0]))
            except ConnectionError:
                # The process that connected has ended.
                pass
            except OSError:
                # No descriptor is free; the selector would report the listener again at once.
                time.sleep(_NO_DESCRIPTOR_SECONDS)

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _serve(
        self, line: Line, hear: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        def read() -> None:
            try:
                for message in line.read():
                    hear(message)
            except EOFError:
                self._drop(line)
                ended()

        self._selector.register(line.socket, selectors.EVENT_READ, read)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        line.close()

    def _accept_rank(self, line: Line) -> None:
        pid, user, _ = struct.unpack(
            '3i', line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        # The rank of this connection, once the process has said it.
        known: List[int] = []

        def hear(message: Message) -> None:
            if 'rank' in message:
                rank = message['rank']
                if known or type(rank) is not int or rank not in self._ranks[self._node]:
                    raise EOFError
                known.append(rank)
                self._unknown.remove(line)
                self._local[rank] = line
                # 0 stands for a process of another PID namespace.
                if pid > 0:
                    self._pids[rank] = pid
                if self._ready:
                    line.send(ready=1)
                if self._verdict is not None:
                    line.send(lost=self._verdict)
            elif 'bye' in message and known:
                self._leave(known[0])

        def ended() -> None:
            if known:
                self._ended(known[0])
            else:
                self._unknown.remove(line)

        if user != os.getuid():
            line.close()
            return
        if len(self._unknown) == _MAX_UNKNOWN:
            self._drop(self._unknown.pop(0))
        self._unknown.append(line)
        self._serve(line, hear, ended)

    def _leave(self, rank: int) -> None:
        self._left.append(rank)
        self._pids.pop(rank, None)

    def _ended(self, rank: int) -> None:
        if rank not in self._left:
            self._leave(rank)
            self._report(
                [rank],
                f'rank {rank} on host {self._hosts[self._node]}: its process has ended',
                self._grace,
            )

    def _accept_node(self, line: Line) -> None:
        """Accept a node whose watch has proved that it belongs to the job.

        The guard calls this in its thread.
        """
        # The node of this connection, once its watch has said it.
        known: List[int] = []
        line.limit = _MAX_GREETING_BYTES

        def hear(message: Message) -> None:
            if not known:
                node = message.get('node')
                if type(node) is not int or node not in self._peers or node in self._met:
                    raise EOFError
                known.append(node)
                self._nodes[node] = line
                self._met.append(node)
                line.limit = MAX_LINE_BYTES
                if len(self._met) == len(self._peers):
                    self._begin()
                if self._verdict is not None:
                    line.send(lost=self._verdict)
            self._hear_node(known[0], message)

        self._serve(line, hear, lambda: self._lost_connection(known))

    def _connect(self) -> None:
        """Connect with the first node's watch, unless this node has met it already.

        After that watch has said goodbye, its port may belong to another process.
        """
        if self._node == self._root or self._root in self._met:
            return
        try:
            line = Line(
                handshake.connect(
                    (self._first[0], self._first[1]),
                    handshake.ClientHandshake(*self._key),
                    _HANDSHAKE_SECONDS,
                )
            )
        except (handshake.SecretMismatchError, handshake.OtherVersionError) as error:
            self._report(self._ranks[self._root], f'{self._name(self._root)}: {error}', self._grace)
            return
        except OSError:
            # The next check tries again, until the first node counts as silent.
            return
        line.send(node=self._node)
        self._nodes[self._root] = line
        self._met.append(self._root)
        self._serve(
            line,
            lambda message: self._hear_node(self._root, message),
            lambda: self._lost_connection([self._root]),
        )

    def _begin(self) -> None:
        """Tell the ranks of this node and, on the first node, the other nodes that all watch."""
        self._ready = True
        for line in self._downward():
            line.send(ready=1)

    def _downward(self) -> List[Line]:
        return [*self._local.values(), *(self._nodes.values() if self._node == self._root else [])]

    # --- losses

    def _beat(self, peer: int) -> None:
        if peer in self._nodes:
            self._nodes[peer].send(beat=_BEAT)

    def _hear_node(self, peer: int, message: Message) -> None:
        self._liveness.heard(peer)
        if 'ready' in message:
            self._begin()
        elif 'found' in message:
            self._report(**_checked_loss(message['found']))
        elif 'lost' in message:
            self._announce(_checked_loss(message['lost']))
        elif 'bye' in message:
            self._liveness.forget(peer)
            self._nodes.pop(peer, None)

    def _lost_connection(self, nodes: Iterable[int]) -> None:
        for peer in nodes:
            if self._nodes.pop(peer, None) is not None:
                self._liveness.forget(peer)
                self._report(
                    self._ranks[peer], f'{self._name(peer)}: its processes have ended', self._grace
                )

    def _silent(self, peer: int, seconds: float) -> None:
        cut = ', or this machine is cut off from it' if peer == self._root else ', or it is cut off'
        self._report(
            self._ranks[peer],
            f'{self._name(peer)}: nothing was heard from it for '
            f'{seconds:.1f} s: it is frozen or switched off{cut}, or only small packets '
            f'pass between them (then the MTU of a link is wrong)',
            0.0,
        )

    def _check_ranks(self) -> None:
        """Look whether the kernel says that a rank of this node is stopped or has ended."""
        for rank, pid in list(self._pids.items()):
            state = _state(pid)
            self._times_stopped[rank] = (
                self._times_stopped.get(rank, 0) + 1 if state in _NOT_RUNNING else 0
            )
            # The connection of a rank that has ended may be kept open by a process that it started.
            # At the second check, its goodbye would have been read.
            if state in _ENDED and self._times_stopped[rank] > 1:
                self._ended(rank)
                continue
            seconds = self._times_stopped[rank] * self._liveness.interval
            if seconds > self._timeout:
                self._report(
                    [rank],
                    f'rank {rank} on host {self._hosts[self._node]}: its process '
                    f'{pid} has been stopped (SIGSTOP) for {seconds:.1f} s',
                    0.0,
                )
                # A stopped process does not react to the launcher's SIGTERM.
                self._kill({rank: pid})

    def _report(self, ranks: List[int], text: str, grace: float) -> None:
        """Announce a loss that this watch noticed, and send it to the first node, which tells all.

        Args:
            ranks: Ranks that are lost.
            text: Which process or node is lost, and why.
            grace: Seconds that the other ranks have for their own report.
        """
        if self._verdict is not None:
            return
        loss = dict(ranks=ranks, text=text, grace=grace)
        if self._node != self._root and self._root in self._nodes:
            self._nodes[self._root].send(found=loss)
        self._announce(loss)

    def _announce(self, loss: Message) -> None:
        """Tell a loss to the ranks of this node and, on the first node, to the other nodes."""
        if self._verdict is not None:
            return
        self._verdict = loss
        for line in self._downward():
            line.send(lost=loss)
        self._kill_at = time.monotonic() + loss['grace'] + _KILLED_AFTER_SECONDS

    def _kill(self, pids: Dict[int, int]) -> None:
        for rank, pid in list(pids.items()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                # The process has ended.
                self._leave(rank)

    def _name(self, node: int) -> str:
        return f'rank(s) {self._ranks[node]} on host {self._hosts[node]}'


def _checked_loss(value: object) -> Message:
    """Return the loss that another node reports; raise EOFError if the value is not a loss."""
    if not (
        isinstance(value, dict)
        and set(value) == {'ranks', 'text', 'grace'}
        and isinstance(value['text'], str)
        and type(value['grace']) in (int, float)
        and isinstance(value['ranks'], list)
        and all(type(rank) is int for rank in value['ranks'])
    ):
        raise EOFError
    return value


def _state(pid: int) -> str:
    """Return the kernel's letter for a process's state; '' if it does not exist, '?' if unknown."""
    try:
        with open(f'/proc/{pid}/stat', 'rb') as file:
            return file.read().rpartition(b')')[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ''
    except (OSError, IndexError):
        return '?'


def main(local: str, other: str) -> None:
    """Watch with these sockets (:func:`watch_command`) and the job on the standard input."""
    # A signal that is meant for the rank reaches its whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    listener = None if other == '-' else socket.socket(fileno=int(other))
    job = json.loads(sys.stdin.readline())
    for field in ('hosts', 'ranks'):
        job[field] = {int(node): value for node, value in job[field].items()}
    Watch(local=socket.socket(fileno=int(local)), listener=listener, **job).run()
