"""Which pixels of a raster have data: one rule for every program that reads a scene.

A pixel is invalid if one of these conditions holds:

- the mask of the file or its alpha band is 0;
- every band that is read equals its no-data value;
- a band that is read is NaN or infinite;
- the file is a mosaic (VRT), and none of its sources shows it (`vrt_gaps.py`).

In a valid pixel every band keeps its value, even if that equals no-data. Example: with no-data 255,
the saturated green of a white roof is a measurement, and 0 instead would be another color.
docs/how-to/maps.md compares this rule with GDAL and rasterio. `Raster` in `raster.py` applies it.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np
import rasterio
from rasterio.enums import ColorInterp, MaskFlags

# Floats from here on are no measurements, so six digits tell a no-data value from them.
_LARGE = 1e15

# Flags of a band without a stored mask: GDAL computes the mask from no-data or alpha, which this
# module reads itself, or all pixels are valid.
_NO_STORED_MASK = {MaskFlags.all_valid, MaskFlags.nodata, MaskFlags.alpha}

# Number of GDAL's tag of a TIFF with the no-data value of all bands, as text.
_NODATA_TAG = 42113


@dataclass(frozen=True)
class PixelValidity:
    """What makes pixels of some bands of a file invalid.

    Attributes:
        mask: ``'dataset'`` if all bands share a mask, ``'bands'`` if each band has one, or None.
        alpha: Number of the alpha band, counted from 1, or None.
        nodata: No-data value of each band in the dtype of the file; None if a band has none.
        may_be_nan: Whether the values can be NaN or infinite.
    """

    mask: Optional[str]
    alpha: Optional[int]
    nodata: Optional[Tuple[Any, ...]]
    may_be_nan: bool

    @classmethod
    def of(
        cls, source: rasterio.DatasetReader, bands: Sequence[int], dtype: np.dtype
    ) -> PixelValidity:
        """Return the validity of the bands of an open file.

        An alpha band that is among ``bands`` counts as data, not as a mask.
        """
        # GDAL looks at all bands for each of these tuples.
        mask_flags, nodata = source.mask_flag_enums, nodata_values(source)
        flags = [set(mask_flags[band - 1]) for band in bands]
        alpha = [
            band
            for band, kind in zip(source.indexes, source.colorinterp)
            if kind == ColorInterp.alpha
        ]
        mask = None
        if MaskFlags.per_dataset in flags[0] and MaskFlags.alpha not in flags[0]:
            mask = 'dataset'
        elif any(not flag & _NO_STORED_MASK for flag in flags):
            mask = 'bands'
        return cls(
            mask,
            None if not alpha or set(alpha) & set(bands) else alpha[0],
            _in_dtype([nodata[band - 1] for band in bands], dtype),
            dtype.kind == 'f',
        )

    @property
    def may_hide(self) -> bool:
        """Whether a pixel may be invalid."""
        return bool(self.mask or self.alpha or self.nodata or self.may_be_nan)

    @property
    def may_hide_in_file(self) -> bool:
        """Whether the file hides pixels by a mask, an alpha band or no-data."""
        return bool(self.mask or self.alpha or self.nodata)

    def apply(
        self,
        values: np.ndarray,
        read_alpha: Callable[[], np.ndarray],
        read_masks: Callable[[], np.ndarray],
        by_value: bool = True,
    ) -> np.ndarray:
        """Return the valid pixels, bool (height, width); set the others to 0 in ``values``.

        Args:
            values: Values of the bands, (bands, height, width), changed in place.
            read_alpha: Function that returns the alpha band of the window, (height, width).
            read_masks: Function that returns GDAL's masks of the window, (masks, height, width).
            by_value: Whether pixels with no-data values are invalid.
        """
        valid = np.ones(values.shape[1:], bool)
        if self.alpha is not None:
            valid &= read_alpha() != 0
        if self.mask is not None:
            valid &= (read_masks() != 0).any(0)
        if self.nodata is not None and by_value:
            hidden = np.ones(values.shape[1:], bool)
            for band, nodata in zip(values, self.nodata):
                hidden &= _equals(band, nodata)
            valid &= ~hidden
        if self.may_be_nan:
            valid &= np.isfinite(values).all(0)
        if not valid.all():
            np.copyto(values, 0, where=~valid)
        return valid

    def facts(self) -> Dict[str, Any]:
        """Return the attributes as JSON values; no-data values are text, as JSON has no NaN."""
        return dict(
            mask=self.mask,
            alpha=self.alpha,
            nodata=None if self.nodata is None else [str(float(value)) for value in self.nodata],
        )


def _equals(band: np.ndarray, nodata: Any) -> np.ndarray:
    """Return which pixels of a band have its no-data value, bool (height, width).

    Some programs write the tag of a large float with six digits: -3.40282e+38 where the pixels hold
    the lowest float32, -3.4028235e+38. Pixels that print as such a tag are equal to it.
    """
    if np.isnan(nodata):
        return np.isnan(band)
    if (
        band.dtype.kind != 'f'
        or not _LARGE <= abs(float(nodata)) < np.inf
        or band.dtype.type(f'{nodata:.6g}') != nodata
    ):
        return band == nodata
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(float(nodata)))) - 5)
    low, high = float(nodata) - half, float(nodata) + half
    return (band.astype(np.float64) >= low) & (band.astype(np.float64) <= high)


def nodata_values(source: rasterio.DatasetReader) -> Tuple[Optional[float], ...]:
    """Return the no-data value of each band of an open file; None if a band has none.

    A value of 64-bit integers is an ``int``. rasterio returns it as a float, or as None if the
    float lies beyond the type, as that of 2**63 - 1. It writes -2**63 into a GeoTIFF as
    ``-9.2233720368547758e+18``, which GDAL reads as -9. So the text in a local GeoTIFF counts.
    """
    values: Tuple[Optional[float], ...] = source.nodatavals
    wide = [dtype in ('int64', 'uint64') for dtype in source.dtypes]
    if not any(wide):
        return values
    text = _read_nodata_tag(source.name) if source.driver == 'GTiff' else ''
    return tuple(_exact(text, value) if is_wide else value for value, is_wide in zip(values, wide))


def _read_nodata_tag(path: str) -> str:
    """Return the text of GDAL's no-data tag in a local TIFF, or '' if it cannot be read."""
    try:
        with open(path, 'rb') as file:
            order = '<' if file.read(2) == b'II' else '>'

            def numbers(layout: str) -> Tuple[int, ...]:
                return struct.unpack(order + layout, file.read(struct.calcsize(order + layout)))

            is_big = numbers('H') == (43,)
            # The offset of the first directory, after two more numbers in a BigTIFF.
            file.seek(numbers('HHQ' if is_big else 'I')[-1])
            for _ in range(numbers('Q' if is_big else 'H')[0]):
                tag, _, count, offset = numbers('HHQQ' if is_big else 'HHII')
                if tag == _NODATA_TAG:
                    # A text that fits stands in place of its offset.
                    is_here = count <= (8 if is_big else 4)
                    file.seek(file.tell() - (8 if is_big else 4) if is_here else offset)
                    return file.read(count).decode('ascii').strip(' \0')
    except (OSError, struct.error, UnicodeDecodeError):
        pass
    return ''


