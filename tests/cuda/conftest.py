"""The tests of what runs on CUDA devices, which are skipped without a double of CUDA.

The process of pytest has the two devices of ``CUDA_DOUBLE_DEVICES=2``, which the leg sets: when a
file here is imported, PyTorch has counted them. A test chooses their number for the processes that
it starts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import List, Optional

import pytest
import torch

FOLDER = Path(__file__).parent
# What these files import is not in the PyTorch of the t20 leg.
collect_ignore_glob = ['test_*.py'] if torch.__version__.startswith('1.') else []


def why_skipped() -> Optional[str]:
    """Return what is missing here; None if nothing is."""
    if torch.version.cuda is None or importlib.util.find_spec('cuda_double') is None:
        return (
            'the cuda leg runs this, on a double of CUDA (tests/doubles/cuda): '
            'bash scripts/run_tests.sh --leg cuda'
        )
    if torch.cuda.device_count() < 2:
        return (
            f'needs two devices, and this process has {torch.cuda.device_count()}: '
            f'start pytest with CUDA_DOUBLE_DEVICES=2'
        )
    return None


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    reason = why_skipped()
    if reason is not None:
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
