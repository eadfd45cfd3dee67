"""Claims of workers: one owner at a time, leases by the file server's clock, bad files."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Optional

import pytest

from mapsage.base import folder_claims
from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.maps import ledger, sharing
from mapsage.maps.errors import PredictError
from mapsage.maps.ledger import LapsedError, Worker

NOBODY = 65534


def age(path: Path, seconds: float) -> None:
    """Make a file look as if it was changed so many seconds ago, by the file server's clock."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def file_of(worker: Worker) -> Path:
    return worker._path


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let every look at the machine's name give another one: no two workers share a kernel."""
    names = iter(range(10**6))
    monkeypatch.setattr(ledger, '_machine', lambda: f'machine {next(names)}')


def test_one_of_many_threads_gets_a_claim(tmp_path: Path) -> None:
    workers = [Worker(tmp_path).__enter__() for _ in range(8)]
    for name in map(str, range(20)):
        claims: List[Optional[Path]] = []

        def claim(worker: Worker, name: str = name, claims: Any = claims) -> None:
            claims.append(worker.claim(tmp_path / 'a', name))

        threads = [threading.Thread(target=claim, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(claim is not None for claim in claims) == 1
    for worker in workers:
        worker.close()
    assert not (tmp_path / '.ledger').exists()


def test_the_lock_of_a_dead_worker_is_free_at_once(tmp_path: Path) -> None:
    with Worker(tmp_path) as alive, Worker(tmp_path) as dead:
        assert dead.claim(tmp_path / 'a', 'run') is not None
        age(file_of(dead), 3600)
        assert alive.claim(tmp_path / 'a', 'run') is None
        dead._file.close()  # as the kernel does at its end
        assert alive.claim(tmp_path / 'a', 'run') == tmp_path / 'a/run.1'
        assert dead.claim(tmp_path / 'a', 'run') is None


def test_between_machines_the_lease_decides(
    tmp_path: Path, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock of this machine is an hour late; it is never asked.
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() - 3600)
    with Worker(tmp_path) as here, Worker(tmp_path) as there:
        assert there.claim(tmp_path / 'a', 'run') is not None
        there._file.close()
        moment = os.stat(file_of(here)).st_mtime
        assert here.claim(tmp_path / 'a', 'run') is None
        # A look writes nothing: there may be thousands of claims.
        assert os.stat(file_of(here)).st_mtime == moment
        monkeypatch.undo()
        monkeypatch.setattr(ledger, '_machine', lambda: 'a third machine')
        age(file_of(there), ledger.LEASE_SECONDS + 1)
        assert here.claim(tmp_path / 'a', 'run') is not None


def test_a_worker_that_slept_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(tmp_path) as worker:
        claim = worker.claim(tmp_path / 'a', 'run')
        assert claim is not None
        worker.check()
        later = ledger._seconds() + 10**4
        monkeypatch.setattr(ledger, '_seconds', lambda: later)
        with pytest.raises(LapsedError):
            worker.check()
        # What it may have lost is not given back either.
        worker.release(claim)
        assert claim.exists()
        name = file_of(worker).name
        worker.restart()
        assert file_of(worker).name != name
        assert worker.claim(tmp_path / 'a', 'run') == tmp_path / 'a/run.1'


def test_a_worker_whose_file_is_gone_has_lapsed(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        file_of(worker).unlink()
        worker._renew()
        assert worker.has_lapsed()


@pytest.mark.parametrize('content', ['', 'worker-12', '../../etc/passwd', '\0', 'x' * 10**5])
def test_a_claim_cut_in_half_lapses_with_its_lease(tmp_path: Path, content: str) -> None:
    (tmp_path / 'run.0').write_text(content)
    with Worker(tmp_path) as worker:
        assert worker.claim(tmp_path, 'run') is None
        age(tmp_path / 'run.0', ledger.LEASE_SECONDS + 1)
        assert worker.claim(tmp_path, 'run') == tmp_path / 'run.1'


@pytest.mark.parametrize('content', ['', '[]', '{"machine": 3}', '{"windows": "many"}', '\udcff'])
def test_a_broken_file_of_a_worker(tmp_path: Path, content: str) -> None:
    (tmp_path / '.ledger').mkdir()
    path = tmp_path / '.ledger/worker-0123abcd.0.0123abcd'
    path.write_text(content, errors='surrogateescape')
    with Worker(tmp_path) as worker:
        assert worker.plans() == {} and path.exists()
        age(path, ledger.LEASE_SECONDS + 1)
        assert worker.plans() == {} and not path.exists()


def test_plans_of_the_living(tmp_path: Path) -> None:
    plan = dict(names=['a'], settings={}, decisions={}, run_length=1, scenes=[])
    with Worker(tmp_path) as worker:
        with Worker(tmp_path) as first:
            first.publish(plan)
            assert list(worker.plans().values()) == [plan]
            # Of a version that writes otherwise.
            first.publish({'plan': 1})
            with pytest.raises(PredictError, match='may run another version'):
                sharing.shared_plan(worker.plans(), ['a'], {}, {}, False)
        assert worker.plans() == {}


def test_jobs_that_end_at_once_leave_nothing_of_a_dead_one(tmp_path: Path) -> None:
    with Worker(tmp_path) as first, Worker(tmp_path) as second:
        (tmp_path / '.ledger/start.0').write_text('worker-0123abcd.0.0123abcd')
        (tmp_path / '.ledger/plan-0123abcd.json').write_text('{}')
        for worker in (first, second):
            with worker.exclusive(print):
                assert not worker.leave()
    assert list(tmp_path.iterdir()) == []


def test_processes_without_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version, and mapsage classify, claim the names of their maps."""
    monkeypatch.setattr(folder_claims, '_PATIENCE', 0.0)
    with claimed(tmp_path, ['a.tif'], 'Stop it.'):
        with pytest.raises(PredictError, match='in use: process .* writes a.tif. Wait for its end'):
            Worker(tmp_path, ['a', 'b']).__enter__()
        assert not (tmp_path / '.ledger').exists()
        with Worker(tmp_path, ['b']):
            pass
    with Worker(tmp_path, ['a']), Worker(tmp_path, ['a']):
        with pytest.raises(FolderClaimedError, match='writes a.tif'):
            with claimed(tmp_path, ['a.tif'], 'Stop it.'):
                pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'names, settings, required, overwrite, message',
    [
        (['b'], {'window': 64}, {}, False, None),
        (['a'], {'window': 32}, {}, False, None),
        (['a'], {'window': 32}, {'batch_size': 4}, False, 'batch_size 4 here and 2 there.*job X'),
        (['a'], {'window': 64}, {}, False, 'window 64 here and 32 there'),
        (['a'], {'window': 32}, {}, True, '--overwrite makes maps again.*job X makes a'),
    ],
)
def test_what_jobs_must_have_in_common(
    names: List[str], settings: Any, required: Any, overwrite: bool, message: Optional[str]
) -> None:
    plan = dict(
        names=['a'], settings={'window': 32}, decisions={'batch_size': 2}, run_length=3, scenes=[]
    )
    if message is None:
        shared = sharing.shared_plan({'job X': plan}, names, settings, required, overwrite)
        decided = dict(decisions={'batch_size': 2}, run_length=3, scenes={})
        assert shared == ({} if names == ['b'] else decided)
        return
    with pytest.raises(PredictError, match=message):
        sharing.shared_plan({'job X': plan}, names, settings, required, overwrite)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / '.ledger').write_text('a file')
    with pytest.raises(PredictError, match='cannot write'), Worker(tmp_path):
        pass


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder of the group of NOBODY that every user reaches; the umask is restored."""
    if os.geteuid():
        pytest.skip('only root can be two users')
    before = os.umask(0)
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name) / 'out'
        folder.mkdir()
        os.chown(folder, 0, NOBODY)
        folder.chmod(0o2775)
        yield folder
    os.umask(before)


@contextmanager
def another_user() -> Iterator[None]:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_two_users_of_a_group(shared_folder: Path) -> None:
    os.umask(0o002)
    with Worker(shared_folder) as first:
        claim = first.claim(shared_folder / 'a', 'run')
        assert claim is not None
        with another_user(), Worker(shared_folder) as second:
            assert second.claim(shared_folder / 'a', 'run') is None
            assert second.claim(shared_folder / 'a', 'other') is not None
        claim.chmod(0o600)
        with another_user(), Worker(shared_folder) as second:
            with pytest.raises(PredictError, match='run.0 cannot be read.*set umask 002'):
                second.claim(shared_folder / 'a', 'run')


def test_a_folder_that_another_user_keeps(shared_folder: Path) -> None:
    os.umask(0o077)
    with Worker(shared_folder):
        with another_user(), pytest.raises(PredictError, match='cannot write .*Permission'):
            Worker(shared_folder).__enter__()
    shared_folder.chmod(0o555)
    with another_user(), pytest.raises(PredictError, match='cannot write .*Permission'):
        Worker(shared_folder).__enter__()


@pytest.mark.parametrize(
    'shard, environ, expected',
    [
        (None, {}, (0, 1)),
        ('2/8', {'SLURM_ARRAY_TASK_ID': 'x'}, (2, 8)),
        (
            None,
            {
                'SLURM_ARRAY_TASK_ID': '7',
                'SLURM_ARRAY_TASK_COUNT': '4',
                'SLURM_ARRAY_TASK_MIN': '5',
            },
            (2, 4),
        ),
        (
            None,
            {
                'SLURM_ARRAY_TASK_ID': '9',
                'SLURM_ARRAY_TASK_COUNT': '1',
                'SLURM_ARRAY_TASK_MIN': '9',
            },
            (0, 1),
        ),
        (None, {'JOB_COMPLETION_INDEX': '0'}, (0, 1000)),
        (None, {'JOB_COMPLETION_INDEX': '1'}, (618, 1000)),
        ('8/8', {}, 'expected 0 to 7'),
        ('1', {}, 'expected I/N'),
        (None, {'SLURM_ARRAY_TASK_ID': 'one'}, 'SLURM_ARRAY_TASK_ID=one'),
        (None, {'JOB_COMPLETION_INDEX': '-1'}, 'JOB_COMPLETION_INDEX=-1: expected I/N'),
    ],
)
def test_where_a_job_begins(shard: Optional[str], environ: Any, expected: Any) -> None:
    from mapsage.commands.predict import shard_of

    if isinstance(expected, tuple):
        assert shard_of(shard, environ) == expected
        return
    with pytest.raises(PredictError, match=expected):
        shard_of(shard, environ)
