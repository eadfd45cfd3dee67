"""A lost node is noticed by a heartbeat between the nodes, and not by the timeout of a collective.

The work is done by a process on each node, see node_watch.py; here is what its ranks have to do:
one of them starts it, all connect with it, and a thread of each ends the process when it says that
other ranks are lost. A collective over gloo cannot be interrupted otherwise.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional

from mapsage.distributed.channels.channel import RankLostError
from mapsage.distributed.host_address import reachable_host
from mapsage.distributed.launcher_notes import end_process
from mapsage.distributed.lost_ranks import watches
from mapsage_launcher.nodes.node_watch import Line, watch_command
from mapsage_launcher.trust.guard import bind_listener
from mapsage_launcher.trust.handshake import new_listener
from mapsage_launcher.trust.job_secret import job_secret

# How long ranks have for their own report after one of them has ended, in seconds: it takes a roll
# call, and then names the error of the rank at fault.
GRACE_SECONDS = 10.0


# A Popen object without a reference can no longer be waited for.
_watches: List[subprocess.Popen] = []


class NodePlace(NamedTuple):
    """Which node a process is on.

    Attributes:
        node: Number of its node.
        nodes: Number of nodes.
    """

    node: int
    nodes: int


def node_place(environ: Mapping[str, str] = os.environ) -> Optional[NodePlace]:
    """Return on which of its launcher's nodes this process is; None where that is not known.

    Open MPI has no variable for it. Slurm's are then those of mpirun itself.
    """
    variables = [('GROUP_RANK', 'GROUP_WORLD_SIZE')]
    if 'OMPI_COMM_WORLD_RANK' not in environ:
        variables.append(('SLURM_NODEID', 'SLURM_NNODES'))
    for node, nodes in variables:
        if environ.get(node, '').isdigit() and environ.get(nodes, '').isdigit():
            return NodePlace(int(environ[node]), int(environ[nodes]))
    return None


class WatchSockets:
    """The sockets of a node's watch, made by the rank that will start it.

    Attributes:
        facts: What the other ranks need to know: ``local``, the name of a Unix socket, and
            ``address``, host and port of the TCP socket and the number of its listener.

    Raises:
        SecretError: If this process has no secret of the job, see :func:`job_secret`.
    """

    def __init__(self) -> None:
        self._secret = job_secret(os.environ)
        self.local = socket.socket(socket.AF_UNIX)
        name = f'mapsage-watch-{os.urandom(16).hex()}'
        self.local.bind(f'\0{name}')  # abstract: leaves no file behind
        self.local.listen(1024)
        host = reachable_host()
        self.listener = bind_listener(host)
        self.facts: Dict[str, Any] = dict(
            local=name, address=[host, self.listener.getsockname()[1], new_listener().hex()]
        )

    def start(
        self,
        node: int,
        hosts: Dict[int, str],
        ranks: Dict[int, List[int]],
        address: List[Any],
        timeout: float,
    ) -> None:
        """Start the watch of this node, see ``Watch``; the sockets become its own."""
        first = node == min(hosts)
        sockets = [self.local, *([self.listener] if first else [])]
        process = subprocess.Popen(
            watch_command(self.local.fileno(), self.listener.fileno() if first else None),
            stdin=subprocess.PIPE,
            pass_fds=[each.fileno() for each in sockets],
        )
        assert process.stdin is not None
        # Over a pipe: who may list processes reads their command lines.
        job = dict(
            node=node,
            hosts=hosts,
            ranks=ranks,
            first=address,
            secret=self._secret.hex(),
            timeout=timeout,
            grace=GRACE_SECONDS,
            parent=os.getpid(),
        )
        process.stdin.write(json.dumps(job).encode() + b'\n')
        process.stdin.close()
        _watches.append(process)
        self.close()

    def close(self) -> None:
        """Close the sockets of this process."""
        self.local.close()
        self.listener.close()


class Heartbeat:
    """This rank's connection to the watch of its node.

    Args:
        name: Name of the watch's socket.
        rank: Global rank of this process.
        timeout: Seconds after which the watch takes others for lost, for the error's text.

    Attributes:
        finding: What the watch has said: ``ranks`` that are lost, and ``text`` about them.
    """

    def __init__(self, name: str, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._ready = threading.Event()
        self.finding: Optional[Dict[str, Any]] = None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f'\0{name}')
        _, user, _ = struct.unpack(
            '3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user != os.getuid():
            raise RankLostError(
                f'another user of this machine listens in place of the watch of '
                f'rank {rank}: it has ended. Start the job again.'
            )
        self._line = Line(connection)
        connection.settimeout(None)  # the thread waits for ever
        self._line.send(rank=rank)
        threading.Thread(target=self._listen, name='mapsage heartbeat', daemon=True).start()
        atexit.register(self._leave_at_exit)

    def wait(self) -> None:
        """Wait until all nodes watch each other, or the watch has told whom it waits for in vain."""
        self._ready.wait()

    def leave(self) -> None:
        """Tell the watch that this rank ends as it should."""
        self._line.send(bye=self._rank)

    def lost_ranks(self) -> Dict[int, str]:
        """Return the ranks that the watch has found to be lost; the first has the text about them."""
        if self.finding is None:
            return {}
        return {
            rank: '' if place else self.finding['text']
            for place, rank in enumerate(self.finding['ranks'])
        }

    def _leave_at_exit(self) -> None:
        if not hasattr(sys, 'last_type'):  # no error has ended the interpreter
            self.leave()

    def _listen(self) -> None:
        try:
            while True:
                for message in self._line.read():
                    if 'ready' in message:
                        self._ready.set()
                    if 'lost' in message:
                        self.finding = message['lost']
                        self._end(**message['lost'])
        except EOFError:  # the watch has ended
            self._ready.set()

    def _end(self, ranks: List[int], text: str, grace: float) -> NoReturn:
        """End this process, after the time in which its collectives may report by themselves."""
        time.sleep(grace)
        error = RankLostError(
            f'rank {self._rank} ends, since others are lost: {text} (noticed by the heartbeat, '
            f'env_cfg.dist_cfg.heartbeat_timeout={self._timeout:g}).',
            ranks,
        )
        end_process(error)


def start_heartbeat(name: str, rank: int, timeout: float) -> None:
    """Connect this rank with the watch of its node, and wait until all nodes watch each other."""
    heartbeat = Heartbeat(name, rank, timeout)
    watches.append(heartbeat)
    heartbeat.wait()


def has_heartbeat() -> bool:
    """Return whether this rank is connected with the watch of its node."""
    return any(isinstance(watch, Heartbeat) for watch in watches)
