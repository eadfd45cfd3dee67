"""The shift between two images of one area, measured by phase correlation of small blocks.

Blocks without texture, such as water, say nothing and are left out. What remains is summarized by
its median and by the length that three quarters of the blocks do not exceed: single blocks may lie
on ground that has changed, and the shifts of a turned image have the median 0.

Shapes:
    gray    (height, width) float32, one band
    valid   (height, width) bool
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .coordinates import corner_offsets, short_crs
from .errors import GeoError
from .raster import Raster
from .reference_systems import same_crs

# Side of a block in pixels, and most blocks of a pair of scenes.
BLOCK, MOST_BLOCKS = 256, 64
# Width of the Gaussian that passes low frequencies, in cycles a pixel: noise and interpolation
# disturb the higher ones, and the peak becomes a Gaussian whose top three pixels locate exactly.
_PASSED = 0.15
# Least height of the correlation's peak times the side of a block; 1 is the peak of equal blocks.
# At 256 pixels, blocks of the demo under two suns have 0.2 to 0.8, unrelated ones less than 0.1.
_MIN_PEAK = 30.0
# Least number of blocks that give a median.
_MIN_BLOCKS = 3
# Share of the blocks whose shift is not longer than `ShiftReport.extent`.
_EXTENT_SHARE = 0.75
# Rounds of the fit of a similarity, and residual in pixels below which all weigh the same.
_FIT_ROUNDS, _FIT_ROUNDING = 10, 0.05
# Least number of blocks that give a rotation and a scale, which are four unknowns; least deviation
# from the median shift in pixels for which they are computed; and largest part of this deviation
# that they leave unexplained.
_MIN_SIMILARITY_BLOCKS, _MIN_DEVIATION, _UNEXPLAINED = 6, 0.25, 0.25


class BlockShift(NamedTuple):
    """Shift of a block: the second image lies ``columns`` to the right and ``rows`` below.

    Attributes:
        columns, rows: Shift in pixels.
        right, down: Position of the block's center relative to the scene's center, in pixels.
    """

    columns: float
    rows: float
    right: float = 0.0
    down: float = 0.0


class ShiftReport(NamedTuple):
    """Shift between two images.

    Attributes:
        columns: Median shift to the right of the second image, in pixels; NaN if unknown.
        rows: Median shift downward, in pixels; NaN if unknown.
        spread: Median distance of the blocks' shifts from the median shift, in pixels.
        measured: Number of blocks with texture whose shift could be measured.
        blocks: Number of blocks.
        extent: Length in pixels that three quarters of the blocks' shifts do not exceed.
        rotation: Angle in degrees by which the second image is turned, clockwise; NaN if a rotation
            and a scale do not explain the blocks' shifts.
        scale: Size of the second image as a multiple of the first; NaN likewise.
    """

    columns: float
    rows: float
    spread: float
    measured: int
    blocks: int
    extent: float = float('nan')
    rotation: float = float('nan')
    scale: float = float('nan')

    @property
    def length(self) -> float:
        """Length of the shift in pixels; NaN if unknown."""
        return float(np.hypot(self.columns, self.rows))

    @property
    def largest(self) -> float:
        """The median shift's length or :attr:`extent`, whichever is larger; NaN if unknown."""
        return max(self.length, self.extent)

    def describe(self) -> str:
        """Return the shift as the end of a sentence."""
        if np.isnan(self.length):
            return (
                f'cannot be measured: {self.measured} of {self.blocks} blocks have texture '
                f'that both dates share, expected {_MIN_BLOCKS} or more'
            )
        return (
            f'{self.length:.2f} pixels ({self.columns:+.2f} to the right, {self.rows:+.2f} '
            f'down; median of {self.measured} of {self.blocks} blocks, which differ from it '
            f'by {self.spread:.2f}; a quarter of the blocks moved by {self.extent:.2f} or more)'
            + self._describe_similarity()
        )

    def _describe_similarity(self) -> str:
        if np.isnan(self.rotation):
            return ''
        way = 'clockwise' if self.rotation > 0 else 'counterclockwise'
        return (
            f'; the second date is turned {way} by {abs(self.rotation):.2f} degrees, and '
            f'{self.scale:.4f} times as large'
        )


