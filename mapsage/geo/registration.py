"""The shift between two images of one area, measured by phase correlation of small blocks.

Blocks without texture, such as water, say nothing and are left out. What remains is summarized by
its median and its spread, because single blocks may lie on ground that has changed.

Shapes:
    gray    (height, width) float32, one band
    valid   (height, width) bool
"""
from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .coordinates import to_map
from .errors import GeoError
from .raster import Raster
from .reference_systems import full_turn, next_to, same_crs

# Side of a block in pixels, and most blocks of a pair of scenes.
BLOCK, MOST_BLOCKS = 256, 64
# Width of the Gaussian that passes low frequencies, in cycles a pixel: noise and interpolation
# disturb the higher ones, and the peak becomes a Gaussian whose top three pixels locate exactly.
_PASSED = .15
# Least height of the correlation's peak times the side of a block; 1 is the peak of equal blocks.
# At 256 pixels, blocks of the demo under two suns have 0.2 to 0.8, unrelated ones less than 0.1.
_MIN_PEAK = 30.
# Least number of blocks that give a median.
_MIN_BLOCKS = 3


class BlockShift(NamedTuple):
    """Shift of a block: the second image lies ``columns`` to the right and ``rows`` below."""

    columns: float
    rows: float


class ShiftReport(NamedTuple):
    """Shift between two images.

    Attributes:
        columns: Median shift to the right of the second image, in pixels; NaN if unknown.
        rows: Median shift downward, in pixels; NaN if unknown.
        spread: Median distance of the blocks' shifts from the median shift, in pixels.
        measured: Number of blocks with texture whose shift could be measured.
        blocks: Number of blocks.
    """

    columns: float
    rows: float
    spread: float
    measured: int
    blocks: int

    @property
    def length(self) -> float:
        """Length of the shift in pixels; NaN if unknown."""
        return float(np.hypot(self.columns, self.rows))

    def describe(self) -> str:
        """Return the shift as the end of a sentence."""
        if np.isnan(self.length):
            return (f'cannot be measured: {self.measured} of {self.blocks} blocks have texture '
                    f'that both dates share, expected {_MIN_BLOCKS} or more')
        return (f'{self.length:.2f} pixels ({self.columns:+.2f} to the right, {self.rows:+.2f} '
                f'down; median of {self.measured} of {self.blocks} blocks, which differ from it '
                f'by {self.spread:.2f})')


def block_shift(before: np.ndarray, after: np.ndarray, valid: np.ndarray) -> Optional[BlockShift]:
    """Return the shift of a block; None if it has no texture that both images share.

    Args:
        before, after: ``(height, width)`` float32.
        valid: Pixels with data in both, ``(height, width)`` bool.
    """
    if valid.mean() < .75:
        return None
    spectra: List[np.ndarray] = []
    for image in (before, after):
        mean, spread = image[valid].mean(), image[valid].std()
        # Below one hundred-thousandth of the mean, a float32 has rounding in place of texture.
        if not spread > 1e-5 * max(1., abs(float(mean))):
            return None
        plane = np.where(valid, (image - mean) / spread, 0)
        spectra.append(np.fft.rfft2(plane * np.outer(*(np.hanning(side) for side in plane.shape))))
    return _locate_peak(spectra[0], spectra[1], before.shape)


def _locate_peak(before: np.ndarray, after: np.ndarray, shape: Tuple[int, ...]
                 ) -> Optional[BlockShift]:
    """Return the shift between two spectra of ``np.fft.rfft2``; None without a clear peak.

    Phase correlation (Kuglin & Hines 1975) of the low frequencies, with the position of the peak
    from a parabola through the logarithms of its neighbors.
    """
    height, width = shape
    cross = np.conj(before) * after
    cross /= np.maximum(np.abs(cross), 1e-12)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    passed = np.exp(-(rows**2 + columns**2) / (2 * _PASSED**2))
    surface = np.fft.irfft2(cross * passed, shape) / np.fft.irfft2(passed, shape)[0, 0]
    row, column = (int(index) for index in np.unravel_index(int(surface.argmax()), shape))
    peak = float(surface[row, column])
    if peak * min(shape) < _MIN_PEAK:
        return None
    down = row + _top(surface[row - 1, column], peak, surface[(row + 1) % height, column])
    right = column + _top(surface[row, column - 1], peak, surface[row, (column + 1) % width])
    # The second half of the surface holds negative shifts.
    return BlockShift(right - width if right > width / 2 else right,
                      down - height if down > height / 2 else down)


def _top(left: float, peak: float, right: float) -> float:
    """Return the position of a Gaussian's top relative to the largest of three neighbors."""
    low, middle, high = (float(np.log(max(value, 1e-6))) for value in (left, peak, right))
    curvature = low - 2 * middle + high
    return .5 * (low - high) / curvature if curvature < 0 else 0.


