"""Normalization of images with any number of bands.

MMSegmentation's preprocessor accepts a mean of one or three channels only. `BandDataPreProcessor`
removes this limit; everything else it does is in `batch_preprocessor.py`.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from mmseg.registry import MODELS

from .batch_preprocessor import SegDataPreProcessor


@MODELS.register_module()
class BandDataPreProcessor(SegDataPreProcessor):
    """MMSeg's ``SegDataPreProcessor`` for any number of bands; the base class allows one or three.

    Args:
        mean: Mean of each band, in the order of the image's bands and in the units of the image;
            ``tools/geotiff_statistics.py`` prints the mean and standard deviation of a dataset.
            None: images are not normalized.
        std: Standard deviation of each band, in the same units; None only if ``mean`` is None.
        **kwargs: As in ``SegDataPreProcessor``.

    Raises:
        ValueError: If ``mean`` and ``std`` differ in length, or a value of ``std`` is not positive.
    """

    def __init__(
        self,
        mean: Optional[Sequence[float]] = None,
        std: Optional[Sequence[float]] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise ValueError(
                f'mean={mean} and std={std}, expected two lists with one number for each band'
            )
        if mean is None or std is None:
            return
        if min(std) <= 0:
            raise ValueError(f'std={std}, expected numbers above 0; leave a constant band out')
        # These are the attributes that the base class would set for one or three channels.
        self._enable_normalize = True
        self.register_buffer('mean', torch.tensor(mean).float().view(-1, 1, 1), False)
        self.register_buffer('std', torch.tensor(std).float().view(-1, 1, 1), False)
