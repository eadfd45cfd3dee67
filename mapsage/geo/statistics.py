"""Statistics of the bands of scenes, used for the normalization in a config.

Scenes of any size are read window by window in constant memory; large ones are sampled. The command
`tools/geotiff_statistics.py` prints the result as a part of a config. `hidden_data_band` looks at
the values of a band that is tagged as alpha, for the warning at the start of a run.

Shapes:
    values      (bands, N) of the valid pixels of a window
    results     (bands,) float64, in the units of the file
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from .errors import Box, GeoError, PathName
from .raster import Raster

# Side of a window in pixels.
_WINDOW = 512
# Number of pixels that stay in memory for the percentiles.
_SAMPLED = 1000000
# Side in pixels of the squares of an alpha band that are examined, and their number.
_SQUARE, _SQUARES = 256, 3
# A mask holds two values. If it was smoothed, a few pixels along its edges have other values; this
# is the largest share of such pixels.
_LARGEST_EDGE = 0.1


@dataclass
class BandStatistics:
    """Result of ``band_statistics``. Arrays are float (bands,), in the units of the file.

    Attributes:
        bands: Band numbers, counted from 1.
        mean: Mean of the valid pixels.
        std: Population standard deviation of the valid pixels.
        minimum: Smallest value.
        maximum: Largest value.
        percentile_2: Value that two percent of the pixels lie below, estimated from at most a
            million pixels.
        percentile_98: Value that two percent of the pixels lie above, estimated in the same way.
        pixels: Number of valid pixels that were read.
    """

    bands: Tuple[int, ...]
    mean: np.ndarray
    std: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    percentile_2: np.ndarray
    percentile_98: np.ndarray
    pixels: int


def band_statistics(
    rasters: Sequence[Union[Raster, PathName]],
    bands: Optional[Sequence[int]] = None,
    samples: int = 50000000,
) -> BandStatistics:
    """Return the statistics of scenes over their valid pixels, in constant memory.

    If the scenes together have more than ``samples`` pixels, windows are drawn from all scenes. The
    seed is fixed, so every run reads the same windows. Overviews are not used: they are smoothed,
    so their standard deviation is too small.

    Args:
        rasters: Scenes, each a ``Raster`` or a path.
        bands: Band numbers, counted from 1; default: all but an alpha band.
        samples: Approximate upper limit of the number of pixels that are read.

    Raises:
        GeoError: If there is no valid pixel, or the scenes differ in their number of bands.
    """
    scenes = [
        Raster(raster.path if isinstance(raster, Raster) else raster, bands) for raster in rasters
    ]
    counts = {len(scene.bands) for scene in scenes}
    if len(counts) != 1:
        raise GeoError(
            f'{len(scenes)} scene(s) with {sorted(counts)} bands, expected one number '
            'for all; name at least one scene, and the bands that all have.'
        )
    total = sum(scene.width * scene.height for scene in scenes)
    random = np.random.RandomState(0)

    def valid_values() -> Iterator[np.ndarray]:
        for scene in scenes:
            windows = _windows(scene)
            count = max(1, int(round(min(1.0, samples / total) * len(windows))))
            with scene:
                for index in sorted(random.choice(len(windows), count, replace=False)):
                    values, valid = scene.read(*windows[index])
                    yield values[:, valid]

    windows = sum(len(_windows(scene)) for scene in scenes)
    statistics = tally_bands(valid_values(), scenes[0].bands, windows)
    if statistics is None:
        raise GeoError(
            f'{", ".join(scene.path for scene in scenes[:3])}: no valid pixel among '
            'those read; the no-data value may be wrong (rio info shows it).'
        )
    return statistics


def tally_bands(
    windows: Iterable[np.ndarray], bands: Tuple[int, ...], count: int
) -> Optional[BandStatistics]:
    """Return the statistics of the pixels of windows; None without any pixel.

    Means and sums of squared deviations are merged by window (Chan et al. 1979).

    Args:
        windows: Values of valid pixels, (bands, N) each.
        bands: Numbers of the bands.
        count: Number of windows.
    """
    size, sampled = len(bands), max(1, _SAMPLED // count)
    mean, squares, pixels = np.zeros(size), np.zeros(size), 0
    minimum, maximum = np.full(size, np.inf), np.full(size, -np.inf)
    samples: List[np.ndarray] = []
    for values in windows:
        added = values.shape[1]
        if not added:
            continue
        # A copy, because a view would keep the whole window in memory.
        samples.append(values[:, :: -(-added // sampled)].copy())
        minimum = np.minimum(minimum, values.min(1))
        maximum = np.maximum(maximum, values.max(1))
        values = values.astype(np.float64)
        window_mean, previous = values.mean(1), pixels
        delta = window_mean - mean
        pixels += added
        mean += delta * added / pixels
        deviations = ((values - window_mean[:, None]) ** 2).sum(1)
        squares += deviations + delta**2 * previous * added / pixels
    if not pixels:
        return None
    low, high = np.percentile(np.concatenate(samples, 1), [2, 98], axis=1)
    return BandStatistics(
        bands, mean, np.sqrt(squares / pixels), minimum, maximum, low, high, pixels
    )


def _windows(scene: Raster) -> List[Box]:
    """Return windows that cover the scene; they span whole rows if the file is stored in rows."""
    width = scene.width if scene.blocks[1] == scene.width else min(_WINDOW, scene.width)
    height = max(1, _WINDOW * _WINDOW // width)
    return [
        (column, row, min(width, scene.width - column), min(height, scene.height - row))
        for row in range(0, scene.height, height)
        for column in range(0, scene.width, width)
    ]


def spread_square(number: int, shape: Tuple[int, int], side: int) -> Box:
    """Return one of a sequence of squares that are spread evenly over a scene.

    Their corners are Roberts' R2 sequence, however many of them are taken.

    Args:
        number: Number of the square.
        shape: Height and width of the scene in pixels.
        side: Side of the square in pixels; a smaller scene is taken whole.
    """
    height, width = (min(side, length) for length in shape)
    column = int(number * 0.7548776662466927 % 1 * (shape[1] - width))
    row = int(number * 0.5698402909980532 % 1 * (shape[0] - height))
    return column, row, width, height


def hidden_data_band(scene: Raster) -> Optional[int]:
    """Return the number of an alpha band that is not in ``scene.bands`` and holds more than a mask.

    Many programs tag the fourth of four bands as alpha, also if it is infrared. `Raster` believes
    the tag, so the band is no input and hides pixels.

    A band holds more than a mask if over a tenth of its pixels are neither 0 nor the highest value.
    Three squares of the scene are examined. Returns None if there is no such band.

    Raises:
        RasterBlockError: If the scene is damaged in one of the squares.
    """
    colors = enumerate(scene.header.colors, 1)
    alpha = [band for band, kind in colors if kind == 'alpha' and band not in scene.bands]
    if len(alpha) != 1:
        return None
    with Raster(scene.path, alpha) as band:
        boxes = (
            spread_square(number, (band.height, band.width), _SQUARE) for number in range(_SQUARES)
        )
        values = np.concatenate([band.read(*box)[0].ravel() for box in boxes])
    between = (values != 0) & (values != values.max())
    return alpha[0] if between.mean() > _LARGEST_EDGE else None
