"""The notebooks of docs/tutorials hold their outputs, with small pictures."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from support import ROOT, on_host

sys.path.insert(0, str(ROOT / 'scripts' / 'docs_site'))
import notebooks  # noqa: E402

pytestmark = on_host
PATHS = sorted(notebooks.NOTEBOOKS.glob('*.ipynb'))


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_outputs_are_kept(path: Path) -> None:
    assert path.stat().st_size < 600_000
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    code = [cell for cell in cells if cell['cell_type'] == 'code']
    assert all(cell['execution_count'] for cell in code), 'run scripts/docs_site/notebooks.py'
    pictures = [
        ''.join(output['data']['image/png'])
        for cell in code
        for output in cell['outputs']
        if 'image/png' in output.get('data', {})
    ]
    assert pictures
    for picture in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        assert image.width <= notebooks.WIDTH and image.convert('L').getextrema()[0] < 100


def test_there_are_two_notebooks_and_each_is_a_page() -> None:
    assert [path.stem for path in PATHS] == ['first-map', 'reading-a-run']
    for path in PATHS:
        page = notebooks.to_markdown(path)
        assert page.startswith('# Notebook: ') and '<img alt="output"' in page
