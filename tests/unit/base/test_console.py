"""Names of files and classes act on no terminal, whichever way they are printed."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable

import pytest
from mmengine.logging.logger import MMFormatter

from mapsage.base.console import accept_any_text, printable, raw_stream
from mapsage.distributed.launcher_notes import note_for_launcher
from mapsage_launcher.command import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
NAME = 'a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb.tif'
SHOWN = r'a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb.tif'


def capture(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what stdout and stderr write; not a fixture, since pytest sets them before a test."""
    stream = io.StringIO()
    for name in ('stdout', 'stderr'):
        monkeypatch.setattr(sys, name, stream)
    accept_any_text()
    accept_any_text()
    assert raw_stream(sys.stdout) is stream
    return stream


def log(text: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(MMFormatter(color=False))
    handler.handle(logging.makeLogRecord(dict(levelno=logging.INFO, msg='%s', args=(text,))))


def log_error(text: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(MMFormatter(color=False))
    try:
        raise ValueError(text)
    except ValueError:
        handler.handle(logging.makeLogRecord(dict(msg='', exc_info=sys.exc_info())))


@pytest.mark.parametrize(
    'write',
    [
        print,
        lambda text: print(text, file=sys.stderr),
        log,
        log_error,
        lambda text: sys.stdout.writelines([text]),
        lambda text: warnings.warn(text, stacklevel=1),
        lambda text: sys.excepthook(ValueError, ValueError(text), None),
    ],
    ids=['print', 'stderr', 'log', 'log of an error', 'lines', 'warning', 'traceback'],
)
def test_control_characters_are_escaped(
    write: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = capture(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = lambda *args, **_: sys.stderr.write(str(args[0]))
        write(NAME)
    assert SHOWN in output.getvalue()
    assert printable(output.getvalue()) == output.getvalue()


def test_other_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    output = capture(monkeypatch)
    text = 'Wälder 森林 🌲\t\u200d\u0301 \\x1b\n'
    print(text, end='')
    print('\r3 of 4', end='')
    assert output.getvalue() == f'{text}\r3 of 4'
    assert sys.stdout.encoding == output.encoding and not sys.stdout.isatty()


def test_the_colors_of_a_log_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    output = capture(monkeypatch)
    formatter = MMFormatter()
    formatter.info_format = '\x1b[32mINFO\x1b[0m - %(message)s'
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    handler.handle(logging.makeLogRecord(dict(levelno=logging.INFO, msg=NAME)))
    assert SHOWN in output.getvalue() and '\x1b[0m' in output.getvalue()
    assert '\x1b]' not in output.getvalue()


def test_the_launcher_gets_printable_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MAPSAGE_ERROR_NOTES', str(tmp_path))
    note_for_launcher(f'{NAME} is damaged')
    assert [path.read_text() for path in tmp_path.iterdir()] == [f'{SHOWN} is damaged']


def test_every_program_prints_this_way() -> None:
    modules = {row.module for row in COMMANDS.values()} - {'mapsage_launcher.nodes.rendezvous'}
    for name in modules:
        text = inspect.getsource(importlib.import_module(name))
        assert 'accept_any_text()' in text or 'cli.run(' in text, name


@pytest.mark.long
def test_a_program_that_names_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'II*\0broken')
    result = subprocess.run(
        [sys.executable, str(ROOT / 'tools/geotiff_statistics.py'), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=str(ROOT),
        check=False,
    )
    output = result.stdout.decode(errors='surrogateescape')
    assert result.returncode != 0 and r'a\x1b]0;owned' in output
    assert '\x1b' not in output and '\x07' not in output
