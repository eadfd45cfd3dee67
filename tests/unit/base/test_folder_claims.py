"""One writer at a time, by real processes that end in every way."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, List

import pytest
from fuzzing import documents
from hypothesis import given

from mapsage.base import folder_claims
from mapsage.base.folder_claims import FolderClaimedError, claimed

FORK = multiprocessing.get_context('fork')


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_claims, '_PATIENCE', 0.3)


def claims(folder: Path) -> List[Path]:
    return sorted(folder.glob('.claim-*'))


def _hold(folder: Path, names: List[str], ready: Any, let_go: Any, job: str = '') -> None:
    with claimed(folder, names, '', job):
        ready.set()
        let_go.wait(100)


class Holder:
    """A process that holds a claim until it is told to let go, or killed."""

    def __init__(self, folder: Path, *names: str, job: str = '') -> None:
        ready, self._let_go = FORK.Event(), FORK.Event()
        self.process = FORK.Process(
            target=_hold, args=(folder, list(names), ready, self._let_go, job), daemon=True
        )
        self.process.start()
        assert ready.wait(100)

    def let_go(self) -> None:
        self._let_go.set()
        self.process.join(100)

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(100)


def test_the_second_process_says_who_holds_the_name(tmp_path: Path) -> None:
    holder = Holder(tmp_path, 'the training')
    with pytest.raises(FolderClaimedError) as caught, claimed(
        tmp_path, ['the training'], 'Choose another --work-dir.'
    ):
        raise AssertionError('two processes hold it')
    since = json.loads(claims(tmp_path)[0].read_text())['since']
    assert str(caught.value) == (
        f'{tmp_path} is in use: process {holder.process.pid} on {socket.gethostname()}, since '
        f'{since}, writes the training. Choose another --work-dir.'
    )
    assert abs(time.mktime(time.strptime(since[:19], '%Y-%m-%d %H:%M:%S')) - time.time()) < 200
    holder.let_go()
    with claimed(tmp_path, ['the training'], ''):
        assert len(claims(tmp_path)) == 1
    assert claims(tmp_path) == []


def test_names_do_not_stop_each_other(tmp_path: Path) -> None:
    holders = [Holder(tmp_path, f'{name}.tif', f'{name}2.tif') for name in 'ab']
    with claimed(tmp_path, ['c.tif'], ''):
        assert len(claims(tmp_path)) == 3
    with pytest.raises(
        FolderClaimedError, match=(rf'process {holders[1].process.pid} on .* writes b2\.tif\.')
    ), claimed(tmp_path, ['c.tif', 'b2.tif'], ''):
        pass
    for holder in holders:
        holder.let_go()
    assert claims(tmp_path) == []


def test_what_a_killed_process_leaves_stops_nobody_and_is_removed(tmp_path: Path) -> None:
    holder = Holder(tmp_path, 'a')
    holder.kill()
    assert len(claims(tmp_path)) == 1
    with claimed(tmp_path, ['a'], ''):
        [left] = claims(tmp_path)
        assert json.loads(left.read_text())['process'] == os.getpid()
    assert claims(tmp_path) == []


def test_a_process_that_dies_within_the_patience_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_claims, '_PATIENCE', 60)
    holder = Holder(tmp_path, 'a')
    pauses: List[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            holder.kill()

    monkeypatch.setattr(folder_claims.time, 'sleep', sleep)
    with claimed(tmp_path, ['a'], ''):
        assert len(claims(tmp_path)) == 1
    assert len(pauses) == 3 and all(0 <= pause <= 0.2 for pause in pauses)


def _outlive(seconds: float) -> None:
    time.sleep(seconds)


def test_a_child_of_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    """As a loader's worker, which lives on for some seconds."""
    with claimed(tmp_path, ['a'], ''):
        child = FORK.Process(target=_outlive, args=(100,), daemon=True)
        child.start()
        [claim] = claims(tmp_path)
        inode = claim.stat().st_ino
        for link in Path(f'/proc/{child.pid}/fd').iterdir():
            deadline = time.monotonic() + 100
            while link.exists() and link.stat().st_ino == inode:  # the child has not run yet
                assert time.monotonic() < deadline
                time.sleep(0.01)
    with claimed(tmp_path, ['a'], ''):
        child.kill()
        child.join(100)


def test_the_end_of_a_child_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    with claimed(tmp_path, ['a'], ''):
        child = FORK.Process(target=_outlive, args=(0,))
        child.start()
        child.join(100)
        assert len(claims(tmp_path)) == 1
        with pytest.raises(FolderClaimedError), claimed(tmp_path, ['a'], ''):
            pass


