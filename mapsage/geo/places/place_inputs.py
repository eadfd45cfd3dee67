"""Places that a prediction maps, found as the datasets of a config find theirs.

`PlaceInputs` implements `mapsage.maps.map_model.PlaceSource`. A map has the grid of its place.

Shapes:
    values    (input_channels, height, width) float32, as `mapsage/geo/stacks/layout.py` says
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import GeoError
from mapsage.geo.passport import days_apart
from mapsage.geo.scene_facts import STORED

from .file_lists import list_text, read_list
from .place_raster import PlaceRaster, finest_image
from .places import FIRST_TILE_COUNTS, Place, find_places
from .sensor_files import SensorFiles, read_sensors

# A date of training counts as missing if no image lies within so many days of it.
_NEAR = 30

_Box = Tuple[int, int, int, int]


class ModelPlaceRaster(PlaceRaster):
    """A place with the planes of days and site, which is the whole input of a model."""

    def __init__(
        self, place: Place, sensors: Mapping[str, SensorFiles], grid: Optional[str] = None
    ) -> None:
        super().__init__(place, sensors, grid)
        self.dtype = np.dtype(np.float32)
        self.bands = tuple(range(1, self.layout.input_channels + 1))

    def _compose(self, box: _Box) -> Tuple[np.ndarray, np.ndarray]:
        values, valid = super()._compose(box)
        column, row, width, height = box
        site = self.site(column + width / 2, row + height / 2)
        return self.layout.append_planes(values, self.days, site), valid


class PlaceInputs:
    """Places in the folders and lists of a command line.

    Args:
        dataset: Config of a ``SceneStackDataset``, whose ``sensors`` and ``grid`` are used.

    Attributes:
        training_days: As in ``PlaceSource``.
    """

    def __init__(self, dataset: Mapping[str, Any]) -> None:
        self._sensors = read_sensors(dataset['sensors'], dataset.get('units', STORED))
        # There are no labels, so a grid of theirs is that of the smallest pixels.
        grid = dataset.get('grid')
        self._grid = None if grid == 'labels' else grid
        self._has_label_grid = grid == 'labels'
        self._places: Dict[str, Tuple[Place, Optional[str]]] = {}
        self.training_days: Mapping[str, Sequence[int]] = {}

    def find(self, paths: Sequence[str]) -> Dict[str, str]:
        """Return the places in folders and lists: name -> path of the file with the grid.

        Args:
            paths: Folders that take the place of ``data_root``, and lists of files.

        Raises:
            GeoError: If a path has no place, two places have one name, or files do not fit.
        """
        inputs: Dict[str, str] = {}
        for path in paths:
            if not os.path.exists(path):
                raise GeoError(
                    f'input {path} does not exist; expected a folder with files named '
                    f'{self._patterns()}, or a list of files (CSV, STAC items).'
                )
            stacks = (
                find_places(path, self._sensors)
                if os.path.isdir(path)
                else read_list(path, self._sensors)
            )
            for stack in stacks:
                if stack.name in inputs:
                    raise GeoError(
                        f'two inputs have a place {stack.name!r}; rename one, or '
                        'predict them into two folders.'
                    )
                if self._grid is not None and not stack.images[self._grid]:
                    raise GeoError(
                        f'place {stack.name!r} in {path} has no image of {self._grid!r},'
                        ' which has the grid.'
                    )
                grid = (
                    finest_image(stack, self._sensors)
                    if self._grid is None
                    else stack.images[self._grid][0].paths[0]
                )
                inputs[stack.name] = grid
                self._places[grid] = stack, grid
        return inputs

    def open(self, path: str) -> ModelPlaceRaster:
        """Return the place with a grid, with the bands that the model takes.

        Raises:
            GeoError: If a file cannot be read, or does not fit.
        """
        stack, grid = self._places[path]
        return ModelPlaceRaster(stack, self._sensors, grid)

    def dates(self, path: str) -> List[str]:
        """Return the dates of a place's images as ISO text; empty for an image without a date."""
        return [
            '' if image.date is None else image.date.isoformat()
            for name in self._sensors
            for image in self._places[path][0].images[name]
        ]

    def list_text(self, labels: Mapping[str, str]) -> str:
        """Return a list of files, CSV as ``places`` of ``SceneStackDataset``, of labeled places.

        Args:
            labels: Paths of labels by the path of the file with the grid of their place.
        """
        return list_text([(self._places[path][0], labels[path]) for path in labels], self._sensors)

    def describe(self, path: str) -> List[str]:
        """Return which dates of training a place lacks, and which images are not used."""
        stack, lines = self._places[path][0], []
        if self._has_label_grid:
            lines.append(
                f"place {stack.name!r} has the grid of {path}, because grid='labels' of "
                'the config needs labels'
            )
        for name, sensor in self._sensors.items():
            dates = [image.date for image in stack.images[name] if image.date is not None]
            if not stack.images[name]:
                lines.append(f'place {stack.name!r} has no image of sensor {name!r}')
                continue
            days = [date.timetuple().tm_yday for date in dates]
            far = [
                day
                for day in self.training_days.get(name, ())
                if days and days_apart(days, day).min() > _NEAR
            ]
            if far:
                lines.append(
                    f'place {stack.name!r} has no image of {name} within {_NEAR} days of day(s) '
                    f'{_runs(far)} of the year, when training had images; its dates are '
                    f'{", ".join(map(str, dates))}'
                )
            elif len(stack.images[name]) < sensor.max_dates:
                lines.append(
                    f'place {stack.name!r} has {len(stack.images[name])} of max_dates='
                    f'{sensor.max_dates} images of {name}'
                )
            tiled = [image.date for image in stack.images[name] if len(image.tiles) > 1]
            if tiled:
                lines.append(
                    f'place {stack.name!r} has several files of {name} at '
                    f'{", ".join(map(str, tiled))}: {FIRST_TILE_COUNTS}'
                )
            if stack.unused[name]:
                lines.append(
                    f'place {stack.name!r}: {stack.unused[name]} image(s) of {name} are '
                    f'not used; those used are {", ".join(map(str, dates))}'
                )
        return lines

    def _patterns(self) -> str:
        return ' and '.join(str(sensor.scenes) for sensor in self._sensors.values())


def _runs(days: Sequence[int]) -> str:
    """Return sorted days as text, with gaps of up to ten days joined: '40-52, 196'."""
    runs: List[List[int]] = []
    for day in days:
        if runs and day - runs[-1][1] <= 10:
            runs[-1][1] = day
        else:
            runs.append([day, day])
    return ', '.join(f'{first}' if first == last else f'{first}-{last}' for first, last in runs)