def _exact(text: str, value: Optional[float]) -> Optional[float]:
    """Return a no-data value of 64-bit integers as an integer, or as a float if it is none.

    Args:
        text: The value in the file, or '' if it is unknown.
        value: The value as rasterio returns it.
    """
    if re.fullmatch(r'-?\d+', text):
        return int(text)
    try:
        # GDAL reads the digits at the beginning only: 1 of 1.5, and 0 of nan.
        number: Optional[float] = float(text)
    except ValueError:
        number = value
    return int(number) if number is not None and float(number).is_integer() else number


def _in_dtype(nodata: Sequence[Optional[float]], dtype: np.dtype) -> Optional[Tuple[Any, ...]]:
    """Return no-data values in a dtype.

    Returns None if a band has no such value, or one that no pixel of the dtype can equal. Then
    no pixel is invalid by its values, because all bands must equal their no-data value.
    """
    if any(value is None for value in nodata):
        return None
    if dtype.kind == 'f':
        with np.errstate(over='ignore'):
            return tuple(dtype.type(value) for value in nodata)
    limits = np.iinfo(dtype)
    if any(
        not limits.min <= value <= limits.max or value % 1  # type: ignore[operator]
        for value in nodata
    ):
        return None
    return tuple(dtype.type(int(value)) for value in nodata)  # type: ignore[arg-type]