def summarize_shifts(shifts: Sequence[Optional[BlockShift]]) -> ShiftReport:
    """Return the median and the spread of the shifts of blocks; None: not measured."""
    known = np.array([shift for shift in shifts if shift is not None], np.float64).reshape(-1, 2)
    if len(known) < _MIN_BLOCKS:
        return ShiftReport(float('nan'), float('nan'), float('nan'), len(known), len(shifts))
    columns, rows = np.median(known, 0)
    spread = np.median(np.hypot(*(known - (columns, rows)).T))
    return ShiftReport(float(columns), float(rows), float(spread), len(known), len(shifts))


def measure_shift(before: str, after: str, bands: Optional[Sequence[int]] = None) -> ShiftReport:
    """Measure the shift between two scenes on one grid, from at most ``MOST_BLOCKS`` windows.

    Args:
        before, after: Paths of rasters.
        bands: Bands that are averaged, counted from 1; default: all but an alpha band.

    Raises:
        GeoError: If the scenes differ in size, CRS or grid.
        RasterBlockError: If a block is damaged.
    """
    return summarize_shifts(pair_shifts(before, after, bands))


def pair_shifts(before: str, after: str, bands: Optional[Sequence[int]] = None,
                most: int = MOST_BLOCKS) -> List[Optional[BlockShift]]:
    """Return the shifts of at most ``most`` blocks of two scenes; see :func:`measure_shift`."""
    with Raster(before, bands) as first, Raster(after, bands) as second:
        check_same_grid(first, second)
        side = min(BLOCK, first.height, first.width)
        shifts: List[Optional[BlockShift]] = []
        for column, row in _corners(first.width, first.height, side, most):
            images, masks = zip(*(raster.read(column, row, side, side)
                                  for raster in (first, second)))
            gray = [image.astype(np.float32).mean(0) for image in images]
            shifts.append(block_shift(gray[0], gray[1], masks[0] & masks[1]))
    return shifts


def check_same_grid(before: Raster, after: Raster) -> None:
    """Check that the pixels of two scenes lie on each other.

    Raises:
        GeoError: If size, CRS or transform differ; by more than a hundredth of a pixel.
    """
    sizes = [(raster.width, raster.height) for raster in (before, after)]
    pair = f'{before.path} and {after.path}'
    if sizes[0] != sizes[1]:
        raise GeoError(f'{pair} have {sizes[0][0]}x{sizes[0][1]} and {sizes[1][0]}x{sizes[1][1]} '
                       f'pixels, expected one size and grid. '
                       f'{_warp_command(before, after)}')
    if not same_crs(before.crs, after.crs):
        raise GeoError(f'{pair} have the CRS {_crs(before)} and {_crs(after)}, expected one CRS '
                       f'and grid. {_warp_command(before, after)}')
    width, height = sizes[0]
    corners = np.array([[column, row] for column in (0, width) for row in (0, height)])
    first, second = (to_map(raster.transform, corners) for raster in (before, after))
    second[:, 0] = next_to(second[:, 0], first[:, 0], full_turn(before.crs))
    # Pixels of `before` under the corners of `after`.
    moved = to_map(~before.transform, second)
    distance = float(np.hypot(*(moved - corners).T).max())
    if distance > .01:
        raise GeoError(f'{pair} have one size, but grids that differ by up to {distance:.2f} '
                       f'pixels, expected one grid. {_warp_command(before, after)}')


def _corners(width: int, height: int, side: int, most: int) -> List[Tuple[int, int]]:
    """Return (column, row) of blocks that are spread evenly over a scene."""
    columns, rows = width // side, height // side
    while columns * rows > most:
        columns, rows = (columns - 1, rows) if columns >= rows else (columns, rows - 1)
    return [(int(column), int(row)) for row in np.linspace(0, height - side, rows)
            for column in np.linspace(0, width - side, columns)]


def _crs(raster: Raster) -> str:
    return 'none' if raster.crs is None else str(raster.crs.to_string())[:60]


def _warp_command(before: Raster, after: Raster) -> str:
    if not before.is_georeferenced or not after.is_georeferenced:
        return 'Resample one of them to the pixels of the other.'
    left, top = before.transform * (0, 0)
    right, bottom = before.transform * (before.width, before.height)
    return (f'Bring the second to the grid of the first: gdalwarp -r bilinear -t_srs '
            f"'{_crs(before)}' -te {min(left, right):.10g} {min(top, bottom):.10g} "
            f'{max(left, right):.10g} {max(top, bottom):.10g} -ts {before.width} {before.height} '
            f'{after.path} ALIGNED.tif')
