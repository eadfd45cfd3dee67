"""What is known of the pixels of a dataset's images: facts of all, quantiles of at most 32 of them.

Quantiles are read at the first start only (`shared_scan.py`), and only where they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional, Sequence

import numpy as np

from mapsage.geo import Raster, SceneFacts, facts_of
from mapsage.geo.scene_facts import sample_quantiles

from .shared_scan import scan_scenes

_SAMPLED = 32


@dataclass
class PixelSource:
    """Images that a model sees as one kind.

    Attributes:
        units: Unit in which they are read.
        facts: Facts of the images.
        reordered: Paths of the images whose bands are read in another order than the file's.
        sampled: Numbers of the images of which quantiles are known.
    """

    units: str
    facts: List[SceneFacts]
    reordered: List[str]
    sampled: List[int]
    _rasters: List[Raster] = field(repr=False, default_factory=list)
    _quantiles: Optional[List[Optional[np.ndarray]]] = field(repr=False, default=None)

    @classmethod
    def of(cls, images: Sequence[Raster], units: str) -> PixelSource:
        """Return the source of opened images, evenly spread samples of which are examined."""
        step = max(1, -(-len(images) // _SAMPLED))
        numbers = list(range(0, len(images), step))
        return cls(
            units,
            [facts_of(image) for image in images],
            [image.path for image in images if image.reordered],
            numbers,
            [images[number] for number in numbers],
        )

    def quantiles(self) -> List[Optional[np.ndarray]]:
        """Return quantiles (bands, quantiles) for each image; None for those not examined.

        Raises:
            RasterBlockError: If an image is damaged.
        """
        if self._quantiles is None:
            rows = scan_scenes(
                self._rasters,
                ('quantiles',),
                _scan,
                [str(image.conversion) for image in self._rasters],
            )
            self._quantiles = [None] * len(self.facts)
            for number, quantiles in zip(self.sampled, rows):
                self._quantiles[number] = quantiles
        return self._quantiles


def _scan(raster: Raster) -> np.ndarray:
    try:
        return sample_quantiles(raster)
    finally:
        raster.close()
