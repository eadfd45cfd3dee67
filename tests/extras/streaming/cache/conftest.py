"""The fixture that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_cache import write_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_cache(tmp_path / 'cache')
