"""What a step of a frozen ViT-L asks of a card, counted by the benchmark of docs/benchmarks.md."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT, main_leg


@main_leg
@pytest.mark.long
def test_a_frozen_encoder_is_cast_once_and_few_operators_are_dispatched() -> None:
    output = subprocess.run(
        [sys.executable, 'tools/benchmarks/step_counts.py', '--rows', 'ours, fast on a card'],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    row = output.splitlines()[-1].split('|')
    assert row[1].strip() == 'DINOv3 large + UPerNet'
    operators, casts, frozen_casts, copies, gigabytes = map(float, row[3:8])
    assert frozen_casts == 0 and copies == 0, row
    assert 300 < operators <= 570 and casts <= 94 and gigabytes <= 12.2, row
