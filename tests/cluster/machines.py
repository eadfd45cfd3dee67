"""Machines for tests: network namespaces on one switch, with faults of links, disks and processes.

    with Machines(3, tmp_path) as machines:
        launchers = [node.run(['bash', str(SCRIPT), ...]) for node in machines.nodes]
        machines.nodes[1].cut()
        machines.nodes[1].heal()

A machine has a network, a host name, an /etc/hosts and a /dev/shm of its own; disks and processors
are those of this computer. ``machines.store`` is one more machine, for what must outlive the nodes.
The switch is a namespace too, so that neither names nor addresses of two runs collide, and this
computer's own network is untouched. Needs root, iproute2 and, for one-way drops, nftables.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from warm_python import rank_start, warm_python

ROOT = Path(__file__).resolve().parents[2]
FIRST_PROCESS = Path(__file__).with_name('first_process.py')
NAMESPACES = Path('/run/netns')
_OURS = re.compile(r'mapsage-(\d+)\.(\d+)\.\d+-')  # pid and start of the owner, number, machine
_count = itertools.count()


def why_not(*programs: str) -> str:
    """Return why there can be no machines here; empty if there can.

    Args:
        programs: More programs that a test needs, such as ``nft``.
    """
    if sys.platform != 'linux' or os.geteuid():
        return 'network namespaces need Linux and root'
    for program in ('ip', 'tc', 'nsenter', *programs):
        if not shutil.which(program):
            return (
                f'{program} is not installed: apt-get install iproute2 nftables util-linux '
                f'(faketime for clocks)'
            )
    name = f'mapsage-{_owner()}.0-try'
    tried = subprocess.run(
        ['ip', 'netns', 'add', name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if tried.returncode:
        return f'network namespaces are not allowed here: {tried.stdout.strip()}'
    _command('ip', 'netns', 'del', name)
    return ''


class Process:
    """A command on a machine, and what it has printed until now.

    Attributes:
        pid: Of the process that was started; a launcher that forks has more (:meth:`Machine.pids`).
        lines: Time (``time.time()``) at which a line was read, and the line.
    """

    def __init__(self, command: Sequence[str], environ: Dict[str, str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors='replace',
            start_new_session=True,
        )
        self.pid, self.lines = self._process.pid, []  # type: int, List[Tuple[float, str]]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def status(self) -> Optional[int]:
        """Exit status, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return ''.join(line for _, line in list(self.lines))

    def wait(self, timeout: float) -> int:
        """Return the exit status; an AssertionError with the output after ``timeout`` seconds."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f'still running after {timeout} s:\n{self.output[-6000:]}'
            ) from None
        self._reader.join(5)
        return status

    def first(self, pattern: str, after: float = 0) -> Optional[Tuple[float, str]]:
        """Return the first line, and its time, printed after a time, that matches ``pattern``."""
        for when, line in list(self.lines):
            if when >= after and re.search(pattern, line):
                return when, line
        return None

    def _read(self) -> None:
        for line in self._process.stdout:
            self.lines.append((time.time(), line))


class Machine:
    """A machine of :class:`Machines`.

    Attributes:
        name: Its host name, which all machines of the switch can resolve.
        address: Its IPv4 address.
        python: A program on it that stands for ``python`` and forks from its first process.
    """

    def __init__(self, namespace: str, switch: str, number: int, name: str, folder: Path) -> None:
        self.namespace, self.name, self.address = namespace, name, _address(number)
        self._switch, self._port, self._folder = switch, f'port{number}', folder
        self._socket = f'mapsage-{os.urandom(16).hex()}'
        self._first: Any = None
        self.python = folder / f'python-{name}'
        _command('ip', 'netns', 'add', namespace)
        self._inode = os.stat(NAMESPACES / namespace).st_ino
        _ip(
            switch,
            'link',
            'add',
            self._port,
            'type',
            'veth',
            'peer',
            'name',
            'veth0',
            'netns',
            namespace,
        )
        _ip(switch, 'link', 'set', self._port, 'master', 'bridge', 'up')
        _ip(namespace, 'addr', 'add', f'{self.address}/24', 'dev', 'veth0')
        _ip(namespace, 'link', 'set', 'lo', 'up')
        _ip(namespace, 'link', 'set', 'veth0', 'up')

    def boot(self, hosts: Path) -> None:
        """Start the first process; :meth:`up` waits for it."""
        self._first = Process(
            [
                warm_python(),
                str(FIRST_PROCESS),
                self.namespace,
                self.name,
                str(hosts),
                self._socket,
            ],
            dict(os.environ),
        )
        words = ' '.join(f'"{word}"' for word in rank_start.caller_command(self._socket, '$PPID'))
        self.python.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.python.chmod(0o755)

    def up(self, timeout: float = 120) -> None:
        """Wait until the machine runs."""
        deadline = time.monotonic() + timeout
        while 'ready' not in self._first.output:
            if self._first.status is not None or time.monotonic() > deadline:
                raise AssertionError(f'{self.name} does not start:\n{self._first.output}')
            time.sleep(0.02)
        # The process that was started is outside; what it was forked to is inside.
        self._inside = self.pids()[0]

    def run(self, command: Sequence[Any], cold: bool = False, **environ: str) -> Process:
        """Start a command on the machine, in the root of the checkout.

        Scripts of the project take ``self.python``, and ranks fork from the first process, unless
        ``cold``: then each starts as a user's does, from nothing.
        """
        python = sys.executable if cold else str(self.python)
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key
            not in (
                'RANK',
                'WORLD_SIZE',
                'LOCAL_RANK',
                'MASTER_ADDR',
                'MASTER_PORT',
                'PYTHON_EXEC',
                rank_start.ADDRESS,
            )
        }
        if not cold:
            inherited[rank_start.ADDRESS] = self._socket
        return Process(
            [
                'nsenter',
                '-t',
                str(self._inside),
                '-n',
                '-u',
                '-m',
                f'--wd={ROOT}',
                '--',
                *map(str, command),
            ],
            {
                **inherited,
                'MAPSAGE_PYTHON': python,
                'OMP_NUM_THREADS': '1',
                'GLOO_SOCKET_IFNAME': 'veth0',
                **environ,
            },
        )

    def pids(self, contains: str = '') -> List[int]:
        """Return the processes of the machine whose command line contains a text, oldest first."""
        found = []
        for entry in Path('/proc').iterdir():
            if entry.name.isdigit():
                try:
                    if (
                        os.stat(entry / 'ns' / 'net').st_ino == self._inode
                        and contains
                        in (entry / 'cmdline').read_bytes().replace(b'\0', b' ').decode()
                    ):
                        found.append((_started(int(entry.name)), int(entry.name)))
                except OSError:  # it has ended
                    continue
        return [pid for _, pid in sorted(found)]

    def memory(self) -> List[str]:
        """Return the names of the files in the machine's /dev/shm."""
        root = Path(f'/proc/{self._inside}/root/dev/shm')
        return [path.name for path in root.glob('mapsage-*/*')]

    def launcher(self) -> int:
        """Return the pid of the launcher that has started ranks here."""
        ranks = [
            pid for pid in self.pids('tools/train.py') if pid not in self.pids('tools/launch.py')
        ]
        return _parent(ranks[-1])

    def signal(self, number: int, pids: Optional[Sequence[int]] = None) -> None:
        """Send a signal to some processes, or to all but the first."""
        for pid in self.pids() if pids is None else pids:
            if pids is not None or pid != self._inside:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass

    def cut(self) -> None:
        """Take the link down, without a word to either end."""
        _ip(self._switch, 'link', 'set', self._port, 'down')

    def heal(self) -> None:
        """Bring the link up, drop nothing and throttle nothing."""
        _ip(self._switch, 'link', 'set', self._port, 'up')
        if shutil.which('nft'):
            _in(self.namespace, 'nft', 'flush', 'ruleset')
        for namespace, device in ((self.namespace, 'veth0'), (self._switch, self._port)):
            if 'tbf' in _in(namespace, 'tc', 'qdisc', 'show', 'dev', device):
                _in(namespace, 'tc', 'qdisc', 'del', 'dev', device, 'root')

    def drop(self, direction: str, peers: Sequence[Machine] = ()) -> None:
        """Drop what comes ``'in'`` or goes ``'out'``, silently, on all connections or to ``peers``."""
        hook, end = {'in': ('input', 'saddr'), 'out': ('output', 'daddr')}[direction]
        match = (
            f'ip {end} {{ {", ".join(peer.address for peer in peers)} }}'
            if peers
            else f'{direction[0]}ifname veth0'
        )
        _in(
            self.namespace,
            'nft',
            f'add table ip faults; add chain ip faults {hook} '
            f'{{ type filter hook {hook} priority 0; }}; add rule ip faults {hook} {match} drop',
        )

    def drop_large(self) -> None:
        """Drop packets of more than 1000 bytes in both directions, as a link with a small MTU does."""
        _in(
            self.namespace,
            'nft',
            'add table ip faults; '
            + ' '.join(
                f'add chain ip faults {hook} {{ type filter hook {hook} priority 0; }}; '
                f'add rule ip faults {hook} {interface} veth0 ip length > 1000 drop;'
                for hook, interface in (('input', 'iifname'), ('output', 'oifname'))
            ),
        )

    def throttle(self, rate: str) -> None:
        """Limit both directions, to ``'200kbit'`` for example."""
        for namespace, device in ((self.namespace, 'veth0'), (self._switch, self._port)):
            _in(
                namespace,
                'tc',
                'qdisc',
                'replace',
                'dev',
                device,
                'root',
                'tbf',
                'rate',
                rate,
                'burst',
                '32kbit',
                'latency',
                '400ms',
            )

    def power_off(self) -> None:
        """End every process at once, with no word to the others, as a lost machine does."""
        self.cut()
        self.signal(signal.SIGKILL, self.pids())


