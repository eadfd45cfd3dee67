"""What a loader's workers need is said, and the failure of one is an error that names it."""

from __future__ import annotations

import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
from mmengine.dataset import pseudo_collate
from support import PATIENT, ROOT, on_host, rest_is_long
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from toy_runs import log_of, toy_train

from mapsage.engine.loading import keyed_loader
from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage.engine.loading.loader_workers import BatchTransferError, LoaderWorkerError, Workers

pytestmark = on_host
DEADLINE = 60.0


class Killed(Dataset):
    """Numbers; the worker that is asked for one of them is killed.

    Args:
        at: That number; -1 for none.
    """

    def __init__(self, at: int = -1) -> None:
        self.at = at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == self.at and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def loader(dataset: Dataset, workers: int, **settings: Any) -> KeyedLoader:
    return KeyedLoader(
        DataLoader(dataset, batch_size=2, num_workers=workers, **settings),
        lambda *_: None,
        lambda *_: _[-1],
    )


def kill_in_an_item(workers: int) -> None:
    list(loader(Killed(at=40), workers))


def kill_an_idle_one(workers: int) -> None:
    iterator = iter(loader(Killed(), workers, persistent_workers=True))
    next(iterator)
    os.kill(iterator._workers[-1].pid, signal.SIGKILL)
    end = time.monotonic() + DEADLINE
    try:
        # As in a collective, which would take torch's error for its own.
        while time.monotonic() < end:
            time.sleep(0.01)
    except RuntimeError as error:
        raise AssertionError('others catch it') from error


@pytest.mark.parametrize('workers', [1, 3])
@pytest.mark.parametrize('case', [kill_in_an_item, kill_an_idle_one])
def test_a_killed_worker_is_named_as_such(case: Callable[[int], None], workers: int) -> None:
    with pytest.raises(
        LoaderWorkerError,
        match=(r'a loader worker of this rank has ended: .*\(the loader of Killed\).*see `dmesg`'),
    ):
        case(workers)


def test_a_killed_worker_is_one_error(monkeypatch: Any) -> None:
    """Its connection ends before SIGCHLD comes, which must not raise in the error's handler."""
    iterator = iter(loader(Killed(), 1))
    next(iterator)

    def connection_ends(*_: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, '_try_get_data', connection_ends)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        worker = iterator._workers[0].pid
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(LoaderWorkerError, match='a loader worker of this rank has ended'):
            iterator._try_get_data()
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        handler(signal.SIGCHLD, None)  # the signal comes now
    finally:
        signal.signal(signal.SIGCHLD, handler)


def broken_item(workers: int) -> None:
    class Broken(Killed):
        def __getitem__(self, index: int) -> int:
            raise ConnectionResetError('a file on another machine')

    list(loader(Broken(), workers))


def test_an_error_of_a_sample_stays_what_it_is() -> None:
    with pytest.raises(ConnectionResetError, match='a file on another machine'):
        broken_item(1)


@pytest.mark.parametrize(
    'settings',
    [{}, dict(persistent_workers=True), dict(collate_fn=tuple), dict(collate_fn=pseudo_collate)],
)
def test_a_batch_that_cannot_be_sent_is_an_error(settings: Dict[str, Any]) -> None:
    """torch prints a traceback in the worker's thread, and waits for the batch without end."""

    class Locks(Killed):
        def __getitem__(self, index: int) -> Any:
            return threading.Lock() if index == 9 else index

    batches = loader(Locks(), 2, **{'collate_fn': list, **settings})
    batches.samples.loader_name = 'val_dataloader'
    with pytest.raises(
        BatchTransferError,
        match=(
            r'(?s)val_dataloader: a worker cannot hand over its batch: TypeError: cannot pickle '
            r"'_thread.lock' object\. .*collate_fn"
        ),
    ):
        list(batches)


def test_an_error_that_cannot_be_sent_is_an_error() -> None:
    class LocalError(Exception):
        """Cannot be pickled, because it is a class inside of a function."""

    class Broken(Killed):
        def __getitem__(self, index: int) -> int:
            raise LocalError('no such band')

    # Workers of another test's loader may wait to be collected.
    others = set(multiprocessing.active_children())
    with pytest.raises(
        BatchTransferError,
        match=('(?s)the loader of Broken: a worker cannot hand over.*LocalError: no such band'),
    ):
        batches = iter(loader(Broken(), 1, persistent_workers=True))
        next(batches)
    # What a worker does afterwards is no second error, wherever the main thread is.
    for worker in set(multiprocessing.active_children()) - others:
        os.kill(worker.pid, signal.SIGKILL)
        # Not `join`, which leaves torch's signal handler nothing to find.
        multiprocessing.connection.wait([worker.sentinel])
        time.sleep(0.2)


# Its /dev/shm has two megabytes. A batch has three: of one image, or of many small ones.
IN_SMALL_MEMORY = """
import sys, torch
from mmengine.dataset import pseudo_collate
from torch.utils.data.dataloader import DataLoader, default_collate
from mapsage.commands import cli
from mapsage.engine.loading.keyed_loader import KeyedLoader

def collate(samples):
    if not sys.argv[1].isdigit():
        return default_collate(samples)
    return [dict(image=image, label=image[0].long()) for image in samples]

def main(argv=None):
    side = 8 * int(sys.argv[1]) if sys.argv[1].isdigit() else 512
    images = [torch.ones(3, side, side + index) for index in range(12)]
    loader = KeyedLoader(
        DataLoader(images, batch_size=1 if side == 512 else 512 ** 2 // side ** 2, num_workers=2,
                   collate_fn=pseudo_collate if sys.argv[1] == 'block' else collate,
                   persistent_workers=True), lambda *_: None,
        lambda *_: _[-1])
    loader.samples.loader_name = 'val_dataloader'
    print(len(list(loader)), 'batches')

cli.run(main)
"""
small_memory = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which('unshare'),
    reason='mount namespaces need root and util-linux',
)


