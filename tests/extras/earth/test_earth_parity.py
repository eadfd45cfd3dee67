"""The encoders for satellite images compute what the published code computes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from packages_here import package_folder
from support import ROOT, main_leg

# float32; values are up to 6.
TOLERANCE = 1e-5
# Numbers of cases, so that none is left out silently.
CASES = dict(olmoearth=7, terramind=5, prithvi=6, dofa=5)


@main_leg
@pytest.mark.long
def test_features_equal_those_of_the_published_code() -> None:
    """Several sizes, sets of bands and missing dates, with weights read from a published file."""
    program = [sys.executable, str(ROOT / 'tests/compare_earth.py'), package_folder('earth')]
    result = subprocess.run([*program, *CASES], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert {encoder: len(cases) for encoder, cases in figures.items()} == CASES
    for encoder, cases in figures.items():
        for name, case in cases.items():
            assert case['largest'] > 1, (encoder, name)
            assert case['difference'] < TOLERANCE, (encoder, name, case)
