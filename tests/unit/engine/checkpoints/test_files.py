"""A checkpoint's file after kill -9, on a full disk, and where two runs share a folder."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
import torch
from support import PATIENT, UNDECODABLE

from mapsage.engine.checkpoints.background import Save
from mapsage.engine.checkpoints.files import SaveError, remove_leftovers, write_checkpoint
from mapsage.engine.checkpoints.resume import choose_checkpoint

_fork: Any = multiprocessing.get_context('fork')
_whole: Any = dict(weights_only=False) if torch.__version__ >= '1.13' else {}


def checkpoint(number: int, size: int = 100_000) -> dict:
    return dict(
        meta=dict(seed=number),
        state_dict=dict(w=torch.full((size,), float(number))),
        message_hub={},
    )


def read(path: Path) -> int:
    found = torch.load(str(path), **_whole)
    number, weight = found['meta']['seed'], found['state_dict']['w']
    assert torch.equal(weight, torch.full_like(weight, float(number)))
    return number


def save_and_die(folder: Path, operation: int) -> None:
    """Save iter_2.pth and then iter_3.pth in the place of iter_1.pth; die before an operation."""

    def count(event: str, arguments: Any) -> None:
        nonlocal operation
        if event in ('open', 'os.rename', 'os.remove') and str(folder) in str(arguments[0]):
            operation -= 1
            if operation < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    for number in (2, 3):
        Save(
            [(checkpoint(number, 100), f'{folder}/iter_{number}.pth')],
            [(f'{folder}/last_checkpoint', f'{folder}/iter_{number}.pth')],
            [lambda number=number: os.remove(f'{folder}/iter_{number - 1}.pth')],
        ).carry_out()
    os._exit(0)


def test_killed_before_any_operation_the_newest_whole_file_is_resumed(tmp_path: Path) -> None:
    newest: List[int] = []
    left_over = 0
    for operation in range(100):
        folder = tmp_path / str(operation)
        Save(
            [(checkpoint(1, 100), f'{folder}/iter_1.pth')],
            [(f'{folder}/last_checkpoint', f'{folder}/iter_1.pth')],
        ).carry_out()
        child = _fork.Process(target=save_and_die, args=(folder, operation))
        child.start()
        child.join(PATIENT)
        whole = max(int(path.stem[5:]) for path in folder.glob('*.pth'))
        choice = choose_checkpoint(str(folder))
        assert choice.seed == whole and choice.skipped == []
        left_over += len(remove_leftovers(str(folder)))
        assert not list(folder.glob('*.pth.*'))
        newest.append(whole)
        if child.exitcode == 0:
            break
    assert newest == sorted(newest) and set(newest) == {1, 2, 3}
    assert len(newest) > 10 and left_over >= 2


def write_often(path: Path, numbers: range) -> None:
    for number in numbers:
        write_checkpoint(checkpoint(number), str(path))


def test_two_runs_in_one_folder_leave_whole_files(tmp_path: Path) -> None:
    path = tmp_path / 'iter_1.pth'
    write_checkpoint(checkpoint(7), str(path))
    runs = [
        _fork.Process(target=write_often, args=(path, range(first, first + 40)))
        for first in (100, 200)
    ]
    for run in runs:
        run.start()
    while any(run.is_alive() for run in runs):
        assert read(path) == 7 or read(path) >= 100
    assert [run.exitcode for run in runs] == [0, 0]
    assert [each.name for each in tmp_path.iterdir()] == ['iter_1.pth']


def test_leftovers_of_the_dead_alone_are_removed(tmp_path: Path) -> None:
    written = tmp_path / 'iter_2.pth'
    names = ('iter_1.pth.0123abcd.partial', 'iter_1.pth.partial', 'notes.partial')
    for name in names:
        (tmp_path / name).write_bytes(b'half')
    started, end = _fork.Event(), _fork.Event()

    def write_slowly() -> None:
        class Slow:
            def __reduce__(self) -> Any:
                started.set()
                end.wait(PATIENT)
                return int, ()

        write_checkpoint(Slow(), str(written))

    child = _fork.Process(target=write_slowly)
    child.start()
    assert started.wait(PATIENT)
    assert remove_leftovers(str(tmp_path)) == [str(tmp_path / names[0])]
    end.set()
    child.join(PATIENT)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([written.name, *names[1:]])


class WhileWritten:
    """Calls a function when it is written, in the middle of a file."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> Any:
        self._function()
        return int, ()


