"""Random stock configs end under MapSageRunner as they end under MMEngine's Runner.

``MAPSAGE_FUZZ_CONFIGS`` is the number of configs, ``MAPSAGE_FUZZ_SEED`` the seed of the first; the
following have the following seeds. A failure prints its seed:

    export MAPSAGE_FUZZ_CONFIGS=1 MAPSAGE_FUZZ_SEED=17
    bash scripts/run_tests.sh tests/conformance/test_stock_configs.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from both_runners import differences, run
from stock_configs import StockConfig
from support import main_leg

COUNT = int(os.environ.get('MAPSAGE_FUZZ_CONFIGS', 20))
FIRST = int(os.environ.get('MAPSAGE_FUZZ_SEED', 0))


@main_leg
@pytest.mark.parametrize('seed', range(FIRST, FIRST + COUNT))
def test_a_random_stock_config_ends_alike(seed: int, images: Path, tmp_path: Path) -> None:
    config = StockConfig(seed)
    stock, ours = (
        run(side, config.changes, config.stages, images, tmp_path / side)
        for side in ('stock', 'ours')
    )
    facts = f'MAPSAGE_FUZZ_SEED={seed}: {config.changes}, {config.stages}'
    assert stock.error == '', facts
    assert differences(stock, ours) == [], facts
