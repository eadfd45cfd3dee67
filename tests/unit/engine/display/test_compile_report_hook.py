"""What the log says about graphs, graph breaks and recompilations."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from support import main_leg

from mapsage.engine.display.compile_report_hook import CompileCounter, CompileReportHook


class Lines(logging.Handler):
    """Keeps the lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f'{record.levelname} {record.getMessage()}')


@pytest.fixture
def runner() -> Any:
    logger, lines = logging.Logger('compile', logging.INFO), Lines()
    logger.addHandler(lines)
    return SimpleNamespace(logger=logger, lines=lines.lines)


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    return x * float(x.sum())  # which Python reads: a graph break


@main_leg
def test_it_says_the_counts_once_they_stay_and_when_they_grow(runner: Any) -> None:
    hook = CompileReportHook('parts')
    step = torch.compile(broken, backend='eager', dynamic=False)
    for _ in range(4):
        step(torch.ones(2))
        hook.after_train_iter(runner, 0)
    (line,) = runner.lines
    assert line.startswith(
        'INFO compile: parts: 2 graphs, 1 graph break, 0 recompilations after '
        '3 steps. Graph breaks: '
    ), line
    for length in range(3, 26):
        step(torch.ones(length if length < 6 else 5))
        hook.after_train_iter(runner, 0)
    grown = runner.lines[1]
    assert len(runner.lines) == 2 and grown.startswith('WARNING compile: parts: 8 graphs, ')
    assert 'recompilations after ' in grown and ', before: 2 graphs, 1 graph break, 0 ' in grown
    assert 'TORCH_LOGS=recompiles' in grown
    hook.after_run(runner)
    hook.after_run(runner)  # of the test behind the training
    assert len(runner.lines) == 3 and ' in the whole training' in runner.lines[2]


def test_a_torch_that_counts_nothing(runner: Any, monkeypatch: Any) -> None:
    # The import of a module that is None raises ImportError.
    for name in ('torch._dynamo.utils', 'torch._dynamo.callback'):
        monkeypatch.setitem(sys.modules, name, None)
    hook = CompileReportHook('train_step')
    for _ in range(30):
        hook.after_train_iter(runner, 0)
    hook.after_run(runner)
    assert runner.lines == ['INFO compile: train_step; this torch does not count what it does']
    assert not CompileCounter().works
