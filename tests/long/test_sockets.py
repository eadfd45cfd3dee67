"""Who can reach a running job: its sockets, against the table in docs/explanation/security.md."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import pytest
from color_model import paint, write_scene
from frozen_config import PLAIN
from ranks import free_port
from socket_table import Listener, listening
from support import ROOT, Launch, check_finished, main_leg, write_tiny_config

TABLE = ROOT / 'docs' / 'explanation' / 'security.md'
REQUIRED = 'always'
OPTIONS = ['train_cfg.max_iters=3', 'train_dataloader.num_workers=1']
NO_LOCKS = """
import fcntl
def flock(*arguments):
    raise OSError(37, 'No locks available')
fcntl.flock = flock
"""


class Row(NamedTuple):
    """A row of the table, without its last column."""

    process: str
    kind: str
    address: str
    when: str


def rows_of(mode: str) -> List[Row]:
    """Return the rows of a mode in the table of the docs."""
    cells = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in TABLE.read_text(encoding='utf-8').splitlines()
        if line.startswith('|')
    ]
    rows = [Row(*row[1:5]) for row in cells if len(row) == 6 and row[0] == mode]
    assert rows, f'{TABLE} has no mode {mode!r}'
    return rows


class Watch:
    """Collects the sockets at which the processes of jobs listen, from start to end.

    Attributes:
        sockets: Process, kind and address as in the table, with the sockets seen there.
        commands: Command lines of all processes.
        refused: Ports of TCP sockets, and whether another address of this machine was refused.
    """

    def __init__(self, outside: str = '') -> None:
        self._outside = outside
        self.sockets: Dict[Tuple[str, str, str], Set[Listener]] = {}
        self.commands: Dict[int, str] = {}
        self.refused: Dict[int, bool] = {}
        self.secrets: Set[str] = set()

    def look(self, commands: Dict[int, str]) -> None:
        """Take in the sockets of these processes."""
        self.commands.update(commands)
        for listener in listening(commands):
            process = self._process(listener.pid, listener.kind)
            if process:
                key = process, listener.kind, self._address(listener)
                self.sockets.setdefault(key, set()).add(listener)
                self._knock(listener)
        for pid in commands:
            with contextlib.suppress(OSError):
                found = re.search(
                    rb'MAPSAGE_SECRET=([^\0]*)', Path(f'/proc/{pid}/environ').read_bytes()
                )
                self.secrets |= {found.group(1).decode()} if found else set()

    def follow(self, launches: Sequence[Launch]) -> str:
        """Look until all have ended well; return what they printed."""
        while any(launch.process.poll() is None for launch in launches):
            for launch in launches:
                self.look(launch.running())
            time.sleep(0.02)
        finished = [launch.finish() for launch in launches]
        for each in finished:
            check_finished(each)
        return '\n'.join(each.output for each in finished)

    def check(self, mode: str, rows: Optional[List[Row]] = None) -> None:
        """Compare with the table: nothing else, and all that is always there."""
        rows = rows_of(mode) if rows is None else rows
        known = {row[:3] for row in rows}
        assert set(self.sockets) <= known, {
            key: self.sockets[key] for key in set(self.sockets) - known
        }
        missing = {row[:3] for row in rows if row.when == REQUIRED} - set(self.sockets)
        assert not missing, f'{mode}: {missing} of the table not seen, but {set(self.sockets)}'

    def _process(self, pid: int, kind: str) -> str:
        command = self.commands.get(pid, '')
        if 'rendezvous.py' in command:
            return 'rendezvous.py'
        if 'node_watch' in command:
            return 'watch'
        if '--serve' in command:
            parent = self.commands.get(_parent(pid), '')
            return 'fork server' if 'launch.py' in parent else 'rank' if parent else ''
        if '--call' not in command and re.search(r'launch\.py|torch\.distributed\.run', command):
            # The launcher makes the fork server's socket, and hands it on.
            return 'fork server' if kind == 'unix' else 'launcher'
        return 'rank'

    def _address(self, listener: Listener) -> str:
        if listener.kind == 'unix':
            if listener.address.startswith('@'):
                return 'name'
            with contextlib.suppress(OSError):
                folder = os.stat(os.path.dirname(listener.address))
                assert stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid()
            return 'folder'
        if listener.is_loopback:
            return 'loopback'
        return 'all' if listener.address in ('0.0.0.0', '::') else 'interface'

    def _knock(self, listener: Listener) -> None:
        if self._outside and listener.kind == 'tcp' and listener.port not in self.refused:
            try:
                socket.create_connection((self._outside, listener.port), 5).close()
                self.refused[listener.port] = False
            except OSError:
                self.refused[listener.port] = True


def _parent(pid: int) -> int:
    try:
        return int(Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[1])
    except OSError:
        return 0


@pytest.fixture(scope='module')
def outside() -> Tuple[str, str]:
    """An address of this machine that others can reach, and its interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))  # sends nothing
        except OSError:
            pytest.skip('no interface but loopback')
        address = probe.getsockname()[0]
    from mapsage.distributed.host_address import addresses_of

    return address, next(name for _, name in socket.if_nameindex() if address in addresses_of(name))


