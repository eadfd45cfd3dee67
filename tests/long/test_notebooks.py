"""The notebooks of docs/tutorials run from their first cell to their last."""
from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support import ROOT, main_leg

pytestmark = [main_leg, pytest.mark.timeout(900)]
NOTEBOOKS = sorted((ROOT / 'docs' / 'tutorials' / 'notebooks').glob('*.ipynb'))


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """In the environment `docs`, which has a kernel."""
    setup = subprocess.run(['bash', str(ROOT / 'scripts' / 'setup_env.sh'), 'docs'],
                           stdout=subprocess.PIPE, universal_newlines=True)
    if setup.returncode != 0:
        pytest.skip('the environment `docs` cannot be made here')
    python = setup.stdout.strip()
    done = subprocess.run(
        [python, str(ROOT / 'scripts' / 'docs_site' / 'notebooks.py'), str(notebook),
         '--out', str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    assert done.returncode == 0, done.stdout[-4000:]
    cells = json.loads((tmp_path / notebook.name).read_text())['cells']
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert any('image/png' in output.get('data', {}) for output in outputs)
    text = ''.join(''.join(output.get('text', '')) for output in outputs)
    assert 'Traceback' not in text and 'error:' not in text