@small_memory
@pytest.mark.parametrize('kind', rest_is_long(['block', '64', 'collated'], 'block'))
def test_a_full_shared_memory_ends_the_run_and_says_how_to_get_more(kind: str) -> None:
    """PyTorch of a container has 64 MB; older versions end the worker with SIGBUS."""
    ended = subprocess.run(
        [
            'unshare',
            '--mount',
            'sh',
            '-c',
            'mount -t tmpfs -o size=2m small /dev/shm; exec "$@"',
            'sh',
            sys.executable,
            '-c',
            IN_SMALL_MEMORY,
            kind,
        ],
        cwd=str(ROOT),
        timeout=PATIENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    text = ended.stdout.decode(errors='replace')
    assert ended.returncode == 1 and 'Traceback' not in text, text
    # What a second worker prints may come later: PyTorch's sentence, and a byte of 0.
    lines = [line for line in text.splitlines() if line.strip('\0') and 'bus error' not in line]
    last = lines[-1]
    assert (
        '/dev/shm (shm)' in last
        and 'it has 2.1 MB' in last
        and 'val_dataloader' in last
        and '`docker run --shm-size=' in last
        and '--ipc=host' in last
        and 'emptyDir' in last
    )


def test_no_room_for_the_semaphores_of_workers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('torch.multiprocessing.Queue', no_room)
    with pytest.raises(
        BatchTransferError,
        match=(r'the loader of Killed: its workers cannot start: .*No space.* --shm-size=8g'),
    ):
        iter(loader(Killed(), 1))


def test_the_start_says_how_much_shared_memory_the_batches_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_loader, 'free_shared_memory', lambda: 10)
    workers = dict(num_workers=2, prefetch_factor=4)
    runner, _ = toy_train(
        tmp_path,
        train_dataloader=workers,
        val_dataloader=workers,
        train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2),
    )
    warnings = [line for line in log_of(runner).splitlines() if 'were free there' in line]
    assert len(warnings) == 2
    for name, line in zip(('train_dataloader', 'val_dataloader'), warnings):
        assert f'WARNING - {name}: the batches need up to 0.0 MB in /dev/shm' in line
        assert 'x 2 workers x (prefetch_factor 4 + 1) x 1 rank(s)' in line


def test_shared_memory_counts_batches_of_all_workers_and_ranks() -> None:
    workers = Workers('train_dataloader', 4, 2, 2)
    assert workers.shared_bytes(8_000_000) == 8_000_000 * 12 * 2
    assert workers.memory_note(8_000_000, 192_000_000) is None
    note = workers.memory_note(8_000_000, 64_000_000) or ''
    assert 'up to 192.0 MB' in note and '64.0 MB were free' in note and '--shm-size=1g' in note


def test_too_many_open_files_are_said() -> None:
    text = Workers('train_dataloader', 4, 2, 2).failure('received 0 items: too many open files', 8)
    assert text.startswith('train_dataloader: a worker cannot hand over its batch: received 0')
    assert '`ulimit -n 65536`' in text


def test_the_start_says_that_workers_crowd_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0})
    runner, _ = toy_train(tmp_path, train_dataloader=dict(num_workers=5), max_iters=2)
    assert (
        'train_dataloader: num_workers=5 for each of 1 rank(s) on this machine starts 5 '
        in log_of(runner)
    )
    assert Workers('train_dataloader', 4, 2, 8).crowding_note(cores=8) is None
    note = Workers('train_dataloader', 999, 2, 8).crowding_note(cores=64) or ''
    assert 'starts 7992 processes, and 64 core(s) share' in note and '8 for each rank' in note


@pytest.mark.parametrize(
    'settings',
    [
        dict(persistent_workers=True),
        dict(prefetch_factor=4),
        dict(timeout=60),
        dict(multiprocessing_context='fork'),
    ],
)
def test_settings_of_workers_are_ignored_without_workers(
    settings: Dict[str, Any], tmp_path: Path
) -> None:
    """num_workers=0 is the usual override for debugging, and torch refuses it with these."""
    runner, record = toy_train(
        tmp_path, train_dataloader=settings, val_dataloader=settings, test_dataloader=settings
    )
    runner.test()
    assert len(record.losses) == 8 and len(record.figures) == 2
    assert log_of(runner).count(f'num_workers=0: {next(iter(settings))} of the loader') == 1


def test_virtual_ranks_ignore_settings_of_workers_too(tmp_path: Path) -> None:
    runner, record = toy_train(
        tmp_path,
        train_dataloader=dict(persistent_workers=True, prefetch_factor=3),
        env_cfg=dict(virtual_ranks=2),
    )
    assert len(record.losses) == 8
    assert 'num_workers=0: persistent_workers and prefetch_factor of the' in log_of(runner)
