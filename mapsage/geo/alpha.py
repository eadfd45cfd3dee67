"""Bands that are tagged as alpha and hold data.

Many programs tag the fourth of four bands as alpha, also if it is infrared. `Raster` believes the
tag, so the band is no input and hides pixels. The warning at the start of a run
(`mapsage/datasets/geotiff/summary.py`) uses this module.
"""
from __future__ import annotations

from typing import Optional

import numpy as np
from rasterio.enums import ColorInterp

from .raster import Raster, open_file

# Side in pixels of the squares that are examined, and their number along the diagonal.
_SIDE, _SQUARES = 256, 3
# A mask holds two values. If it was smoothed, a few pixels along its edges have other values; this
# is the largest share of such pixels.
_LARGEST_EDGE = 0.1


def hidden_data_band(scene: Raster) -> Optional[int]:
    """Return the number of an alpha band that is not in ``scene.bands`` and holds more than a mask.

    A band holds more than a mask if over a tenth of its pixels are neither 0 nor the highest value.
    Three squares of the scene are examined. Returns None if there is no such band.

    Raises:
        RasterBlockError: If the scene is damaged in one of the squares.
    """
    with open_file(scene.path) as source:
        alpha = [band for band, kind in zip(source.indexes, source.colorinterp)
                 if kind == ColorInterp.alpha and band not in scene.bands]
    if len(alpha) != 1:
        return None
    with Raster(scene.path, alpha) as band:
        values = np.concatenate([
            band.read(max(0, (band.width - _SIDE) * square // (_SQUARES - 1)),
                      max(0, (band.height - _SIDE) * square // (_SQUARES - 1)),
                      min(_SIDE, band.width), min(_SIDE, band.height))[0].ravel()
            for square in range(_SQUARES)])
    between = (values != 0) & (values != values.max())
    return alpha[0] if between.mean() > _LARGEST_EDGE else None
