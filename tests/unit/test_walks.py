"""The walks of docs/explanation/how-it-works.md open as many files as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support import ROOT, main_leg

PAGE = ROOT / 'docs' / 'explanation' / 'how-it-works.md'


def section() -> str:
    """Return the text of the page about the walks."""
    return PAGE.read_text().split('## Three walks through the code')[1].split('\n## ')[0]


@main_leg
@pytest.mark.parametrize('number, name', enumerate(('predict', 'start', 'step')))
@pytest.mark.long
def test_a_walk_opens_no_more_files_than_the_page_says(number: int, name: str) -> None:
    stated = [int(count) for count in re.findall(r'\*\*(\d+) files\*\*', section())]
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'walks.py'), name],
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [line for line in done.stdout.splitlines() if re.match(r'mapsage\S*\.py$', line)]
    # A page that allows more than there are would not notice the next file.
    assert stated[number] - 2 <= len(files) <= stated[number], files


def test_the_files_that_the_walks_name_are_there() -> None:
    paths = {path.relative_to(ROOT).as_posix() for path in ROOT.glob('mapsage*/**/*.py')}
    named = re.findall(r'`([\w./]+\.py)`', section())
    assert len(named) > 20
    missing = [
        name
        for name in named
        if not (ROOT / name).is_file() and not any(path.endswith(f'/{name}') for path in paths)
    ]
    assert missing == []
