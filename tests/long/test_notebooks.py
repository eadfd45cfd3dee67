"""The notebooks of docs/tutorials run from first cell to last, with shorter trainings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT, main_leg

pytestmark = [main_leg, pytest.mark.timeout(900)]
NOTEBOOKS = sorted((ROOT / 'docs' / 'tutorials' / 'notebooks').glob('*.ipynb'))


def shorten(notebook: Path, folder: Path) -> Path:
    """Write a notebook with a fifth of the steps of its trainings; return its path."""
    text, trainings = re.subn(
        r"\b((?:max_iters|val_interval|checkpoint\.interval)(?:=|': )|iter_)(\d+)\b",
        lambda match: f'{match[1]}{int(match[2]) // 5}',
        notebook.read_text(encoding='utf-8'),
    )
    assert trainings >= 3, f'no training in {notebook}'
    short = folder / notebook.name
    short.write_text(text, encoding='utf-8')
    return short


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """In the environment `docs`, which has a kernel."""
    setup = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'setup_env.sh'), 'docs'],
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    if setup.returncode != 0:
        pytest.skip('the environment `docs` cannot be made here')
    python = setup.stdout.strip()
    done = subprocess.run(
        [
            python,
            str(ROOT / 'scripts' / 'docs_site' / 'notebooks.py'),
            str(shorten(notebook, tmp_path)),
            '--out',
            str(tmp_path / 'out'),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    cells = json.loads((tmp_path / 'out' / notebook.name).read_text())['cells']
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert any('image/png' in output.get('data', {}) for output in outputs)
    text = ''.join(''.join(output.get('text', '')) for output in outputs)
    assert 'Traceback' not in text and 'error:' not in text
