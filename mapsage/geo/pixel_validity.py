"""Which pixels of a raster have data: one rule for every program that reads a scene.

A pixel is invalid if one of these conditions holds:

- the mask of the file or its alpha band is 0;
- every band that is read equals its no-data value;
- a band that is read is NaN or infinite.

In a valid pixel every band keeps its value, even if that equals no-data. Example: with no-data 255,
the saturated green of a white roof is a measurement, and 0 instead would be another color.
docs/how-to/maps.md compares this rule with GDAL and rasterio. `Raster` in `raster.py` applies it.
"""
from __future__ import annotations

import math
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
    def of(cls, source: rasterio.DatasetReader, bands: Sequence[int],
           dtype: np.dtype) -> PixelValidity:
        """Return the validity of the bands of an open file.

        An alpha band that is among ``bands`` counts as data, not as a mask.
        """
        # GDAL looks at all bands for each of these tuples.
        mask_flags, nodata = source.mask_flag_enums, source.nodatavals
        flags = [set(mask_flags[band - 1]) for band in bands]
        alpha = [band for band, kind in zip(source.indexes, source.colorinterp)
                 if kind == ColorInterp.alpha]
        mask = None
        if MaskFlags.per_dataset in flags[0] and MaskFlags.alpha not in flags[0]:
            mask = 'dataset'
        elif any(not flag & _NO_STORED_MASK for flag in flags):
            mask = 'bands'
        return cls(mask, None if not alpha or set(alpha) & set(bands) else alpha[0],
                   _in_dtype([nodata[band - 1] for band in bands], dtype),
                   dtype.kind == 'f')

    @property
    def may_hide(self) -> bool:
        """Whether a pixel may be invalid."""
        return bool(self.mask or self.alpha or self.nodata or self.may_be_nan)

    def apply(self, values: np.ndarray, read_alpha: Callable[[], np.ndarray],
              read_masks: Callable[[], np.ndarray], by_value: bool = True) -> np.ndarray:
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
        return dict(mask=self.mask, alpha=self.alpha,
                    nodata=None if self.nodata is None else [str(float(value))
                                                             for value in self.nodata])


def _equals(band: np.ndarray, nodata: Any) -> np.ndarray:
    """Return which pixels of a band have its no-data value, bool (height, width).

    Some programs write the tag of a large float with six digits: -3.40282e+38 where the pixels hold
    the lowest float32, -3.4028235e+38. Pixels that print as such a tag are equal to it.
    """
    if np.isnan(nodata):
        return np.isnan(band)
    if band.dtype.kind != 'f' or not _LARGE <= abs(float(nodata)) < np.inf \
            or band.dtype.type(f'{nodata:.6g}') != nodata:
        return band == nodata
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(float(nodata)))) - 5)
    low, high = float(nodata) - half, float(nodata) + half
    return (band.astype(np.float64) >= low) & (band.astype(np.float64) <= high)


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
    if any(not limits.min <= value <= limits.max or value % 1  # type: ignore[operator]
           for value in nodata):
        return None
    return tuple(dtype.type(int(value)) for value in nodata)  # type: ignore[arg-type]
