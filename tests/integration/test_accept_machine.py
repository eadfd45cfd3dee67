"""The trial of a new machine: its steps pass on simulated cards, and a failure does not end it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import List, Tuple

import pytest
from support import ROOT, main_leg, no_simulated_cards, write_tiny_config
from warm_python import warm_python

reason = no_simulated_cards()


def accept(folder: Path, *steps: str, **environ: str) -> Tuple[int, str]:
    """Return the exit status and the text of the report."""
    report = folder / 'report.txt'
    done = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'accept_machine.sh'), *steps],
        cwd=folder,
        timeout=600,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        env={
            **os.environ,
            'MAPSAGE_PYTHON': warm_python(),
            'NPROC_PER_NODE': '2',
            'REPORT': 'report.txt',
            'ACCEPT_KEEP': str(folder / 'runs'),
            'ACCEPT_STEPS': '8',
            'ACCELERATOR': 'cpu',
            **environ,
        },
    )
    return done.returncode, report.read_text() if report.exists() else done.stdout


def outcomes(report: str) -> List[str]:
    """Return the summary's lines without the seconds."""
    summary = report.split('\n\n')[0].splitlines()[1:]
    return [f'{line.split()[0]} {line.split(" s  ", 1)[1]}' for line in summary]


# Only the run that is to be killed knows the variable, and waits for that.
WAITING = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='StopBeforeIteration', iteration=6, variable='ACCEPT_RUN')]
"""


@pytest.mark.long
@main_leg
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_the_steps_pass_on_simulated_cards(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, WAITING)
    status, text = accept(
        tmp_path,
        'groups',
        'resume',
        ACCELERATOR='sim',
        ACCEPT_CONFIG=str(config),
        PYTHONPATH=str(Path(__file__).parent),
        MAPSAGE_TEST_REACHED=str(tmp_path / 'reached'),
    )
    assert status == 0, text[-6000:]
    assert outcomes(text) == ['groups passed', 'resume passed']
    for words in (
        'backend cpu:gloo,gcu:eccl',
        'backend cpu:gloo,gcu:staged',
        'killing the launcher',
        'resuming from',
        'tensors are equal bit for bit',
    ):
        assert words in text, text[-6000:]
    assert 'left of the killed run' not in text


@pytest.mark.long
def test_it_goes_on_after_a_failure(tmp_path: Path) -> None:
    status, text = accept(tmp_path, 'doctor', 'machine', ACCEPT_CONFIG=str(tmp_path / 'absent.py'))
    assert status == 1
    assert outcomes(text) == ['doctor FAILED: exit status 1', 'machine passed']
    assert 'sim is' in text
    assert 'absent.py' in text.split('===== doctor')[1]


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / 'slow.py').write_text('import time\ntime.sleep(600)\n')
    status, text = accept(
        tmp_path, 'groups', ACCEPT_LIMIT='8s', ACCEPT_CONFIG=str(tmp_path / 'slow.py')
    )
    assert status == 1
    assert outcomes(text) == ['groups FAILED: not done after 8s']


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    status, text = accept(tmp_path, 'doktor')
    assert status == 2 and "unknown step 'doktor'" in text
