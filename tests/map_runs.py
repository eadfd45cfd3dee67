"""tools/predict.py, called in this process, and the maps that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import numpy as np
import rasterio

from mapsage.commands import predict as command

# Runs tools/predict.py with the arguments of `python -c`, where PyTorch and the MM packages cannot
# be imported.
WITHOUT_HOSTS = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'mmengine', 'mmcv', 'mmseg', 'torchvision'}:
            raise ModuleNotFoundError('refused: ' + name, name=name)

sys.meta_path.insert(0, Refuse())
sys.argv = ['predict.py', *sys.argv[1:]]
sys.path.insert(0, 'tools')
import runpy
runpy.run_path('tools/predict.py', run_name='__main__')
"""


def run(model: Tuple[Path, Path], *arguments: Any) -> int:
    """Predict with the config and checkpoint of ``model``; return the exit status."""
    return command.main([*map(str, model), *map(str, arguments), '--accelerator', 'cpu'])


def read(path: Path) -> np.ndarray:
    """Return the first band of a raster."""
    with rasterio.open(path) as file:
        return file.read(1)
