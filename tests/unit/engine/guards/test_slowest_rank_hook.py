"""What SlowestRankHook counts as a rank's own time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mapsage.engine.guards import slowest_rank_hook
from mapsage.engine.guards.slowest_rank_hook import SlowestRankHook


class Logger:
    def __init__(self) -> None:
        self.lines: Any = []

    def info(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize('lazy', [False, True])
def test_validation_is_no_waiting_and_a_lazy_device_is_not_synchronized(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synchronized = [100.0], []
    monkeypatch.setattr(slowest_rank_hook, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(
        slowest_rank_hook,
        'current_accelerator',
        lambda: SimpleNamespace(lazy=lazy, synchronize=lambda: synchronized.append(now[0])),
    )
    runner = SimpleNamespace(distributed=True, model=nn.Identity(), logger=Logger(), iter=0)
    hook = SlowestRankHook(interval=1)
    hook.before_train(runner)
    for before in (hook.after_val, hook.before_train_epoch):
        now[0] += 50.0
        before(runner)
    now[0] += 2.0  # waiting for data
    hook.before_train_iter(runner, 0)
    runner.model(1)
    hook.after_train_iter(runner, 0)
    assert hook.every_n_train_iters(runner, 1)
    assert ' 2.000 s a step waiting for data' in runner.logger.lines[0]
    assert ('forward' in runner.logger.lines[0]) == (not lazy) == bool(synchronized)
