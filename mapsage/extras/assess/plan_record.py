"""What a plan stores about its map and strata, so that labels can be evaluated later.

The record is JSON in the table `mapsage_plan` of the points' GeoPackage (`points_file.py`). It has
the areas of the strata and the means of the probabilities, so a report needs no second census.

Shapes (H strata, K classes of the map):
    composition    (H, K) share of each map class in the area of a stratum
    probability    (H, K, K) area-weighted mean of [map class = m] * probability of class k
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, List, Optional, Tuple

import numpy as np

from mapsage.base.files import parse_json

from .errors import AssessError

SIMPLE, BY_AREA = 'simple', 'area'
"""Ways to draw the points of a stratum: all pixels alike, or in proportion to their area."""


@dataclass(frozen=True)
class PlanRecord:
    """Design of a survey.

    Attributes:
        map: Path of the map for which the plan was made.
        digest: Digest of this map.
        unit: Unit of ``area``: ``'m2'``, or ``'px'`` for a map without georeference.
        class_names: Names of the classes of the map.
        palette: RGB color of each class.
        strata: Names of the strata.
        area: Area of each stratum.
        pixels: Pixels of each stratum.
        points: Points drawn from each stratum.
        composition: See the shapes of the module.
        probability: See the shapes of the module; None without probabilities.
        allocation: How the points were divided among the strata.
        threshold: Confidence in percent below which pixels of common classes are in the doubtful
            stratum; 0 without such a stratum.
        seed: Seed of the draw.
        version: Version of MapSage that wrote the plan.
        draw: ``SIMPLE`` if all pixels of a stratum had the same chance; ``BY_AREA`` in plans of
            earlier versions, which do not say it.
    """

    map: str
    digest: str
    unit: str
    class_names: List[str]
    palette: List[Tuple[int, int, int]]
    strata: List[str]
    area: List[float]
    pixels: List[int]
    points: List[int]
    composition: List[List[float]]
    probability: Optional[List[List[List[float]]]]
    allocation: str
    threshold: int
    seed: int
    version: str
    draw: str = BY_AREA

    @property
    def total_area(self) -> float:
        """Area of the map in ``unit``."""
        return float(sum(self.area))

    @property
    def shares(self) -> np.ndarray:
        """Share of the area of each stratum, float64 ``(H,)``."""
        return np.array(self.area) / self.total_area

    @property
    def mapped_shares(self) -> np.ndarray:
        """Share of the area that each class has on the map, float64 ``(K,)``."""
        return self.shares @ np.array(self.composition)

    def to_text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str, path: str) -> PlanRecord:
        """Return the record of a JSON text.

        Args:
            text: The text.
            path: Path of its file, for an error message.

        Raises:
            AssessError: If the text is no record.
        """
        try:
            record = cls(**parse_json(text))
            record.check()
        except (TypeError, ValueError) as error:
            raise AssessError(
                f'{path}: the plan in its table mapsage_plan cannot be read ({error}). Take the '
                'file that mapsage assess plan wrote, or make the plan again.'
            ) from error
        return record

    def check(self) -> None:
        """Raise ValueError if lengths or numbers of the record cannot be."""
        strata, classes = len(self.strata), len(self.class_names)
        numbers: List[Any] = [
            ('area', self.area, (strata,)),
            ('pixels', self.pixels, (strata,)),
            ('points', self.points, (strata,)),
            ('composition', self.composition, (strata, classes)),
            ('palette', self.palette, (classes, 3)),
        ]
        if self.probability is not None:
            numbers.append(('probability', self.probability, (strata, classes, classes)))
        for name, values, shape in numbers:
            array = np.array(values, float)
            if array.shape != shape or not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(
                    f'{name} holds {str(values)[:60]}, expected numbers of shape {shape}, 0 or more'
                )
        if (np.array(self.points) > np.array(self.pixels)).any():
            raise ValueError(
                f'points are {self.points}, expected at most the pixels of the '
                f'strata, {self.pixels}'
            )
        if self.draw not in (SIMPLE, BY_AREA):
            raise ValueError(f'draw is {self.draw!r}, expected {SIMPLE!r} or {BY_AREA!r}')
        if (
            not strata
            or min(self.area) <= 0
            or not all(isinstance(name, str) for name in [*self.strata, *self.class_names])
        ):
            raise ValueError('strata need names and areas above 0')
