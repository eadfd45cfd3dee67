"""The gallery of the front page: pictures of a short training against the kept ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import ROOT
from warm_python import warm_python

KEPT = ROOT / 'docs' / 'images' / 'gallery'
NAMES = ('preview', 'map', 'viewer', 'report', 'sampling')
AGAIN = 'make the kept pictures again: bash scripts/make_gallery.sh'


@pytest.fixture(scope='module')
def gallery(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the folder of the pictures of today; a site that CI built gets them."""
    folder = tmp_path_factory.mktemp('gallery')
    done = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'make_gallery.sh'), '--quick', str(folder)],
        env={**os.environ, 'MAPSAGE_PYTHON': warm_python()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    if os.environ.get('MAPSAGE_SITE'):
        for path in folder.glob('*.png'):
            shutil.copy(str(path), os.path.join(os.environ['MAPSAGE_SITE'], 'images', 'gallery'))
    return folder


def shades(path: Path, size: int = 48) -> np.ndarray:
    """Return a small gray copy of a picture, whose mean is 0 and whose standard deviation is 1."""
    gray = np.asarray(Image.open(path).convert('L').resize((size, size), Image.BOX), float)
    return (gray - gray.mean()) / gray.std()


@pytest.mark.long
@pytest.mark.parametrize('name', NAMES)
def test_a_kept_picture_looks_like_that_of_today(gallery: Path, name: str) -> None:
    today, kept = gallery / f'{name}.png', KEPT / f'{name}.png'
    assert Image.open(today).size == Image.open(kept).size, AGAIN
    # A correlation: 0.83 to 0.97, and 0.51 for `preview`, whose tiles are others.
    assert (shades(today) * shades(kept)).mean() > (0.3 if name == 'preview' else 0.7), AGAIN


@pytest.mark.long
def test_the_kept_pictures_have_the_headings_of_today(gallery: Path) -> None:
    today, kept = (json.loads((folder / 'gallery.json').read_text()) for folder in (gallery, KEPT))
    # The short run is one with dynamic sampling, the kept report is of one without.
    today['report'].remove('Dynamic sampling')
    assert today == kept, AGAIN
    assert len(today['report']) > 4 and len(today['viewer']) > 4
