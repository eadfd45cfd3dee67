"""tools/predict.py, called in this process, and the maps that it writes."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import rasterio
from support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import predict as command  # noqa: E402


def run(model: Tuple[Path, Path], *arguments: Any) -> int:
    """Predict with the config and checkpoint of ``model``; return the exit status."""
    return command.main([*map(str, model), *map(str, arguments), '--accelerator', 'cpu'])


def read(path: Path) -> np.ndarray:
    """Return the first band of a raster."""
    with rasterio.open(path) as file:
        return file.read(1)
