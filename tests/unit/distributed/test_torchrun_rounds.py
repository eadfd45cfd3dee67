"""Which rounds of torchrun are those of a job that machines may join, and what is said where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, List

import pytest

from mapsage.distributed import torchrun_rounds
from mapsage.engine import startup

C10D = ['--rdzv_backend=c10d', '--rdzv_endpoint=127.0.0.1:1', '--rdzv_id=x', 'train.py']


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a process with torchrun's command line this one's parent."""
    processes = []

    def start(options: List[str]) -> None:
        command = [sys.executable, '-c', 'print(flush=True); input()', 'torchrun', *options]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(subprocess.Popen(command, **pipes))
        # Its command line is there.
        processes[-1].stdout.readline()
        monkeypatch.setattr(os, 'getppid', lambda: processes[-1].pid)

    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setattr(torchrun_rounds, '_SECONDS', 1)
    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_rendezvous_store_that_does_not_answer_is_said_at_once(agent: Any, capfd: Any) -> None:
    agent(['--nnodes=1:2', *C10D])
    startup._help_machines_to_join()
    text = capfd.readouterr().err
    assert 'the rendezvous store of torchrun does not answer' in text
    assert 'set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines' in text


@pytest.mark.parametrize('options', [['--nnodes=2', *C10D], ['--standalone', 'train.py']])
def test_no_store_is_asked_where_no_machine_joins(agent: Any, options: List[str]) -> None:
    agent(options)
    assert torchrun_rounds.current_round() is None
