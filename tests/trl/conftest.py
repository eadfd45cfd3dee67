"""The examples with accelerate and TRL: ``bash scripts/run_tests.sh --leg trl``."""

from __future__ import annotations

import os
import sys

import pytest
from trl_ranks import EXAMPLES


@pytest.fixture(scope='session', autouse=True)
def offline() -> None:
    """Skip without TRL. Nothing may ask the hub for a file."""
    pytest.importorskip('trl', reason='needs TRL: bash scripts/run_tests.sh --leg trl')
    os.environ['HF_HUB_OFFLINE'] = '1'
    sys.path.insert(0, str(EXAMPLES))
