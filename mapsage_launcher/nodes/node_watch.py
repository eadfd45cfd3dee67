"""A small process on each node that notices lost ranks and nodes, and ends the ranks that are left.

It is a process of its own, so that a rank may hold its interpreter for minutes, in a validation, a
garbage collection or a native call, and is never taken for dead. The processes of all nodes beat to
that of the first one and it to them: N - 1 connections. Each looks after the ranks of its node,
which keep a connection to it and say goodbye before they end:

- a connection that breaks without a goodbye: the rank has ended;
- a process that the kernel says is stopped (SIGSTOP) for as long as the timeout: it is frozen;
- a node from which nothing came for as long: it is frozen, switched off or cut off. Its first sign
  may take a minute, since a loaded machine starts processes late.

The first such finding is told to all. Ranks have a while to report it in their own words where
their collectives break, then they end, or are killed.

The process starts in milliseconds, since it imports only this package (``watch_command``).
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
from typing import Any, Callable, Dict, Iterable, List, Optional

from mapsage_launcher.nodes.liveness import Liveness
from mapsage_launcher.trust import handshake
from mapsage_launcher.trust.guard import Guard

_KILLED_AFTER_SECONDS = 5.0  # a rank that does not end by itself, after that
_CONNECT_SECONDS = 1.0
# Behind a guard that strangers keep full, a connection waits 3 s.
_HANDSHAKE_SECONDS = 5.0
_NO_DESCRIPTOR_SECONDS = 0.1  # until the next connection is accepted
_FIRST_SECONDS = 60.0  # for a node's first sign
# States of a process, in the letters of the kernel.
_ENDED = ('Z', 'X', '')
_NOT_RUNNING = ('T', *_ENDED)
_MAX_LINE = 1 << 16
_MAX_GREETING = 256  # bytes in which a node says which it is
_MAX_UNKNOWN = 32  # connections of this user's processes that have not said which rank they are
_PURPOSE = 'watch'  # of the handshake


# Python runs isolated (-I -S): it imports nothing from the current folder or from site-packages.
# The folder that holds this package is therefore an argument.
_PROGRAM = ('import sys; sys.path.append(sys.argv[1]); '
            'from mapsage_launcher.nodes.node_watch import main; main(*sys.argv[2:])')
_ROOT = Path(__file__).resolve().parents[2]


def watch_command(local: int, listener: Optional[int]) -> List[str]:
    """Return the command that starts a watch; it reads the job from its standard input.

    Args:
        local: Descriptor of the socket at which the ranks of this node connect.
        listener: Descriptor of the socket at which the other nodes connect; None except on the
            first node.
    """
    return [sys.executable, '-I', '-S', '-c', _PROGRAM, str(_ROOT), str(local),
            '-' if listener is None else str(listener)]


class Line:
    """A connection on which JSON objects travel, one a line.

    Args:
        connection: Connected stream socket; closed by :meth:`close`.

    Attributes:
        limit: Bytes that a line may have.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(_CONNECT_SECONDS)
        self._data, self.limit = b'', _MAX_LINE

    def send(self, **message: Any) -> None:
        """Send an object; one that cannot be sent at once is lost with the connection."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b'\n')
        except OSError:  # the reader's side finds out
            pass

    def read(self) -> List[Dict[str, Any]]:
        """Return the objects that have arrived; EOFError when the connection has ended."""
        try:
            part = self.socket.recv(self.limit)
        except socket.timeout:
            return []
        except OSError:
            part = b''
        if not part or len(self._data) > self.limit:
            raise EOFError
        *lines, self._data = (self._data + part).split(b'\n')
        try:
            found = [json.loads(line.decode()) for line in lines]
        except (ValueError, RecursionError):  # it is none of ours
            raise EOFError from None
        if not all(isinstance(each, dict) for each in found):
            raise EOFError
        return found

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class Watch:
    """The watch over one node.

    Args:
        node: Number of this node.
        hosts: Name of each node's host, by number.
        ranks: Global ranks of each node, by number.
        first: Address of the first node's watch: host, port and number of the listener.
        secret: Secret of the job, in hexadecimal digits.
        timeout: Seconds without a sign after which a rank or node is lost.
        grace: Seconds that ranks have for their own report after one of them has ended.
        parent: Process that has started the watch; it may have ended already.
        local: Socket at which the ranks of this node connect.
        listener: Socket at which the other nodes connect; only on the first node.
    """

    def __init__(self, node: int, hosts: Dict[int, str], ranks: Dict[int, List[int]],
                 first: List[Any], secret: str, timeout: float, grace: float,
                 parent: int, local: socket.socket, listener: Optional[socket.socket]) -> None:
        self._node, self._hosts, self._ranks = node, hosts, ranks
        self._root = min(hosts)
        self._first, self._timeout = first, timeout
        self._key = bytes.fromhex(secret), _PURPOSE, bytes.fromhex(first[2])
        self._grace = grace
        self._parent = parent
        self._liveness = Liveness(timeout)
        self._selector = selectors.DefaultSelector()
        self._unknown: List[Line] = []  # connections of processes that are no known rank yet
        self._local: Dict[int, Line] = {}
        self._pids: Dict[int, int] = {}
        self._stopped: Dict[int, int] = {}  # turns in a row in which a rank was stopped
        self._left: List[int] = []  # ranks that have said goodbye
        self._nodes: Dict[int, Line] = {}
        self._verdict: Optional[Dict[str, Any]] = None
        self._kill_at = float('inf')
        self._met: List[int] = []  # nodes that have been connected
        self._peers = ([each for each in hosts if each != node] if node == self._root
                       else [self._root])
        self._ready = not self._peers  # whether all nodes are connected with the first one
        for peer in self._peers:
            self._liveness.watch(peer, partial(self._beat, peer), partial(self._silent, peer),
                                 _FIRST_SECONDS)
        self._listen(local)
        if listener is not None:
            Guard(
                listener, lambda: handshake.ListenerHandshake(*self._key),
                lambda connection: self._accept_node(Line(connection)))

    def run(self) -> None:
        """Watch until the ranks of this node have ended."""
        interval, turn = self._liveness.interval, 0.0
        while not self._over():
            for key, _ in self._selector.select(interval / 4):
                key.data()
            if time.monotonic() >= turn:
                turn = time.monotonic() + interval
                self._connect()
                self._liveness.tick()
                self._look_at_ranks()
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
        def take() -> None:
            try:
                self._accept_rank(Line(listener.accept()[0]))
            except ConnectionError:  # who asked is gone
                pass
            except OSError:  # no descriptor is free: it would be asked again at once
                time.sleep(_NO_DESCRIPTOR_SECONDS)
        self._selector.register(listener, selectors.EVENT_READ, take)

    def _serve(self, line: Line, hear: Callable[[Dict[str, Any]], None],
               ended: Callable[[], None]) -> None:
        def take() -> None:
            try:
                for message in line.read():
                    hear(message)
            except EOFError:
                self._drop(line)
                ended()
        self._selector.register(line.socket, selectors.EVENT_READ, take)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        line.close()

    def _accept_rank(self, line: Line) -> None:
        pid, user, _ = struct.unpack(
            '3i', line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        known: List[int] = []

        def hear(message: Dict[str, Any]) -> None:
            if 'rank' in message:
                rank = message['rank']
                if known or type(rank) is not int or rank not in self._ranks[self._node]:
                    raise EOFError
                known.append(rank)
                self._unknown.remove(line)
                self._local[rank] = line
                if pid > 0:  # 0: a process of another PID namespace
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
            self._find([rank], f'rank {rank} on host {self._hosts[self._node]}: its process has '
                       f'ended', self._grace)

    def _accept_node(self, line: Line) -> None:
        """Take a node whose watch has proved that it is of this job; in the guard's thread."""
        known: List[int] = []
        line.limit = _MAX_GREETING

        def hear(message: Dict[str, Any]) -> None:
            if not known:
                node = message.get('node')
                if type(node) is not int or node not in self._peers or node in self._met:
                    raise EOFError
                known.append(node)
                self._nodes[known[0]] = line
                self._met.append(known[0])
                line.limit = _MAX_LINE
                if len(self._met) == len(self._peers):
                    self._begin()
                if self._verdict is not None:
                    line.send(lost=self._verdict)
            self._hear_node(known[0], message)

        self._serve(line, hear, lambda: self._lost_connection(known))

    def _connect(self) -> None:
        """Connect once with the first node's watch; after its goodbye the port may be another's."""
        if self._node == self._root or self._root in self._met:
            return
        try:
            line = Line(handshake.connect(tuple(self._first[:2]),
                                       handshake.ClientHandshake(*self._key), _HANDSHAKE_SECONDS))
        except (handshake.SecretMismatchError, handshake.OtherVersionError) as error:
            self._find(self._ranks[self._root], f'{self._name(self._root)}: {error}', self._grace)
            return
        except OSError:  # tried again, until it counts as silent
            return
        line.send(node=self._node)
        self._nodes[self._root] = line
        self._met.append(self._root)
        self._serve(line, lambda message: self._hear_node(self._root, message),
                    lambda: self._lost_connection([self._root]))

    def _begin(self) -> None:
        """Tell the ranks of this node and, from the first node, the other ones that all watch."""
        self._ready = True
        for line in self._downward():
            line.send(ready=1)

    def _downward(self) -> List[Line]:
        return [*self._local.values(),
                *(self._nodes.values() if self._node == self._root else [])]

    # --- findings

    def _beat(self, peer: int) -> None:
        if peer in self._nodes:
            self._nodes[peer].send(beat=1)

    def _hear_node(self, peer: int, message: Dict[str, Any]) -> None:
        self._liveness.heard(peer)
        if 'ready' in message:
            self._begin()
        elif 'found' in message:
            self._find(**_finding(message['found']))
        elif 'lost' in message:
            self._tell(_finding(message['lost']))
        elif 'bye' in message:
            self._liveness.forget(peer)
            self._nodes.pop(peer, None)

    def _lost_connection(self, known: Iterable[int]) -> None:
        for peer in known:
            if self._nodes.pop(peer, None) is not None:
                self._liveness.forget(peer)
                self._find(self._ranks[peer], f'{self._name(peer)}: its processes have ended',
                           self._grace)

    def _silent(self, peer: int, seconds: float) -> None:
        cut = (', or this machine is cut off from it' if peer == self._root else
               ', or it is cut off')
        self._find(self._ranks[peer], f'{self._name(peer)}: nothing was heard from it for '
                   f'{seconds:.1f} s: it is frozen or switched off{cut}', 0.0)

    def _look_at_ranks(self) -> None:
        for rank, pid in list(self._pids.items()):
            state = _state(pid)
            self._stopped[rank] = self._stopped.get(rank, 0) + 1 if state in _NOT_RUNNING else 0
            if state in _ENDED and self._stopped[rank] > 1:  # a goodbye would have been read since
                self._ended(rank)  # a process of its own keeps the connection open
                continue
            seconds = self._stopped[rank] * self._liveness.interval
            if seconds > self._timeout:
                self._find([rank], f'rank {rank} on host {self._hosts[self._node]}: its process '
                           f'{pid} has been stopped (SIGSTOP) for {seconds:.1f} s', 0.0)
                self._kill({rank: pid})  # it does not react to the launcher's SIGTERM

    def _find(self, ranks: List[int], text: str, grace: float) -> None:
        """Tell all nodes, by way of the first one, who is lost."""
        if self._verdict is not None:
            return
        finding = dict(ranks=ranks, text=text, grace=grace)
        if self._node != self._root and self._root in self._nodes:
            self._nodes[self._root].send(found=finding)
        self._tell(finding)

    def _tell(self, finding: Dict[str, Any]) -> None:
        """Tell the ranks of this node and, from the first node, the other ones."""
        if self._verdict is not None:
            return
        self._verdict = finding
        for line in self._downward():
            line.send(lost=finding)
        self._kill_at = time.monotonic() + finding['grace'] + _KILLED_AFTER_SECONDS

    def _kill(self, pids: Dict[int, int]) -> None:
        for rank, pid in list(pids.items()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                self._leave(rank)

    def _name(self, node: int) -> str:
        return f'rank(s) {self._ranks[node]} on host {self._hosts[node]}'


def _finding(value: Any) -> Dict[str, Any]:
    """Return a finding of another node; EOFError if it is none."""
    if not (isinstance(value, dict) and set(value) == {'ranks', 'text', 'grace'}
            and isinstance(value['text'], str) and type(value['grace']) in (int, float)
            and isinstance(value['ranks'], list)
            and all(type(rank) is int for rank in value['ranks'])):
        raise EOFError
    return value


def _state(pid: int) -> str:
    """Return the letter of a process's state; '' where there is no such process, '?' if unknown."""
    try:
        with open(f'/proc/{pid}/stat', 'rb') as file:
            return file.read().rpartition(b')')[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ''
    except (OSError, IndexError):
        return '?'


def main(local: str, other: str) -> None:
    """Watch with these sockets (:func:`watch_command`) and the job on the standard input."""
    # A signal that is meant for the rank reaches its process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    listener = None if other == '-' else socket.socket(fileno=int(other))
    job = json.loads(sys.stdin.readline())
    for field in ('hosts', 'ranks'):
        job[field] = {int(key): value for key, value in job[field].items()}
    Watch(local=socket.socket(fileno=int(local)), listener=listener, **job).run()