def block_shift(before: np.ndarray, after: np.ndarray, valid: np.ndarray) -> Optional[BlockShift]:
    """Return the shift of a block; None if it has no texture that both images share.

    Args:
        before, after: ``(height, width)`` float32.
        valid: Pixels with data in both, ``(height, width)`` bool.
    """
    if valid.mean() < 0.75:
        return None
    spectra: List[np.ndarray] = []
    for image in (before, after):
        mean, spread = image[valid].mean(), image[valid].std()
        # Below one hundred-thousandth of the mean, a float32 has rounding in place of texture.
        if not spread > 1e-5 * max(1.0, abs(float(mean))):
            return None
        plane = np.where(valid, (image - mean) / spread, 0)
        spectra.append(np.fft.rfft2(plane * np.outer(*(np.hanning(side) for side in plane.shape))))
    return _locate_peak(spectra[0], spectra[1], before.shape)


def _locate_peak(
    before: np.ndarray, after: np.ndarray, shape: Tuple[int, ...]
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
    return BlockShift(
        right - width if right > width / 2 else right, down - height if down > height / 2 else down
    )


def _top(left: float, peak: float, right: float) -> float:
    """Return the position of a Gaussian's top relative to the largest of three neighbors."""
    low, middle, high = (float(np.log(max(value, 1e-6))) for value in (left, peak, right))
    curvature = low - 2 * middle + high
    return 0.5 * (low - high) / curvature if curvature < 0 else 0.0


def summarize_shifts(shifts: Sequence[Optional[BlockShift]]) -> ShiftReport:
    """Return what the shifts of blocks have in common; None: not measured."""
    known = np.array([shift for shift in shifts if shift is not None], np.float64).reshape(-1, 4)
    if len(known) < _MIN_BLOCKS:
        return ShiftReport(float('nan'), float('nan'), float('nan'), len(known), len(shifts))
    moved = known[:, :2]
    median = np.median(moved, 0)
    deviations = _lengths(moved - median)
    rotation, scale = _similarity(moved, known[:, 2:])
    return ShiftReport(
        float(median[0]),
        float(median[1]),
        float(np.median(deviations)),
        len(known),
        len(shifts),
        _extent(_lengths(moved)),
        rotation,
        scale,
    )


def _similarity(moved: np.ndarray, positions: np.ndarray) -> Tuple[float, float]:
    """Return rotation (degrees, clockwise) and scale that explain shifts; NaN if none do.

    The four numbers of a similarity are fitted by least absolute deviations (weights that are
    computed again from the residuals), because single blocks may be wrong.

    Args:
        moved: Shifts of blocks, float64 (blocks, 2).
        positions: Their centers relative to the scene's, float64 (blocks, 2).
    """
    unknown = float('nan'), float('nan')
    deviation = _extent(_lengths(moved - np.median(moved, 0)))
    if len(moved) < _MIN_SIMILARITY_BLOCKS or deviation < _MIN_DEVIATION:
        return unknown
    right, down = positions.T
    one, zero = np.ones(len(moved)), np.zeros(len(moved))
    # Rows: to the right = a + stretch * right - skew * down; down = b + skew * right + ...
    design = np.stack(
        [np.stack([one, zero, right, -down], 1), np.stack([zero, one, down, right], 1)], 1
    )
    weights, fitted = one, np.zeros(4)
    for _ in range(_FIT_ROUNDS):
        root = np.sqrt(weights)[:, None]
        fitted = np.linalg.lstsq(
            (design * root[..., None]).reshape(-1, 4), (moved * root).reshape(-1), rcond=None
        )[0]
        residuals = _lengths(moved - design @ fitted)
        weights = 1 / np.maximum(residuals, _FIT_ROUNDING)
    if not _extent(residuals) <= _UNEXPLAINED * deviation:
        return unknown
    stretch, skew = fitted[2:]
    return float(np.degrees(np.arctan2(skew, 1 + stretch))), float(np.hypot(1 + stretch, skew))


def _lengths(vectors: np.ndarray) -> np.ndarray:
    return np.hypot(vectors[:, 0], vectors[:, 1])


def _extent(lengths: np.ndarray) -> float:
    """Return the length that three quarters of some lengths do not exceed."""
    # Not interpolated: one of three blocks may be wrong, and four of sixteen.
    return float(np.sort(lengths)[int(_EXTENT_SHARE * (len(lengths) - 1))])


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


def pair_shifts(
    before: str, after: str, bands: Optional[Sequence[int]] = None, most: int = MOST_BLOCKS
) -> List[Optional[BlockShift]]:
    """Return the shifts of at most ``most`` blocks of two scenes; see :func:`measure_shift`."""
    with Raster(before, bands) as first, Raster(after, bands) as second:
        check_same_grid(first, second)
        side = min(BLOCK, first.height, first.width)
        shifts: List[Optional[BlockShift]] = []
        for column, row in _corners(first.width, first.height, side, most):
            images, masks = zip(
                *(raster.read(column, row, side, side) for raster in (first, second))
            )
            gray = [image.astype(np.float32).mean(0) for image in images]
            shift = block_shift(gray[0], gray[1], masks[0] & masks[1])
            shifts.append(
                shift
                and shift._replace(
                    right=column + side / 2 - first.width / 2,
                    down=row + side / 2 - first.height / 2,
                )
            )
    return shifts


def check_same_grid(before: Raster, after: Raster) -> None:
    """Check that the pixels of two scenes lie on each other.

    Raises:
        GeoError: If size, CRS or transform differ; by more than a hundredth of a pixel.
    """
    sizes = [(raster.width, raster.height) for raster in (before, after)]
    pair = f'{before.path} and {after.path}'
    if sizes[0] != sizes[1]:
        raise GeoError(
            f'{pair} have {sizes[0][0]}x{sizes[0][1]} and {sizes[1][0]}x{sizes[1][1]} '
            f'pixels, expected one size and grid. '
            f'{_warp_command(before, after)}'
        )
    if not same_crs(before.crs, after.crs):
        raise GeoError(
            f'{pair} have the CRS {short_crs(before.crs)} and {short_crs(after.crs)}, expected one CRS '
            f'and grid. {_warp_command(before, after)}'
        )
    width, height = sizes[0]
    corners = np.array([[column, row] for column in (0, width) for row in (0, height)])
    distance = float(_lengths(corner_offsets(after, before, corners)).max())
    if distance > 0.01:
        raise GeoError(
            f'{pair} have one size, but grids that differ by up to {distance:.2f} '
            f'pixels, expected one grid. {_warp_command(before, after)}'
        )


def _corners(width: int, height: int, side: int, most: int) -> List[Tuple[int, int]]:
    """Return (column, row) of blocks that are spread evenly over a scene."""
    columns, rows = width // side, height // side
    while columns * rows > most:
        columns, rows = (columns - 1, rows) if columns >= rows else (columns, rows - 1)
    return [
        (int(column), int(row))
        for row in np.linspace(0, height - side, rows)
        for column in np.linspace(0, width - side, columns)
    ]


def _warp_command(before: Raster, after: Raster) -> str:
    if not before.is_georeferenced or not after.is_georeferenced:
        return 'Resample one of them to the pixels of the other.'
    left, top = before.transform * (0, 0)
    right, bottom = before.transform * (before.width, before.height)
    return (
        f'Bring the second to the grid of the first: gdalwarp -r bilinear -t_srs '
        f"'{short_crs(before.crs)}' -te {min(left, right):.10g} {min(top, bottom):.10g} "
        f'{max(left, right):.10g} {max(top, bottom):.10g} -ts {before.width} {before.height} '
        f'{after.path} ALIGNED.tif'
    )
