"""The tiny config's losses on CPU, leg by leg: a change that should not change numbers does not.

Write a leg's file again, when numbers are meant to change, with

    MAPSAGE_WRITE_GOLDEN=1 bash scripts/run_tests.sh --leg main tests -k golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support import ROOT, check_finished, launch

LEGS = {'2.13': 'main', '2.9': 'xla', '1.10': 't20'}
LEG = LEGS.get('.'.join(torch.__version__.split('.')[:2]))


@pytest.mark.skipif(LEG is None, reason=f'no leg has torch {torch.__version__}')
def test_losses_are_the_golden_ones(tiny_config: Path, tmp_path: Path) -> None:
    check_finished(
        launch(tiny_config, '--work-dir', tmp_path, ranks=1, environ={'ACCELERATOR': 'cpu'})
    )
    lines = next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines()
    losses = [line['loss'] for line in map(json.loads, lines) if 'loss' in line]
    golden = ROOT / 'tests' / 'golden' / f'tiny_cpu_{LEG}.json'
    if os.environ.get('MAPSAGE_WRITE_GOLDEN'):
        golden.write_text(json.dumps(losses) + '\n')
    assert len(losses) == 10
    # Processors with other vector units round otherwise, within this.
    assert losses == pytest.approx(json.loads(golden.read_text()), rel=1e-5)