class Machines:
    """A context with ``count`` nodes and a store host, on one switch.

    Args:
        count: Nodes.
        folder: Of the test, for files of the machines.
        disks: Size of small disks by name, such as ``dict(work='4m')``. All machines see them.

    Attributes:
        nodes: The machines ``node0``, ``node1``, ...
        store: The machine ``store``.
        disks: Folders of the disks by name.
        folder: Folder of the machines' files.
    """

    def __init__(self, count: int, folder: Path, disks: Optional[Dict[str, str]] = None) -> None:
        self._count, self.folder, self._sizes = count, folder / 'machines', disks or {}
        self.disks = {name: self.folder / name for name in self._sizes}
        self._id = f'mapsage-{_owner()}.{next(_count)}'
        self.nodes: List[Machine] = []

    def __enter__(self) -> Machines:
        remove_leftovers()
        self.folder.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for name, disk in self.disks.items():  # before the machines, which keep what is mounted
            disk.mkdir()
            _command(
                'mount',
                '-t',
                'tmpfs',
                '-o',
                f'size={self._sizes[name]}',
                f'{self._id}-disk',
                str(disk),
            )
        switch = f'{self._id}-switch'
        _command('ip', 'netns', 'add', switch)
        _ip(switch, 'link', 'add', 'bridge', 'type', 'bridge')
        _ip(switch, 'link', 'set', 'bridge', 'up')
        names = [*(f'node{number}' for number in range(self._count)), 'store']
        hosts = self.folder / 'hosts'
        hosts.write_text(
            '127.0.0.1 localhost\n'
            + ''.join(f'{_address(number)} {name}\n' for number, name in enumerate(names))
        )
        every = [
            Machine(f'{self._id}-{name}', switch, number, name, self.folder)
            for number, name in enumerate(names)
        ]
        self.nodes, self.store = every[:-1], every[-1]
        for machine in every:
            machine.boot(hosts)
        for machine in every:
            machine.up()

    def __exit__(self, *error: Any) -> None:
        _remove(self._id)


