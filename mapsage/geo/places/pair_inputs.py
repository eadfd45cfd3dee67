"""Two scenes, before and after, that a prediction maps with a model of ``ChangeDataset``.

`PairInputs` implements `mapsage.maps.map_model.PlaceSource`: the pair is a place with one sensor
and two dates. The map has the grid of both scenes.
"""

from __future__ import annotations

import datetime
import logging
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import GeoError, facts_of, output_name
from mapsage.geo.registration import ShiftReport, check_same_grid, measure_shift
from mapsage.geo.scene_facts import STORED, check_one_unit, open_scenes
from mapsage.geo.stacks import StackLayout

from .place_inputs import ModelPlaceRaster
from .places import DatedImage, Place
from .sensor_files import SensorFiles

# A day in a file name, as 20190614 or 2019-06-14, with no digit next to it.
_DAY = re.compile(r'(?<!\d)((?:19|20)\d\d)([-_]?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])(?!\d)')


class PairRaster(ModelPlaceRaster):
    """A pair of scenes as the input of a model; pixels without data at one date are invalid."""

    def _compose(self, box: Tuple[int, int, int, int]) -> Tuple[np.ndarray, np.ndarray]:
        values, _ = super()._compose(box)
        first = self.layout.pixel_channels
        return values, np.all(values[first : first + self.layout.dates] > 0, axis=0)


class PairInputs:
    """The pair of scenes of a command line.

    Args:
        dataset: Config of a ``ChangeDataset``, whose ``sensors``, ``units`` and ``max_shift`` are used.

    Attributes:
        training_days: Not used: a pair may have any two dates.
    """

    def __init__(self, dataset: Mapping[str, Any]) -> None:
        (sensor,) = StackLayout.of_config(dataset['sensors']).sensors
        self._bands = [int(band) for band in sensor.bands]
        self._sensor = SensorFiles(
            sensor.name, None, tuple(self._bands), 2, None, dataset.get('units', STORED)
        )
        self._max_shift: Optional[float] = dataset.get('max_shift', 1.0)
        self._pairs: Dict[str, Place] = {}
        self.training_days: Mapping[str, Sequence[int]] = {}

    def find(self, paths: Sequence[str]) -> Dict[str, str]:
        """Return the pair: name of the map -> path of the first scene.

        Args:
            paths: The scenes before and after.

        Raises:
            GeoError: If there are not two scenes, they lie on different grids, their scale or
                offset differs, or the dates in their names are in the wrong order.
        """
        if len(paths) != 2:
            raise GeoError(
                f'{len(paths)} input(s), and the model compares two dates: give two '
                f'scenes, first the one before, then the one after.'
            )
        images = [DatedImage(day_in_name(path), (str(path),)) for path in paths]
        first, second = open_scenes(paths, self._bands, (), self._sensor.units)
        check_same_grid(first, second)
        check_one_unit(map(facts_of, (first, second)))
        days = [image.date for image in images]
        if None not in days and days[0] > days[1]:  # type: ignore[operator]
            raise GeoError(
                f'{paths[0]} is of {days[0]} and {paths[1]} of {days[1]}, by their '
                f'names: the dates are swapped. Give the earlier scene first.'
            )
        name = f'{output_name(paths[0])}_to_{output_name(paths[1])}'
        self._pairs[str(paths[0])] = Place(
            name, {self._sensor.name: images}, {self._sensor.name: 0}
        )
        return {name: str(paths[0])}

    def open(self, path: str) -> PairRaster:
        """Return the pair with a first scene, with the bands that the model takes."""
        return PairRaster(self._pairs[path], {self._sensor.name: self._sensor}, path)

    def describe(self, path: str) -> List[str]:
        """Return the shift between the scenes, and whether their dates are unknown."""
        lines = []
        first, second = self._images(path)
        if self._max_shift is not None:
            report = measure_shift(first.paths[0], second.paths[0], self._bands)
            lines.append(shift_note(report, self._max_shift)[1])
        if '' in self.dates(path):
            lines.append(
                'the dates are not known: no name has a day such as 20190614. The first '
                f'scene, {Path(path).name}, counts as the one before'
            )
        return lines

    def dates(self, path: str) -> List[str]:
        """Return the dates of the pair as ISO text, empty if unknown."""
        return [
            '' if image.date is None else image.date.isoformat() for image in self._images(path)
        ]

    def _images(self, path: str) -> Tuple[DatedImage, DatedImage]:
        first, second = self._pairs[path].images[self._sensor.name]
        return first, second


def day_in_name(path: str) -> Optional[datetime.date]:
    """Return the day in a file's name; None if it has no day, or several different ones."""
    days = set()
    for year, _, month, day in _DAY.findall(Path(path).stem):
        try:
            days.add(datetime.date(int(year), int(month), int(day)))
        except ValueError:
            # Digits such as 20190231 are no day.
            continue
    return days.pop() if len(days) == 1 else None


def shift_note(report: ShiftReport, max_shift: float) -> Tuple[int, str]:
    """Return a logging level and a text on the shift between two dates."""
    is_large = report.largest > max_shift
    return logging.WARNING if is_large else logging.INFO, (
        f'shift between the dates: {report.describe()}'
        + (
            f'. That is more than max_shift={max_shift:g}: borders will look like change. Align '
            + ('the images, or train with ShiftDate' if report.length > max_shift else 'the images')
            + ' (docs/how-to/change.md).'
            if is_large
            else ''
        )
    )