def test_a_worker_that_is_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    """It would hold the lock of a rank that is killed, and the room of a file that is removed."""
    end = _fork.Event()
    ours, theirs = _fork.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(
                [os.path.realpath(f'/proc/self/fd/{each}') for each in os.listdir('/proc/self/fd')]
            )
            end.wait(PATIENT)
        finally:
            os._exit(0)

    def write_and_wait() -> None:
        def fork() -> None:
            if not os.fork():
                work()
            time.sleep(PATIENT)  # and is killed; one that waits for an event would be missed by it

        write_checkpoint(WhileWritten(fork), str(tmp_path / 'iter_1.pth'))

    child = _fork.Process(target=write_and_wait, daemon=True)
    with open(str(tmp_path / UNDECODABLE), 'w'):  # as a test before may have left one
        child.start()
        assert ours.poll(PATIENT)
        opened = ours.recv()
    child.kill()
    child.join()  # with a deadline it would wait for the worker, which holds its pipe
    (left,) = tmp_path.glob('*.partial')
    try:
        assert str(left) not in opened
        assert remove_leftovers(str(tmp_path)) == [str(left)]
    finally:
        end.set()


def as_on_nfs(file: Any, operation: int) -> None:
    """Lock as NFS does: it gives an exclusive lock to those alone who may write."""
    number = file if isinstance(file, int) else file.fileno()
    if operation & fcntl.LOCK_EX and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(file, operation)


flock = fcntl.flock


def test_leftovers_are_removed_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / 'iter_1.pth.0123abcd.partial'
    left.write_bytes(b'half')
    monkeypatch.setattr(fcntl, 'flock', as_on_nfs)
    assert remove_leftovers(str(tmp_path)) == [str(left)]


@pytest.mark.parametrize('meanwhile', ['removed', 'locked'])
def test_a_file_that_passes_for_a_leftover_before_it_is_locked(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run in the folder looks at it between its creation and its lock."""
    others: List[Any] = []

    def too_late(file: Any, operation: int) -> None:
        if not others:
            others.append(open(next(tmp_path.glob('*.partial')), 'r+b'))
            if meanwhile == 'locked':
                flock(others[0], fcntl.LOCK_EX)
            else:
                os.remove(others[0].name)
        flock(file, operation)

    monkeypatch.setattr(fcntl, 'flock', too_late)
    write_checkpoint(checkpoint(1), str(tmp_path / 'iter_1.pth'))
    assert read(tmp_path / 'iter_1.pth') == 1
    others[0].close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mounted = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f'mounting a small disk needs root: {mounted.stderr.strip()}')
    yield folder
    subprocess.run(['umount', str(folder)], check=True)


def test_a_full_disk_keeps_the_old_one_and_says_how_much_is_missing(small_disk: Path) -> None:
    path = small_disk / 'iter_1.pth'
    write_checkpoint(checkpoint(1, 300_000), str(path))
    for name in ('iter_2.pth', 'iter_1.pth'):  # a new one, and one that is saved again
        with pytest.raises(SaveError) as full:
            write_checkpoint(checkpoint(2, 400_000), str(small_disk / name))
        text = str(full.value)
        assert f'the checkpoint {small_disk}/{name} was not written, since the disk is full' in text
        assert 'needs 1.6 MB, and 0.9 MB are free' in text and '--resume' in text
    assert [each.name for each in small_disk.iterdir()] == ['iter_1.pth']
    assert torch.load(str(path), **_whole)['meta']['seed'] == 1
    path.unlink()
    write_checkpoint(checkpoint(2, 400_000), str(path))  # this process can still write


def test_used_up_inodes_and_a_quota_are_no_lack_of_megabytes(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(['mount', '-o', 'remount,nr_inodes=4', str(small_disk)], check=True)
    (small_disk / 'run').mkdir()
    for number in range(2):
        (small_disk / f'{number}').touch()
    for folder in (small_disk / 'run', small_disk / 'another'):  # neither a file nor a folder fits
        with pytest.raises(SaveError, match='all 4 inodes are in use in ') as full:
            write_checkpoint(checkpoint(1, 10), str(folder / 'iter_1.pth'))
        assert 'MB' not in str(full.value)
    (small_disk / '0').unlink()

    def exceed(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, 'fsync', exceed)
    with pytest.raises(SaveError, match='it needs 0.0 MB, and the quota for .* is used up') as full:
        write_checkpoint(checkpoint(1, 10), str(small_disk / 'iter_1.pth'))
    assert 'free' not in str(full.value)


def test_a_large_file_is_whole_and_its_size_is_told(tmp_path: Path) -> None:
    path = tmp_path / 'new folder' / 'iter_3.pth'
    assert write_checkpoint(checkpoint(3, 3_000_000), str(path)) == path.stat().st_size
    assert read(path) == 3
