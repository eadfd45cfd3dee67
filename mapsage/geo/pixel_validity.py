"""Which pixels of a raster hold data: one rule for every program that reads a scene.

A pixel is invalid

- where the mask of the file or its alpha band is 0;
- where every band that is read equals its no-data value;
- where a band that is read is NaN or infinite.

All apply together: a file may have an alpha band and a no-data value. In a valid pixel every band
keeps its value, also one that equals no-data: with no-data 255, the saturated green of a white roof
is a measurement, and 0 in its place is another color. docs/maps.md compares this with GDAL and
rasterio.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np
from rasterio.enums import ColorInterp, MaskFlags

# Flags of a band whose mask is none of its own: its pixels are all valid, or no-data or alpha hides
# them, which are read here.
_OTHERWISE_KNOWN = {MaskFlags.all_valid, MaskFlags.nodata, MaskFlags.alpha}


@dataclass(frozen=True)
class PixelValidity:
    """What makes pixels of some bands of a file invalid.

    Attributes:
        mask: ``'dataset'`` for one mask of all bands, ``'bands'`` for a mask of each, or None.
        alpha: Number of the alpha band, counted from 1, or None.
        nodata: No-data value of each band in the dtype of the file; None if a band has none.
        may_be_nan: Whether the values can be NaN or infinite.
    """

    mask: Optional[str]
    alpha: Optional[int]
    nodata: Optional[Tuple[Any, ...]]
    may_be_nan: bool

    @classmethod
    def of(cls, source: Any, bands: Sequence[int], dtype: np.dtype) -> PixelValidity:
        """Return the validity of the bands of an open file.

        An alpha band that is among ``bands`` is data.
        """
        flags = [set(source.mask_flag_enums[band - 1]) for band in bands]
        alpha = [band for band, kind in zip(source.indexes, source.colorinterp)
                 if kind == ColorInterp.alpha]
        mask = None
        if MaskFlags.per_dataset in flags[0] and MaskFlags.alpha not in flags[0]:
            mask = 'dataset'
        elif any(not flag & _OTHERWISE_KNOWN for flag in flags):
            mask = 'bands'
        return cls(mask, None if not alpha or set(alpha) & set(bands) else alpha[0],
                   _in_dtype([source.nodatavals[band - 1] for band in bands], dtype),
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
            by_value: Whether no-data values count.
        """
        valid = np.ones(values.shape[1:], bool)
        if self.alpha is not None:
            valid &= read_alpha() != 0
        if self.mask is not None:
            valid &= (read_masks() != 0).any(0)
        if self.nodata is not None and by_value:
            hidden = np.ones(values.shape[1:], bool)
            for band, nodata in zip(values, self.nodata):
                hidden &= np.isnan(band) if np.isnan(nodata) else band == nodata
            valid &= ~hidden
        if self.may_be_nan:
            valid &= np.isfinite(values).all(0)
        if not valid.all():
            np.copyto(values, 0, where=~valid)
        return valid

    def facts(self) -> Dict[str, Any]:
        """Return it as values of JSON, which has no NaN."""
        return dict(mask=self.mask, alpha=self.alpha,
                    nodata=None if self.nodata is None else [str(float(each))
                                                             for each in self.nodata])


def _in_dtype(nodata: Sequence[Optional[float]], dtype: np.dtype) -> Optional[Tuple[Any, ...]]:
    """Return no-data values in a dtype; None if a band has none that a pixel can equal."""
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