@pytest.fixture
def own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the secret to the launcher, as a user does."""
    monkeypatch.delenv('MAPSAGE_SECRET', raising=False)


def train(config: Path, work: Path, *options: Any, ranks: int = 2, **environ: str) -> Launch:
    return Launch(
        config,
        '--work-dir',
        work,
        *options,
        '--cfg-options',
        *OPTIONS,
        ranks=ranks,
        cold=True,
        environ={'ACCELERATOR': 'cpu', **environ},
    )


def test_a_default_launch(
    tiny_config: Path, tmp_path: Path, outside: Tuple[str, str], own_secret: None
) -> None:
    """Training with loader workers; then the doctor and a test. Nobody from outside gets in."""
    watch = Watch(outside[0])
    output = watch.follow([train(tiny_config, tmp_path / 'work', MASTER_PORT=str(free_port()))])
    check_secret(watch, output, tmp_path / 'work')
    for script, arguments in (('doctor.sh', []), ('test.sh', [tmp_path / 'work' / 'iter_3.pth'])):
        output += watch.follow(
            [
                Launch(
                    tiny_config,
                    *arguments,
                    cold=True,
                    environ={'ACCELERATOR': 'cpu'},
                    command=['bash', f'scripts/{script}'],
                )
            ]
        )
    watch.check('one machine')
    # gloo and the mesh of two ranks, at least
    assert len(watch.refused) >= 4 and all(watch.refused.values()), watch.refused
    assert 'TCPStore' not in output and 'warning: this job' not in output


def check_secret(watch: Watch, output: str, work: Path) -> None:
    """Check that there is one, and that no log, file or command line has it."""
    (secret,) = watch.secrets
    assert re.match('[0-9a-f]{64}$', secret)
    files = [path for path in work.rglob('*') if path.is_file()]
    assert any(path.suffix == '.log' for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert secret not in output + ' '.join(watch.commands.values())


@main_leg
def test_encoders(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        tiny_data,
        PLAIN + "feature_source = dict(type='Streamed', encoders=1)\n",
    )
    watch = Watch()
    watch.follow([train(config, tmp_path / 'work', ranks=3)])
    watch.check('one machine')


@main_leg
def test_prediction(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'field.tif', paint(600, 90))
    watch = Watch()
    watch.follow(
        [
            Launch(
                *model,
                scene,
                '--out',
                tmp_path / 'out',
                cold=True,
                command=['bash', 'scripts/predict.sh'],
                environ={'ACCELERATOR': 'cpu', 'PYTHONPATH': str(ROOT / 'tests')},
            )
        ]
    )
    watch.check('one machine')


def task(rank: int, nodes: int, port: int, address: str) -> Dict[str, str]:
    return {
        'SLURM_PROCID': str(rank),
        'SLURM_NTASKS': '2',
        'SLURM_NODELIST': 'node[0-1]',
        'SLURM_LOCALID': str(rank if nodes == 1 else 0),
        'SLURM_NNODES': str(nodes),
        'SLURM_NODEID': str(rank if nodes == 2 else 0),
        'SLURM_JOB_ID': '77',
        'SLURM_TASKS_PER_NODE': str(2 // nodes),
        'MASTER_ADDR': address,
        'MASTER_PORT': str(port),
        'ACCELERATOR': 'cpu',
    }


@main_leg
@pytest.mark.parametrize('nodes', [1, 2])
def test_slurm(nodes: int, tiny_config: Path, tmp_path: Path, outside: Tuple[str, str]) -> None:
    port, watch = free_port(), Watch()
    more = {'GLOO_SOCKET_IFNAME': outside[1]} if nodes == 2 else {}
    watch.follow(
        [
            Launch(
                tiny_config,
                '--launcher',
                'slurm',
                '--work-dir',
                tmp_path / 'work',
                '--cfg-options',
                *OPTIONS,
                command=[sys.executable, 'tools/train.py'],
                cold=True,
                environ={**task(rank, nodes, port, outside[0]), **more},
            )
            for rank in range(2)
        ]
    )
    watch.check(f'Slurm or mpirun, {"one machine" if nodes == 1 else "several machines"}')
    everywhere = ('rank', 'tcp', 'all') in watch.sockets
    assert not everywhere, 'MASTER_ADDR is a number'


@main_leg
def test_torchrun(tiny_config: Path, tmp_path: Path) -> None:
    watch = Watch()
    watch.follow(
        [
            Launch(
                tiny_config,
                '--launcher',
                'pytorch',
                '--work-dir',
                tmp_path / 'work',
                '--cfg-options',
                *OPTIONS,
                cold=True,
                command=[
                    sys.executable,
                    '-m',
                    'torch.distributed.run',
                    '--standalone',
                    '--nproc_per_node',
                    '2',
                    'tools/train.py',
                ],
            )
        ]
    )
    watch.check('torchrun, one machine')


@main_leg
@pytest.mark.parametrize('libuv', ['0', '1'])
def test_without_a_private_file(libuv: str, tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / 'code').mkdir()
    (tmp_path / 'code' / 'sitecustomize.py').write_text(NO_LOCKS)
    watch = Watch()
    output = watch.follow(
        [train(tiny_config, tmp_path / 'work', USE_LIBUV=libuv, PYTHONPATH=str(tmp_path / 'code'))]
    )
    watch.check('no private file')
    assert output.count('Other users of this machine can reach it there') == 2


@main_leg
def test_two_machines(tiny_config: Path, tmp_path: Path, outside: Tuple[str, str]) -> None:
    node = {
        'NNODES': '2',
        'MASTER_ADDR': outside[0],
        'MASTER_PORT': str(free_port()),
        'GLOO_SOCKET_IFNAME': outside[1],
    }
    watch = Watch()
    output = watch.follow(
        [
            train(tiny_config, tmp_path / 'work', ranks=1, NODE_RANK=str(rank), **node)
            for rank in range(2)
        ]
    )
    watch.check('NNODES=2')
    assert output.count('secret of the job: MAPSAGE_SECRET, which must be the same') == 2


@contextlib.contextmanager
def rendezvous(address: str) -> Iterator[Tuple[int, str]]:
    """Run the rendezvous store; give its pid and what it has printed first."""
    store = subprocess.Popen(
        [sys.executable, '-u', 'tools/rendezvous.py', '--port', '0', '--host', address],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    try:
        assert store.stdout is not None
        yield store.pid, store.stdout.readline()
    finally:
        store.terminate()
        store.wait()


@main_leg
def test_machines_that_come_and_go(
    tiny_data: Path, tmp_path: Path, outside: Tuple[str, str]
) -> None:
    """Each with a disk of its own, so that a checkpoint is copied between them."""
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        tiny_data,
        "default_hooks['checkpoint'].update(interval=1, neighbor_copy=True)",
    )
    watch = Watch()
    with rendezvous(outside[0]) as (pid, line):
        place = re.search(r'rendezvous store at (\S+:\d+)\.', line)
        assert place is not None
        watch.look({pid: 'tools/rendezvous.py'})
        node = {
            'NNODES': '2:2',
            'RENDEZVOUS': place.group(1),
            'RDZV_ID': tmp_path.name,
            'GLOO_SOCKET_IFNAME': outside[1],
        }
        watch.follow(
            [train(config, tmp_path / f'work{rank}', ranks=1, **node) for rank in range(2)]
        )
    watch.check('NNODES=2:4')


@main_leg  # nothing of it is MapSage's code
@pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ('ip', 'nft', 'unshare'))),
    reason='network namespaces need root, iproute2, nftables and util-linux',
)
def test_the_firewall_of_the_docs() -> None:
    """A machine of the job reaches the port, a stranger on another network does not."""
    rules = re.search(r'```\n(table inet.*?)```', TABLE.read_text(encoding='utf-8'), re.DOTALL)
    assert rules is not None
    code = """