def test_processes_of_one_job_do_not_stop_each_other(tmp_path: Path) -> None:
    """A machine that was frozen holds its claim while the others continue."""
    holder = Holder(tmp_path, 'the training', job='job 7')
    os.kill(holder.process.pid or 0, signal.SIGSTOP)
    with claimed(tmp_path, ['the training'], '', 'job 7'):
        assert len(claims(tmp_path)) == 2
    for other in ('job 8', ''):
        with pytest.raises(FolderClaimedError), claimed(tmp_path, ['the training'], '', other):
            pass
    holder.kill()


def test_an_error_in_the_block_ends_the_claim(tmp_path: Path) -> None:
    with pytest.raises(KeyError), claimed(tmp_path, ['a'], ''):
        raise KeyError('a')
    assert claims(tmp_path) == []


def test_a_claim_that_is_being_written_is_one(tmp_path: Path) -> None:
    with open(tmp_path / '.claim-00000000', 'x') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            FolderClaimedError, match='a process that has just started, writes'
        ), claimed(tmp_path, ['a'], ''):
            pass


ELSEWHERE = dict(names=['a'], host='node7', process=4711, since='2026-01-01 00:00:00 +0000', job='')


def test_a_lock_that_outlives_its_machine_says_which_file_to_remove(tmp_path: Path) -> None:
    """As an NFS server keeps it for a client that lost its power."""
    claim = tmp_path / '.claim-12345678'
    with open(claim, 'x') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(ELSEWHERE))
        file.flush()
        with pytest.raises(
            FolderClaimedError,
            match=(
                r'process 4711 on node7, since .*, writes a\. Wait\. If node7 is gone, its lock '
                r'may outlive it on a network file system: remove \.claim-12345678 there\.$'
            ),
        ), claimed(tmp_path, ['a'], 'Wait.'):
            pass
        claim.unlink()
        with claimed(tmp_path, ['a'], 'Wait.') as warning:
            assert warning == ''


def test_a_claim_of_another_machine_without_a_lock_is_told(tmp_path: Path) -> None:
    """Its process has ended, or locks are local to a machine (mounted with local_lock=flock)."""
    (tmp_path / '.claim-12345678').write_text(json.dumps(ELSEWHERE))
    with claimed(tmp_path, ['a'], '') as warning:
        assert warning.startswith(f'{tmp_path} held the claim of process 4711 on node7, since ')
        assert 'do not reach from one machine to another' in warning
        assert len(claims(tmp_path)) == 1
    for other in (dict(host=socket.gethostname()), dict(names=['b'])):
        (tmp_path / '.claim-12345678').write_text(json.dumps(dict(ELSEWHERE, **other)))
        with claimed(tmp_path, ['a'], '') as warning:
            assert warning == ''


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with claimed(tmp_path, ['a'], '') as warning:
        assert warning.startswith(f'the file system of {tmp_path} has no locks')
        assert claims(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match='No such file'), claimed(tmp_path / 'none', ['a'], ''):
        pass


def _compete(folder: Path, start: Any, inside: Any, most: Any) -> None:
    folder_claims._PATIENCE = 60
    start.wait(100)
    with claimed(folder, ['a'], ''):
        with inside.get_lock():
            inside.value += 1
            most.value = max(most.value, inside.value)
        time.sleep(0.02)
        with inside.get_lock():
            inside.value -= 1


def test_of_many_that_start_at_once_one_is_inside(tmp_path: Path) -> None:
    start, inside, most = FORK.Event(), FORK.Value('i', 0), FORK.Value('i', 0)
    with ExitStack() as stack:
        processes = [
            FORK.Process(target=_compete, args=(tmp_path, start, inside, most)) for _ in range(6)
        ]
        for process in processes:
            process.start()
            stack.callback(process.kill)
        start.set()
        for process in processes:
            process.join(100)
            assert process.exitcode == 0
    assert most.value == 1 and claims(tmp_path) == []


@given(documents(dict(names=['a'], host='h', process=7, since='now', job='')))
def test_any_claim_of_another_process(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / 'any claim'
    folder.mkdir(exist_ok=True)
    path = folder / '.claim-00000000'
    path.write_bytes(content)
    with open(path) as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # of this process, by another open file
        with open(folder / 'own', 'w') as own:
            facts = dict(names=['a'], job='mine', host='here')
            holder, _ = folder_claims._find_holder(folder, own, facts)
        assert str(folder) in folder_claims._describe(folder, facts, holder or {}, 'Wait.')
