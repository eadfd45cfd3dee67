"""What is known of the pixels of a dataset's images: facts of all, quantiles of at most 32 of them.

Quantiles are read at the first start only (`shared_scan.py`), and only where they are asked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import List, Sequence

from mapsage.geo import Raster, facts_of
from mapsage.geo.places.dates import spread_evenly
from mapsage.geo.scene_facts import Sampled, sample_quantiles

from .shared_scan import scan_scenes

_SAMPLED = 32


class PixelSource:
    """Images that a model sees as one kind.

    Args:
        images: Opened images, evenly spread samples of which are examined.

    Attributes:
        facts: Facts of the images.
    """

    def __init__(self, images: Sequence[Raster]) -> None:
        self.facts = [facts_of(image) for image in images]
        self._images = spread_evenly(images, _SAMPLED)

    @cached_property
    def sampled(self) -> List[Sampled]:
        """The examined images.

        Raises:
            RasterBlockError: If an image is damaged.
        """
        conversions = [str(image.conversion) for image in self._images]
        rows = scan_scenes(self._images, ('quantiles',), sample_quantiles, conversions)
        return list(zip(map(facts_of, self._images), rows))
