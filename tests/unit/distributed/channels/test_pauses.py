"""Pauses of a process are noticed by a thread that runs regularly, and count for a while."""

from __future__ import annotations

import time

import pytest

from mapsage.distributed.channels import pauses
from mapsage.distributed.channels.pauses import Pauses, is_late


def test_a_pause_is_recorded_when_the_thread_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, '_SHORTEST_SECONDS', 0.2)
    record = Pauses()
    record.tick()
    assert record.longest(60) == 0.0
    time.sleep(0.3)
    # The pause that is still open counts too.
    assert record.longest(60) >= 0.3
    record.tick()
    assert record.longest(60) >= 0.3
    time.sleep(0.05)
    assert record.longest(0.01) == 0.0


@pytest.mark.parametrize(
    'paused, waited, late',
    [(0.0, 0.0, False), (5.0, 10.0, True), (4.9, 10.0, False), (3.0, 0.0, True)],
)
def test_a_pause_of_half_the_wait_may_be_its_cause(
    paused: float, waited: float, late: bool
) -> None:
    assert is_late(paused, waited) is late
