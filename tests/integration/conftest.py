"""Fixtures of several files of this folder."""
from __future__ import annotations

from pathlib import Path
from typing import Tuple

import pytest
from color_model import write_checkpoint, write_config


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Path]:
    """Config and checkpoint of a model that tells classes by their colors."""
    folder = tmp_path_factory.mktemp('model')
    return write_config(folder), write_checkpoint(folder)
