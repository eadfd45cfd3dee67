"""Encoders that hang behind the end of a training are ended, and nobody else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, List

import pytest

from mapsage_launcher.ranks.leftover_encoders import (
    EncoderWatch,
    left_over,
    note_encoder,
    note_finished,
)

SLEEP = [sys.executable, '-c', 'import time; time.sleep(600)']


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(SLEEP)
    (tmp_path / 'encoders').mkdir()
    (tmp_path / 'finished').mkdir()
    (tmp_path / 'encoders' / f'0-{process.pid}').touch()
    yield process
    process.kill()
    process.wait()


def watch_for(seconds: float, folder: Path, ranks: int) -> List[int]:
    watch = EncoderWatch(folder, ranks, patience=1.0)
    deadline = time.monotonic() + seconds
    while not watch.ended and time.monotonic() < deadline:
        time.sleep(0.1)
    watch.stop()
    return watch.ended


def test_a_leftover_encoder_is_ended(encoder: subprocess.Popen, tmp_path: Path) -> None:
    for head in (1, 2):
        (tmp_path / 'finished' / f'0-{10**7 + head}').touch()
    assert watch_for(60, tmp_path, ranks=3) == [encoder.pid]
    assert encoder.wait(60) == -9


@pytest.mark.parametrize(
    'finished, ranks',
    [
        ([10**7 + 1], 3),  # one of two heads
        ([], 1),  # no heads on this machine
    ],
)
def test_an_encoder_with_heads_is_left_alone(
    finished: List[int], ranks: int, encoder: subprocess.Popen, tmp_path: Path
) -> None:
    for head in finished:
        (tmp_path / 'finished' / f'0-{head}').touch()
    assert watch_for(4, tmp_path, ranks) == []
    assert encoder.poll() is None


def test_an_encoder_that_has_finished_is_left_alone(
    encoder: subprocess.Popen, tmp_path: Path
) -> None:
    for process in (encoder.pid, 10**7 + 1):
        (tmp_path / 'finished' / f'0-{process}').touch()
    assert watch_for(3, tmp_path, ranks=2) == [] and encoder.poll() is None


@pytest.mark.parametrize(
    'finished, is_left',
    [
        (['1-10000003'], False),  # one of two heads, none of the first start
        (['0-10000001', '0-10000002'], False),  # behind them, the encoder of the first start failed
        (['1-10000003', '1-10000004'], True),
    ],
)
def test_ranks_that_were_started_again_are_counted_anew(
    finished: List[str], is_left: bool, encoder: subprocess.Popen, tmp_path: Path
) -> None:
    (tmp_path / 'encoders' / f'0-{encoder.pid}').rename(tmp_path / 'encoders' / f'1-{encoder.pid}')
    (tmp_path / 'encoders' / '0-10000000').touch()
    for note in finished:
        (tmp_path / 'finished' / note).touch()
    assert left_over(tmp_path, 3) == [encoder.pid] * is_left


def test_a_process_that_has_died_is_no_encoder(encoder: subprocess.Popen, tmp_path: Path) -> None:
    for note in ('encoders/0-10000000', 'finished/0-10000001'):
        (tmp_path / note).touch()
    assert left_over(tmp_path, 3) == []
    assert left_over(tmp_path, 2) == [encoder.pid]


def test_notes_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('MAPSAGE_ERROR_NOTES', raising=False)
    monkeypatch.delenv('TORCHELASTIC_RESTART_COUNT', raising=False)
    note_encoder()
    monkeypatch.setenv('MAPSAGE_ERROR_NOTES', str(tmp_path / 'gone'))
    note_finished()
    monkeypatch.setenv('MAPSAGE_ERROR_NOTES', str(tmp_path))
    note_encoder()
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '2')
    note_finished()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob('*/*')) == [
        f'encoders/0-{os.getpid()}',
        f'finished/2-{os.getpid()}',
    ]
