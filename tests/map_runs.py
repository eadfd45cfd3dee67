"""tools/predict.py, called in this process, and the maps that it writes."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import numpy as np
import rasterio

from mapsage.commands.programs import predict as command


def run(model: Tuple[Path, Path], *arguments: Any) -> int:
    """Predict with the config and checkpoint of ``model``; return the exit status."""
    return command.main([*map(str, model), *map(str, arguments), '--accelerator', 'cpu'])


def read(path: Path) -> np.ndarray:
    """Return the first band of a raster."""
    with rasterio.open(path) as file:
        return file.read(1)
