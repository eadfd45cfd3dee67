"""Fields of polygons of change: the classes at both dates, the dates, and a score.

The score of a polygon is the mean confidence of its pixels, read window by window from the map's
confidence raster.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import rasterio
import rasterio.features
import shapely
from affine import Affine
from rasterio.windows import Window

from .errors import PathName
from .gdal_files import open_file
from .polygon_layer import FieldValues, Piece

# Value of a confidence raster without data; other values are percents.
_NO_CONFIDENCE = 255


class ChangeFields:
    """Fields ``from_class``, ``to_class``, ``date_from``, ``date_to`` and ``score``.

    Args:
        transitions: Classes at both dates of each class of the map; None for a class, such as
            'changed', that does not name them.
        dates: The two dates as ISO text, such as '2019-06-14'; empty if unknown.
        confidence: Path of the map's confidence raster; None for a map without one, where the score
            is null.
    """

    def __init__(
        self,
        transitions: Sequence[Optional[Tuple[str, str]]],
        dates: Tuple[str, str] = ('', ''),
        confidence: Optional[PathName] = None,
    ) -> None:
        self._transitions, self._dates = list(transitions), dates
        self._confidence = None if confidence is None else str(confidence)

    def of(self, pieces: Sequence[Piece]) -> Dict[str, FieldValues]:
        """Return the values of some polygons by the name of their field."""
        pairs = [self._transitions[piece.label] for piece in pieces]
        unknown = np.array([pair is None for pair in pairs], bool)
        fields: Dict[str, FieldValues] = {}
        for side, (name, date_name) in enumerate(
            (('from_class', 'date_from'), ('to_class', 'date_to'))
        ):
            fields[name] = FieldValues(
                np.array(['' if pair is None else pair[side] for pair in pairs], object), unknown
            )
            date = self._dates[side]
            fields[date_name] = FieldValues(
                np.array([date] * len(pieces), object), np.full(len(pieces), not date)
            )
        scores = self._scores(pieces)
        fields['score'] = FieldValues(scores, np.isnan(scores))
        return fields

    def _scores(self, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the mean confidence of the pixels of each polygon, 0 to 1; NaN if unknown."""
        scores: np.ndarray = np.full(len(pieces), np.nan)
        if self._confidence is None or not pieces:
            return scores
        with open_file(self._confidence) as source:
            for number, piece in enumerate(pieces):
                percents = _pixels_inside(source, piece.polygon)
                known = percents[percents != _NO_CONFIDENCE]
                if len(known):
                    # A mean with few digits, so that it reads well in a table.
                    scores[number] = round(float(known.mean()) / 100, 4)
        return scores


def _pixels_inside(source: rasterio.DatasetReader, polygon: shapely.Polygon) -> np.ndarray:
    """Return the values of the pixels of a polygon, given in pixel corners."""
    left, top, right, bottom = (int(value) for value in shapely.bounds(polygon))
    values = source.read(1, window=Window(left, top, right - left, bottom - top))
    inside: List[Tuple[shapely.Polygon, int]] = [(polygon, 1)]
    mask = rasterio.features.rasterize(
        inside, values.shape, dtype='uint8', transform=Affine.translation(left, top)
    )
    return values[mask > 0]
