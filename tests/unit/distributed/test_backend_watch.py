"""Which process groups are watched, and what a roll call reads off them.

tests/cuda/test_hung_ranks.py has ranks that hang next to ranks that wait in NCCL.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist

from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.accelerator.cuda import CudaAccelerator
from mapsage.distributed import backend_watch
from mapsage.distributed.backend_watch import (
    BackendLane,
    MainThread,
    _groups,
    watch_backends,
)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """The default group of one rank, over gloo."""
    dist.init_process_group(
        'gloo', store=dist.FileStore(str(tmp_path / 'store'), 1), rank=0, world_size=1
    )
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def watchers() -> int:
    return sum(thread.name == 'mapsage backend watch' for thread in threading.enumerate())


def test_host_tensors_are_not_watched(group: Any) -> None:
    watch_backends(CpuAccelerator(), 30)
    assert watchers() == 0


def test_a_backend_that_cannot_be_asked_is_not_watched(group: Any) -> None:
    watch_backends(CudaAccelerator(), 30)
    assert watchers() == 0
    # torch 1.10 keeps no list of its groups.
    if hasattr(dist.distributed_c10d, '_world'):
        assert [group.error for group in _groups('cuda')] == ['SILENT']


@pytest.mark.skipif(
    not hasattr(getattr(torch._C._distributed_c10d, 'Backend', None), 'get_error'),
    reason='the gloo group of this PyTorch does not say whether it has failed (2.14 does)',
)
def test_groups_that_are_made_later_are_found_and_their_collectives_counted(group: Any) -> None:
    before = {found.name for found in _groups('cpu')}
    later = dist.new_group([0])
    found = {found.name: found for found in _groups('cpu')}
    name = dist.distributed_c10d._pg_names[later]
    assert name in set(found) - before
    assert found[name].error == 'SUCCESS' and found[name].ranks == [0]
    lane = BackendLane('lane', [0], name, 'cpu')
    assert (lane.entered, lane.inside) == (0, False)
    for count in (1, 2):
        dist.all_reduce(torch.ones(2), group=later)
        assert lane.entered == count


def test_only_a_wait_of_the_main_thread_is_still() -> None:
    main_thread, seconds = MainThread(), []

    def look() -> None:
        for _ in range(4):
            time.sleep(0.1)
            seconds.append(main_thread.still_seconds())
        gate.set_result(None)

    gate: torch.futures.Future[None] = torch.futures.Future()
    watcher = threading.Thread(target=look)
    watcher.start()
    gate.wait()
    watcher.join()
    assert seconds[-1] > seconds[1] > 0
    # Time in which the process was stopped counts as two looks at most.
    main_thread._last_look -= 600
    watcher = threading.Thread(target=lambda: seconds.append(main_thread.still_seconds()))
    watcher.start()
    watcher.join()
    assert seconds[-1] < 5


def test_a_silent_backend_is_watched_although_it_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    class Silent(CpuAccelerator):
        device_type = 'gcu'
        silent_backend = True

    class Backend:
        def get_error(self) -> None:
            raise RuntimeError('Backend eccl does not support getError')

    silent = backend_watch._Group('0', [0], Backend(), backend_watch._error(Backend()))
    assert silent.error == 'SILENT'
    monkeypatch.setattr(backend_watch, '_groups', lambda device_type: iter([silent]))
    monkeypatch.setattr(backend_watch, '_watch', lambda *_: None)
    monkeypatch.setattr(backend_watch, '_watched', set())
    watch_backends(Silent(), 30)
    assert backend_watch._watched == {'gcu'}