def remove_leftovers() -> None:
    """Remove machines and disks whose test session has been killed."""
    found = {each.name for each in NAMESPACES.glob('mapsage-*')}
    found.update(line.split()[0] for line in Path('/proc/mounts').read_text().splitlines())
    for name in found:
        owner = _OURS.match(name)
        if owner and not _is_alive(int(owner.group(1)), owner.group(2)):
            _remove(name.rpartition('-')[0])


def _remove(run: str) -> None:
    """End the processes of a run's machines; remove its namespaces and disks."""
    spaces = list(NAMESPACES.glob(f'{run}-*'))
    inodes = {os.stat(space).st_ino for space in spaces}
    deadline = time.monotonic() + 10
    while _kill_in(inodes) and time.monotonic() < deadline:  # one may fork while it is killed
        time.sleep(0.02)
    for space in spaces:
        subprocess.run(['ip', 'netns', 'del', space.name])
    for line in Path('/proc/mounts').read_text().splitlines():
        source, folder = line.split()[:2]
        if source == f'{run}-disk':
            subprocess.run(['umount', '-l', folder.encode().decode('unicode_escape')])


def _kill_in(inodes: Any) -> bool:
    """Kill the processes of network namespaces; return whether there were any."""
    found = False
    for entry in Path('/proc').iterdir():
        if entry.name.isdigit():
            try:
                if os.stat(entry / 'ns' / 'net').st_ino in inodes:
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
    return found


def _owner() -> str:
    return f'{os.getpid()}.{_started(os.getpid())}'


def _is_alive(pid: int, started: str) -> bool:
    try:
        return str(_started(pid)) == started
    except OSError:
        return False


def _stat(pid: int) -> List[str]:
    """Return the fields of /proc/PID/stat behind the command, from the state on (proc(5))."""
    return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _started(pid: int) -> int:
    return int(_stat(pid)[19])


def _address(number: int) -> str:
    return f'10.99.0.{number + 1}'


def _ip(namespace: str, *words: str) -> str:
    return _command('ip', '-n', namespace, *words)


def _in(namespace: str, *words: str) -> str:
    return _command('nsenter', f'--net={NAMESPACES / namespace}', *words)


def _command(*words: str) -> str:
    """Run a program; return what it printed, and raise that if it failed."""
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    )
    if done.returncode:
        raise OSError(f'{" ".join(words)}: {done.stdout.strip()}')
    return done.stdout
