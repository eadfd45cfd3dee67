"""The store of a job on one machine: who gets it, and that it opens no port."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Dict, List, Set

import pytest
import torch.distributed as dist
from forked import DIED, fork_ranks
from ranks import free_port
from socket_table import Listener, listening

from mapsage.distributed import job_store
from mapsage.distributed.job_store import private_store, shared_store
from mapsage.distributed.lost_ranks import Finding, Record, Report
from mapsage.distributed.store import LockedStore
from mapsage_launcher import addresses
from mapsage_launcher.trust.private_store import PrivateStoreError, file_path

SECRET = 'a1' * 32
NOBODY = 65534
SECONDS = 60.0


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*job_store._IDENTITY, 'GROUP_WORLD_SIZE', 'MAPSAGE_ENCODERS'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('MAPSAGE_SECRET', SECRET)


def meet(port: int, variables: Dict[str, str]) -> Any:
    """Return this rank's store."""
    os.environ.update(MASTER_PORT=str(port), **variables)
    return private_store(SECONDS)


def count_ranks(port: int, variables: Dict[str, str]) -> Any:
    rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    inherited = open_ports()
    store = LockedStore(meet(port, variables))
    record = Record(store, 'roll call', rank, range(size))
    record.file(Report())
    finding = record.settle(
        lambda reports: Finding([other for other in range(size) if other not in reports], {})
    )
    silent = finding.ranks if finding else [-1]
    return store.add('came', 1) > 0, silent, sorted(open_ports() - inherited)


def open_ports() -> Set[Listener]:
    """Return where this process listens, sockets of earlier tests that it has from its parent too."""
    return {each for each in listening([os.getpid()]) if each.kind != 'unix'}


@pytest.mark.parametrize('size', [1, 2, 3, 5])
def test_all_ranks_have_one_store_and_no_port(size: int, tmp_path: Path) -> None:
    port = free_port()
    assert fork_ranks(count_ranks, size, tmp_path, port, {}) == [(True, [], [])] * size
    # The second run of the same job, at once, sees nothing of the first.
    assert fork_ranks(count_ranks, size, tmp_path, port, {}) == [(True, [], [])] * size


@pytest.mark.long
def test_thirty_two_ranks_that_ask_all_the_time(tmp_path: Path) -> None:
    assert fork_ranks(ask_often, 32, tmp_path, free_port()) == [True] * 32


def ask_often(port: int) -> bool:
    """Ask as ranks do that wait for a late one, and return whether that took little time."""
    store = meet(port, {})
    store.add('came', 1)
    while store.add('came', 0) < 32:
        time.sleep(0.01)
    used, answers = time.process_time(), 0
    for _ in range(100):
        answers += store.add('late/set', 0) == 0
        time.sleep(0.01)
    used = time.process_time() - used
    store.add('went', 1)
    while store.add('went', 0) < 32:
        time.sleep(0.01)
    return answers == 100 and used < 0.5


def die_with_the_lock(port: int, folder: Path) -> Any:
    rank = int(os.environ['RANK'])
    store = meet(port, {})
    store.add('came', 1)
    while store.add('came', 0) < 3:
        time.sleep(0.01)
    if rank == 1:
        # as FileStore does for each request
        with open(file_path(job_store._locations[_name()]), 'r+b') as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            (folder / 'locked').touch()
            os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / 'locked').exists():
        time.sleep(0.01)
    return store.add('after', 1) > 0


def _name() -> bytes:
    return job_store._meeting_name(os.environ)


def test_a_rank_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    assert fork_ranks(die_with_the_lock, 3, tmp_path, free_port(), tmp_path) == [True, DIED, True]


def outlive_rank_0(port: int, folder: Path) -> Any:
    store, rank = meet(port, {}), int(os.environ['RANK'])
    store.add('came', 1)
    while store.add('came', 0) < 3:
        time.sleep(0.01)
    if rank == 0:
        (folder / 'over').touch()
        os._exit(0)
    while not (folder / 'over').exists():
        time.sleep(0.01)
    store.set(f'note/{rank}', 'lost')
    return [store.get(f'note/{other}') for other in (1, 2)]


