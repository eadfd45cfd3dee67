"""Alpha bands that are none: many programs tag the fourth of four bands so, whatever it holds."""
from __future__ import annotations

from typing import Optional

import numpy as np
from rasterio.enums import ColorInterp

from .raster import Raster, open_file

_SIDE, _PLACES = 256, 3  # of the squares that are examined, in pixels, along the diagonal
# A mask holds two values, and where it was smoothed a few others along its edges.
_LARGEST_EDGE = 0.1


def hidden_data_band(scene: Raster) -> Optional[int]:
    """Return the number of an alpha band that holds more than a mask, if ``scene.bands`` lacks it.

    It is one if over a tenth of its pixels, in three squares of the scene, are neither 0 nor the
    highest value.

    Raises:
        RasterBlockError: If the scene is damaged there.
    """
    with open_file(scene.path) as source:
        alpha = [band for band, kind in zip(source.indexes, source.colorinterp)
                 if kind == ColorInterp.alpha and band not in scene.bands]
    if len(alpha) != 1:
        return None
    with Raster(scene.path, alpha) as band:
        values = np.concatenate([
            band.read(max(0, (band.width - _SIDE) * place // (_PLACES - 1)),
                      max(0, (band.height - _SIDE) * place // (_PLACES - 1)),
                      min(_SIDE, band.width), min(_SIDE, band.height))[0].ravel()
            for place in range(_PLACES)])
    between = (values != 0) & (values != values.max())
    return alpha[0] if between.mean() > _LARGEST_EDGE else None
