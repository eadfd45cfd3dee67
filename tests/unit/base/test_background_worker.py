"""A thread that makes calls one after the other."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import List

import pytest
from warm_python import warm_python

from mapsage.base.process import BackgroundWorker


def _threads(name: str) -> List[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_calls_are_made_in_order_in_one_thread() -> None:
    worker, made = BackgroundWorker('in-order'), []

    def note(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return -number

    futures = [worker.submit(note, number) for number in range(20)]
    assert [future.result(60) for future in futures] == [-number for number in range(20)]
    assert made == [(number, 'in-order') for number in range(20)]
    worker.close()
    assert not _threads('in-order')


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    worker = BackgroundWorker('fails')
    failed, good = worker.submit(int, 'tile'), worker.submit(int, '7')
    assert good.result(60) == 7
    with pytest.raises(ValueError, match='tile'):
        failed.result(60)
    worker.close()


def test_the_thread_is_prepared_once_and_again_after_an_error() -> None:
    attempts = []

    def prepare() -> None:
        attempts.append(threading.current_thread().name)
        if len(attempts) == 1:
            raise RuntimeError('no device')

    worker = BackgroundWorker('prepared', prepare)
    with pytest.raises(RuntimeError, match='no device'):
        worker.submit(int).result(60)
    assert [worker.submit(int).result(60), worker.submit(int).result(60)] == [0, 0]
    assert attempts == ['prepared'] * 2
    worker.close()


def test_close_drops_what_waits_and_ends_within_its_timeout() -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return release.wait(60)

    worker = BackgroundWorker('hangs')
    current, waiting = worker.submit(hang), worker.submit(pytest.fail)
    assert begun.wait(60)
    (thread,) = _threads('hangs')
    worker.close(timeout=0.01)
    assert thread.is_alive() and waiting.cancelled()
    with pytest.raises(CancelledError):
        waiting.result(60)
    release.set()
    thread.join(60)
    assert not thread.is_alive() and current.result(60)


def test_it_starts_again_after_it_was_closed() -> None:
    worker = BackgroundWorker('again')
    worker.close()
    for _ in range(2):
        assert worker.submit(int, '3').result(60) == 3
        worker.close()
    assert not _threads('again')


def test_a_call_that_hangs_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    program = tmp_path / 'hang.py'
    program.write_text("""
import threading
from mapsage.base.process import BackgroundWorker
begun = threading.Event()
BackgroundWorker('x').submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
""")
    root = Path(__file__).parents[2]
    assert (
        subprocess.run(
            [warm_python(), str(program)],
            timeout=120,
            check=False,
            env=dict(os.environ, PYTHONPATH=str(root)),
        ).returncode
        == 0
    )
