"""A loader's worker that is killed is an error of its own, wherever the rank is then."""
from __future__ import annotations

import os
import signal
import time
from typing import Any, Callable

import pytest
from support import on_host
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage.engine.loading.loader_workers import LoaderWorkerError

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
    return KeyedLoader.adopt(DataLoader(dataset, batch_size=2, num_workers=workers, **settings),
                             lambda *_: None, lambda *_: _[-1])


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
    with pytest.raises(LoaderWorkerError, match=(
            r'a loader worker of this rank has ended: .*see `dmesg`')):
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
