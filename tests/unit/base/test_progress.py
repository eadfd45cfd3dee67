"""Progress of a prediction: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest
from fake_terminal import BAR, FakeTerminal

from mapsage.base import progress
from mapsage.base.console import accept_any_text
from mapsage.base.progress import ProgressLine


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[float]]:
    """Yield a list with the time that the bar reads."""
    now = [0.0]
    monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
    yield now


def predict(seconds: List[float], step_seconds: float, shown: bool = True) -> List[str]:
    """Count 10 windows in steps of 2, with one print between them; return the printed lines."""
    lines: List[str] = []
    with ProgressLine(10, 'predicting', lines.append, shown) as line:
        for step in range(5):
            seconds[0] += step_seconds
            line.advance(2)
            if step == 2:
                print('written by the model')
    return lines


def terminal_text(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: List[float],
    kind: str = 'xterm',
    shown: bool = True,
) -> Tuple[str, List[str]]:
    terminal = FakeTerminal(folder / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', kind)
    lines = predict(seconds, 1.0, shown)
    assert sys.stdout is terminal
    return terminal.text(), lines


def test_a_terminal_shows_a_bar_and_keeps_its_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: List[float]
) -> None:
    text, lines = terminal_text(tmp_path, monkeypatch, seconds)
    assert re.search(f'predicting [^\r\n]*{BAR}[^\r\n]* 4/10 2.0 windows/s  eta 0:00:03', text)
    assert re.search(f'[\r\n][^\r\n{BAR}]*written by the model', text)
    assert '10/10' in text[text.rindex('predicting') :]
    assert '\x1b[?25l' not in text
    assert lines == []


def test_a_terminal_that_cannot_redraw_gets_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: List[float]
) -> None:
    text, lines = terminal_text(tmp_path, monkeypatch, seconds, kind='dumb')
    assert BAR not in text
    assert lines == ['predicting: 10/10 windows  2.0 windows/s  eta 0:00:00']


def test_without_a_terminal_a_line_comes_every_few_seconds(
    capsys: pytest.CaptureFixture, seconds: List[float]
) -> None:
    assert predict(seconds, 2.0) == [
        'predicting: 6/10 windows  1.0 windows/s  eta 0:00:04',
        'predicting: 10/10 windows  1.0 windows/s  eta 0:00:00',
    ]
    assert capsys.readouterr().out == 'written by the model\n'


def test_ranks_that_do_not_print_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: List[float]
) -> None:
    text, lines = terminal_text(tmp_path, monkeypatch, seconds, shown=False)
    assert (text, lines) == ('written by the model\n', [])


def test_names_beside_a_bar_do_not_act_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: List[float]
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    accept_any_text()
    with ProgressLine(10, 'scene\x1b]0;owned\x07', print) as line:
        seconds[0] += 1
        line.advance(2)
        print('written\x1b]0;owned\x07')
        line.advance(8)
    print('after\x1b[2J')
    text = terminal.text()
    assert re.search(rf'scene\\x1b\]0;owned\\x07 [^\r\n]*{BAR}', text)
    assert r'written\x1b]0;owned\x07' in text and r'after\x1b[2J' in text
    # Rich's own sequences have arrived: it draws again in the same line.
    assert '\x1b[2K' in text and '\x1b]' not in text and '\x1b[2J' not in text
