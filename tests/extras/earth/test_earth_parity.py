"""The encoders for satellite images compute what the published code computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict

import pytest
from packages_here import package_folder
from support import ROOT, main_leg

pytestmark = main_leg

# float32; values are up to 6.
TOLERANCE = 1e-5
# Numbers of cases, so that none is left out silently.
CASES = dict(olmoearth=7, terramind=5, prithvi=6, dofa=5)


@pytest.mark.parametrize('encoder', CASES)
def test_features_equal_those_of_the_published_code(encoder: str) -> None:
    """Several sizes, sets of bands and missing dates, with weights read from a published file."""
    result = subprocess.run(
        [sys.executable, str(ROOT / 'tests/compare_earth.py'), package_folder('earth'), encoder],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=600,
        env=dict(os.environ, OMP_NUM_THREADS='1'),
    )
    assert result.returncode == 0, result.stderr
    figures: Dict[str, Any] = json.loads(result.stdout)
    assert len(figures) == CASES[encoder]
    for name, case in figures.items():
        assert case['largest'] > 1, name
        assert case['difference'] < TOLERANCE, (name, case)