def test_the_store_outlives_rank_0(tmp_path: Path) -> None:
    """Ranks leave notes in it about the end of rank 0."""
    assert fork_ranks(outlive_rank_0, 3, tmp_path, free_port(), tmp_path) == [
        DIED,
        [b'lost', b'lost'],
        [b'lost', b'lost'],
    ]


def be_part_of_a_split_job(port: int) -> Any:
    rank = int(os.environ['RANK'])
    os.environ['MAPSAGE_ENCODERS'] = '2'
    if rank < 2:
        os.environ.update(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
    store = meet(port, {'GROUP_WORLD_SIZE': '1'})
    store.add('came', 1)
    while store.add('came', 0) < 4:
        time.sleep(0.01)
    return True


def test_encoders_have_the_store_of_the_heads(tmp_path: Path) -> None:
    assert fork_ranks(be_part_of_a_split_job, 4, tmp_path, free_port()) == [True] * 4


def be_of_a_start(port: int) -> Any:
    """Ranks 0 and 1 are of a first start, 2 and 3 of a second one, as by torchrun."""
    rank = int(os.environ['RANK'])
    os.environ.update(
        RANK=str(rank % 2), LOCAL_RANK=str(rank % 2), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2'
    )
    store = meet(port, {'TORCHELASTIC_RESTART_COUNT': str(rank // 2)})
    store.set(f'rank {rank % 2}', str(rank))
    return sorted(int(store.get(f'rank {other}')) for other in (0, 1))


def test_two_starts_of_a_job_have_two_stores(tmp_path: Path) -> None:
    assert fork_ranks(be_of_a_start, 4, tmp_path, free_port()) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def come_twice(port: int) -> Any:
    """Rank 1 of the second run comes while rank 0 of the first one still waits for rank 2."""
    name = job_store._meeting_name(os.environ)
    if os.environ['RANK'] == '0':
        meet(port, {})
        time.sleep(3)
        return 'waited'
    return [type(ask(name)).__name__, type(job_store._ask_once(name)).__name__]


def ask(name: bytes) -> Any:
    while True:
        try:
            return job_store._ask_once(name)
        except OSError:
            time.sleep(0.01)


def test_a_rank_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv('MAPSAGE_ENCODERS', '1')  # who never comes
    monkeypatch.setenv('GROUP_WORLD_SIZE', '1')
    monkeypatch.setattr('forked.free_port', lambda: port)
    assert fork_ranks(come_twice, 2, tmp_path, port) == ['waited', ['int', 'NoneType']]


def stay_away(port: int) -> Any:
    if os.environ['RANK'] == '0':
        return ''
    os.environ['MASTER_PORT'] = str(port)
    with pytest.raises(PrivateStoreError) as error:
        private_store(0.5)
    return f'{error.value.ranks} {error.value}'


def test_a_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    _, text = fork_ranks(stay_away, 2, tmp_path, free_port())
    assert text.startswith('[0] rank 1 did not reach rank 0') and 'last lines in its log' in text


def test_several_machines_have_no_private_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('GROUP_WORLD_SIZE', '2')
    assert private_store(SECONDS) is None


def test_who_has_another_secret_does_not_find_the_meeting() -> None:
    job = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29500'}
    names = [
        job_store._meeting_name({**job, 'MAPSAGE_SECRET': secret, **more})
        for secret in (SECRET, 'b2' * 32)
        for more in ({}, {'SLURM_JOB_ID': '7'})
    ]
    assert len(set(names)) == 4 and SECRET.encode() not in b''.join(names)


def be_attacked(port: int, folder: Path) -> Any:
    """Rank 1 comes last, after a stranger has knocked 300 times."""
    os.environ.update(MASTER_PORT=str(port))
    if os.environ['RANK'] == '1':
        os._exit(attack(job_store._meeting_name(os.environ), folder))
    if os.environ['RANK'] == '2':
        while not (folder / 'attacked').exists() or not (folder / 'attacked').read_text():
            time.sleep(0.01)
    store = private_store(SECONDS)
    store.add('came', 1)
    while store.add('came', 0) < 2:
        time.sleep(0.01)
    return os.environ['RANK']


def attack(name: bytes, folder: Path) -> int:
    report = open(folder / 'attacked', 'w')
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    answers: List[str] = []
    deadline = time.monotonic() + SECONDS
    while len(answers) < 300 and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            try:
                stranger.connect(name)
            except OSError:
                time.sleep(0.01)
                continue
            try:
                stranger.send(job_store._RANK.pack(2))
                data, rights, _, _ = stranger.recvmsg(1024, socket.CMSG_SPACE(4))
                answers.append('let in' if data or rights else 'refused')
            except OSError:
                answers.append('refused')
    descriptors = [
        f'/proc/{os.getppid()}/fd',
        *(
            f'/proc/{pid}/fd'
            for pid in os.listdir('/proc')
            if pid.isdigit() and int(pid) != os.getpid()
        ),
    ]
    seen = 0
    for path in descriptors:
        try:
            seen += any('mapsage-store' in os.readlink(entry.path) for entry in os.scandir(path))
        except OSError:
            continue
    report.write(f'{answers.count("refused")} of {len(answers)}, {seen}')
    report.close()
    return 0


@pytest.mark.skipif(os.getuid() != 0, reason='root can become another user')
def test_another_user_is_not_let_in(tmp_path: Path) -> None:
    assert fork_ranks(be_attacked, 3, tmp_path, free_port(), tmp_path) == ['0', DIED, '2']
    assert (tmp_path / 'attacked').read_text() == '300 of 300, 0'


def use_fallback(port: int) -> Any:
    def refuse() -> int:
        raise OSError('no locks available')

    job_store.private_file = refuse
    inherited = open_ports()
    store = meet(port, {})
    rank = int(os.environ['RANK'])
    store.set(f'rank {rank}', 'here')
    for other in range(3):
        store.get(f'rank {other}')
    addresses = [each.address for each in open_ports() - inherited]
    store.add('read', 1)
    while rank == 0 and store.add('read', 0) < 3:
        time.sleep(0.01)
    return addresses


def test_without_a_private_file_the_store_is_on_loopback(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    if 'master_listen_fd' not in (dist.TCPStore.__init__.__doc__ or ''):
        with pytest.raises(AssertionError, match='no locks available.*Set TMPDIR'):
            fork_ranks(use_fallback, 1, tmp_path, free_port())
        return
    assert fork_ranks(use_fallback, 3, tmp_path, free_port()) == [['127.0.0.1'], [], []]
    assert capfd.readouterr().err.count('torch unpickles what is in it') == 1


@pytest.mark.parametrize('rank, local_rank, lines', [(0, 0, 1), (1, 0, 1), (1, 1, 0)])
def test_ranks_of_several_machines_say_where_they_wait(
    rank: int,
    local_rank: int,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks without a launcher, as a queue of jobs starts them."""
    monkeypatch.setattr(addresses, '_PATIENCE_SECONDS', 0.1)
    for name, value in dict(
        RANK=rank,
        LOCAL_RANK=local_rank,
        WORLD_SIZE=2,
        MASTER_PORT=free_port(),
        MASTER_ADDR='no-host.invalid',
    ).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    # torch 1.10 raises a ValueError
    with pytest.raises((RuntimeError, ValueError)):
        shared_store(2.0)
    assert (
        capsys.readouterr().err.count(
            "warning: MASTER_ADDR='no-host.invalid' stands for no address here ("
        )
        == lines
    )