import socket, subprocess, sys
listener = socket.create_server(('', 29500))
def knock(name, address):
    return subprocess.run(['ip', 'netns', 'exec', name, sys.executable, '-c',
        f"import socket; socket.create_connection(('{address}', 29500), 2)"],
        stderr=subprocess.DEVNULL).returncode == 0
for name, host, own in (('peer', 1, '10.1.0'), ('stranger', 2, '10.2.0')):
    run = lambda command: subprocess.run(command.split(), check=True)
    run(f'ip netns add {name}')
    run(f'ip link add to{host} type veth peer name eth0 netns {name}')
    run(f'ip address add {own}.1/24 dev to{host}')
    run(f'ip link set to{host} up')
    run(f'ip -n {name} address add {own}.2/24 dev eth0')
    run(f'ip -n {name} link set eth0 up')
def ask():
    return [knock('peer', '10.1.0.1'), knock('stranger', '10.2.0.1')]
open_to = ask()
subprocess.run(['nft', '-f', '-'], input=sys.argv[1].encode(), check=True)
print(open_to, ask())
"""
    done = subprocess.run(
        [
            'unshare',
            '--net',
            '--mount',
            'sh',
            '-c',
            'mount -t tmpfs none /run && mkdir /run/netns && ip link set lo up && exec "$@"',
            'sh',
            sys.executable,
            '-c',
            code,
            rules.group(1),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
    )
    assert done.stdout.strip() == '[True, True] [True, False]', done.stdout
