"""A record of reports in a rendezvous store, with a thread for each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Dict, List

import pytest
import torch.distributed as dist

from mapsage.distributed import lost_ranks
from mapsage.distributed import store as store_module
from mapsage.distributed.lost_ranks import Finding, Record, Report
from mapsage.distributed.store import LockedStore


@pytest.mark.parametrize('size, absent', [(2, [1]), (5, [0, 3]), (16, [7])])
def test_those_who_do_not_report_are_found_by_all_at_a_constant_cost(
    size: int, absent: List[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_ranks, 'QUIET_SECONDS', 1.5)
    shared = (
        dist.HashStore()
        if hasattr(dist, 'HashStore')
        else dist.TCPStore('127.0.0.1', 0, 1, True, timedelta(seconds=60))
    )
    stores = {rank: LockedStore(shared) for rank in range(size) if rank not in absent}
    found: Dict[int, List[int]] = {}

    together = threading.Barrier(len(stores))

    def report(rank: int) -> None:
        together.wait(60)
        record = Record(stores[rank], 'broken/3', rank, range(size))
        record.file(Report())
        finding = record.settle(
            lambda reports: Finding([other for other in range(size) if other not in reports], {})
        )
        found[rank] = finding.ranks if finding else []

    threads = [threading.Thread(target=report, args=(rank,)) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(stores, absent)
    assert sum(store.requests for store in stores.values()) < 20 * size


class SlowStore(LockedStore):
    """Answers as a store on a busy machine does."""

    def add(self, key: str, more: int) -> int:
        time.sleep(0.2)
        return super().add(key, more)


@pytest.mark.skipif(not hasattr(dist, 'HashStore'), reason='this torch has no store in memory')
def test_a_late_report_on_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, 'QUIET_SECONDS', 0.5)
    shared = dist.HashStore()
    late = threading.Timer(1, Record(LockedStore(shared), 'broken', 1, range(2)).file, [Report()])
    late.start()
    Record(SlowStore(shared), 'broken', 0, range(2)).wait(1)
    reports = shared.add('broken/reports', 0)
    late.join()
    assert reports == 1


KEEPER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore('127.0.0.1', 0, 1, True, timedelta(seconds=60))
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_keeper_that_is_stopped_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = subprocess.Popen(
        [sys.executable, '-c', KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert keeper.stdout is not None
        store = LockedStore(
            dist.TCPStore(
                '127.0.0.1', int(keeper.stdout.readline()), 1, False, timedelta(seconds=60)
            )
        )
        assert store.add('count', 2) == 2
        monkeypatch.setattr(store_module, '_ANSWER_SECONDS', 0.3)
        os.kill(keeper.pid, signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)  # until it has stopped
        with pytest.raises(RuntimeError, match='no answer from the rendezvous store in 0.3 s'):
            store.add('count', 1)
        stuck = list(store_module._stuck.values())[-1]
        monkeypatch.setattr(store_module, '_ANSWER_SECONDS', 60.0)
        for _ in range(20):  # only the first has waited
            with pytest.raises(RuntimeError, match='no answer from the rendezvous store in 60 s'):
                store.add('count', 1)
        assert list(store_module._stuck.values())[-1] is stuck and stuck.is_alive()
        os.kill(keeper.pid, signal.SIGCONT)
        stuck.join(60)
        assert store.add('count', 0) == 3  # the late answer is nobody else's
    finally:
        keeper.kill()
        keeper.communicate()
