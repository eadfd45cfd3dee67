"""Windows of places that several sensors show at several dates.

`SceneStackDataset` is a `GeoTiffDataset` whose scenes are places. The base class does windows,
splits, areas of interest and labels; only the pixels differ (`mapsage/geo/places/`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmseg.registry import DATASETS

from mapsage.base.console import shorten_list
from mapsage.datasets.geotiff import GeoTiffDataset
from mapsage.geo import GeoError, LabelFiles, Raster, RasterLabels, facts_of, locate
from mapsage.geo.passport import describe_mixture
from mapsage.geo.places.file_lists import read_list
from mapsage.geo.places.place_raster import PlaceRaster
from mapsage.geo.places.places import FIRST_TILE_COUNTS, Place, find_places
from mapsage.geo.places.sensor_files import read_sensors
from mapsage.geo.scene_facts import STORED, images_by_sensor
from mapsage.geo.stacks import StackLayout

# Largest number of places or files that a text names.
_SHOWN = 4


@DATASETS.register_module()
class SceneStackDataset(GeoTiffDataset):
    """Windows of places, each with images of several sensors and dates on one grid.

    * Image: (window, window, channels) as `mapsage/geo/stacks/layout.py` says: the bands of every
      sensor and date, then a plane per date that is 1 where the date has data. uint8 if all files
      are, else float32.
    * Grid: of the first image of the sensor with the smallest pixels, and of several such sensors
      of the one with the most bands; or of ``grid``. Files off this grid are interpolated, pixels
      bilinearly and masks by the nearest pixel; the log says which.
    * Dates of a sensor: in the order of time, at most ``max_dates``. If a place has more, those
      evenly spread over its series are used, the first and the last included; if it has fewer, the
      rest of the image is 0 and invalid.
    * Labels: one raster or one file of polygons a place, as in ``GeoTiffDataset``; a raster lies on
      the grid. All dates of a place are in the same part of a ``split``.
    * Mask: 255 where no date of any sensor has data.

    The pipeline begins with ``LoadSceneStack`` and ``LoadGeoTiffLabels`` and ends with
    ``PackStackInputs``; the model has a ``StackDataPreProcessor`` with the same sensors.

    Args:
        sensors: Settings of each sensor by its name; the channels are in the order of the names:
            ``scenes``: pattern of its files relative to ``data_root``, with ``{place}`` and
            ``{date}`` (YYYYMMDD or YYYY-MM-DD, also with a time), and with ``{band}`` if every band
            is a file; without ``{date}`` for images without a date, such as a terrain model.
            ``bands``: numbers, counted from 1, or descriptions of the bands.
            ``max_dates``: number of dates in a sample, default 1.
            ``clouds``: ``dict(mask=PATTERN, clear=[VALUES])`` for files of classes, such as SCL, or
            ``dict(band=BAND, clear=[VALUES])`` for a band of the image; other values are clouded,
            and invalid.
            ``units``: as in ``GeoTiffDataset``, for this sensor.
        window: Side of a window in pixels of the grid.
        places: Path of a list of the files in place of patterns, relative to ``data_root``: a CSV
            with the columns place, sensor, date and path, or STAC items (docs/how-to/
            scene-stacks.md).
        grid: Name of the sensor that has the grid, or ``'labels'`` for the grid of the label
            rasters; default: the sensor with the smallest pixels.
        labels: As in ``GeoTiffDataset``, where the name of a label file is the name of the place;
            or a pattern such as ``'labels/{place}_classes.tif'``.
        **kwargs: Arguments of ``GeoTiffDataset``, without ``scenes`` and ``bands``.

    Attributes:
        layout: Order of the channels.
        places: Path of the list, or None.

    Raises:
        GeoError: If files are missing, cannot be read or do not fit together.
    """

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        window: int,
        places: Optional[str] = None,
        grid: Optional[str] = None,
        labels: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        for name in ('scenes', 'bands'):
            if kwargs.pop(name, None) is not None:
                raise GeoError(f'SceneStackDataset has no {name}: give it to each of the sensors.')
        self.sensors = read_sensors(sensors, kwargs.get('units', STORED))
        self.layout = StackLayout.of_config(sensors)
        self.places, self.grid = places, grid
        self._stack_files: List[Place] = []
        if grid not in (None, 'labels', *self.sensors):
            raise GeoError(
                f"grid={grid!r}, expected the name of a sensor, {list(self.sensors)}, or 'labels'."
            )
        patterns = [str(sensor.scenes) for sensor in self.sensors.values()]
        super().__init__(
            scenes=patterns if places is None else [places], window=window, labels=labels, **kwargs
        )

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry per window that holds data, as in ``GeoTiffDataset``."""
        self._stack_files = self._find_places()
        if self.labels is None and any(files.labels for files in self._stack_files):
            # The list names the labels.
            self.labels = self.places
        entries = super().load_data_list()
        stacks = [facts['stack'] for facts in self.scene_facts]
        if get_dist_info()[0] == 0:
            self._report(stacks)
        # Saved in checkpoints, so that a prediction can tell which dates a place lacks.
        self._metainfo['stack_days'] = {
            sensor: sorted(
                {
                    image.date.timetuple().tm_yday
                    for stack in stacks
                    for image in stack.place.images[sensor]
                    if image.date is not None
                }
            )
            for sensor in self.sensors
        }
        return entries

    def describe_images(self) -> str:
        """Return text on sensors, dates and bands, for the log."""
        return 'of ' + ' and '.join(
            f'{sensor.name} ({sensor.max_dates} date(s) of {len(sensor.bands)} band(s))'
            for sensor in self.layout.sensors
        )

    def read_rasters(self) -> List[str]:
        """Return the paths of all rasters that samples are read from: images, masks, labels."""
        paths = [path for facts in self.scene_facts for path in facts['stack'].source_paths()]
        paths += [
            facts['labels'].path
            for facts in self.scene_facts
            if isinstance(facts['labels'], RasterLabels)
        ]
        return list(dict.fromkeys(paths))

    def _open_scenes(self) -> Iterator[Raster]:
        for stack_files in self._stack_files:
            yield PlaceRaster(stack_files, self.sensors, self._grid_path(stack_files))

    def _find_places(self) -> List[Place]:
        if self.places is None:
            return find_places(self.data_root, self.sensors)
        return read_list(locate(self.data_root, self.places), self.sensors)

    def _grid_path(self, stack_files: Place) -> Optional[str]:
        """Return the file whose grid a place has; None for that of the smallest pixels."""
        if self.grid is None:
            return None
        if self.grid == 'labels':
            path = self._labels_of_place(stack_files, None)
            if path is None:
                raise GeoError(
                    "grid='labels', but the dataset has no labels; set labels=, or name a sensor."
                )
            return path
        images = stack_files.images[self.grid]
        if not images:
            raise GeoError(
                f'place {stack_files.name!r} has no image of {self.grid!r}, which has '
                f'the grid; add one, leave the place out, or set another grid=.'
            )
        return images[0].paths[0]

    def _explain_no_data(self) -> str:
        masks = [
            (sensor, image.mask or image.paths[0])
            for sensor in self.sensors.values()
            if sensor.clouds is not None
            for image in self._stack_files[0].images[sensor.name]
        ]
        if not masks:
            return super()._explain_no_data()
        sensor, path = masks[0]
        assert sensor.clouds is not None, 'chosen above'
        return (
            f'at every date all is clouded or no-data. clouds= of sensor {sensor.name!r} '
            f'counts the classes {list(sensor.clouds.clear)} as clear; compare them with '
            f'the classes in {path} (rio info --stats), and check the no-data values.'
        )

    def _pixel_facts(self, scene: Raster) -> Dict[str, Any]:
        assert isinstance(scene, PlaceRaster)
        return dict(scene=scene.path, pixels=scene.path, bands=None, stack=scene)

    def _read_copies(self, scene: Dict[str, Any], copies: Mapping[str, str]) -> None:
        scene['stack'] = scene['stack'].read_from(copies)

    def _label_path(self, scene: Raster, label_files: LabelFiles) -> str:
        assert isinstance(scene, PlaceRaster)
        path = self._labels_of_place(scene.place, label_files)
        assert path is not None, 'the dataset has labels'
        return path

    def _labels_of_place(
        self, stack_files: Place, label_files: Optional[LabelFiles]
    ) -> Optional[str]:
        """Return the path of the labels of a place, or None if the dataset has no labels."""
        if stack_files.labels is not None:
            return stack_files.labels
        if self.labels is None:
            return None
        if self.labels == self.places:
            raise GeoError(
                f'place {stack_files.name!r} has no labels in the list {self.places}, '
                'and other places have; fill the column labels, or remove the place.'
            )
        if '{place}' in self.labels:
            path = os.path.join(
                self.data_root or '', self.labels.replace('{place}', stack_files.name)
            )
            if not os.path.exists(path):
                raise GeoError(
                    f'place {stack_files.name!r} has no labels {path}, which '
                    f'labels={self.labels!r} names; add them, or leave the place out.'
                )
            return path
        label_files = label_files or LabelFiles(locate(self.data_root, self.labels))
        # A suffix, so that a point in the name of a place does not begin one.
        return label_files.find(f'{stack_files.name}.tif')

    def _report(self, stacks: List[PlaceRaster]) -> None:
        """Write into the log how the files of the places fit together."""
        for text, level in describe_stacks(stacks):
            print_log(f'SceneStackDataset: {text}', logger='current', level=level)


def describe_stacks(stacks: List[PlaceRaster]) -> Iterator[Tuple[str, int]]:
    """Yield what a user should know about the files of places, with the level of the message.

    Args:
        stacks: Places, opened.
    """
    for sensor in stacks[0].layout.sensors:
        counts = [len(stack.place.images[sensor.name]) for stack in stacks]
        if min(counts) < sensor.max_dates:
            few = [
                stack.place.name for stack, count in zip(stacks, counts) if count < sensor.max_dates
            ]
            yield (
                f'{len(few)} of {len(stacks)} place(s) have fewer than max_dates='
                f'{sensor.max_dates} images of {sensor.name}, the fewest {min(counts)}: '
                f'{shorten_list(few, _SHOWN)}. The other dates are missing there',
                logging.INFO,
            )
        unused = sum(stack.place.unused[sensor.name] for stack in stacks)
        if unused:
            yield (
                f'{unused} image(s) of {sensor.name} are not used, because there are more than '
                f'max_dates={sensor.max_dates}; those used are evenly spread over the dates of '
                f'a place',
                logging.INFO,
            )
        tiled = [
            stack.place.name
            for stack in stacks
            for image in stack.place.images[sensor.name]
            if len(image.tiles) > 1
        ]
        if tiled:
            yield (
                f'{len(tiled)} date(s) of {sensor.name} have several files: '
                f'{FIRST_TILE_COUNTS}. The places are '
                f'{shorten_list(list(dict.fromkeys(tiled)), _SHOWN)}',
                logging.INFO,
            )
        scenes = images_by_sensor(stacks).get(sensor.name, [])
        for text in describe_mixture([facts_of(raster) for raster in scenes]):
            yield text, logging.WARNING
    resampled = [entry for stack in stacks for entry in stack.resampled]
    if resampled:
        reasons = Counter(reason for _, reason in resampled)
        listed = ', '.join(f'{count} ({reason})' for reason, count in reasons.items())
        yield (
            f'{len(resampled)} file(s) are interpolated onto the grid of their place, pixels '
            f'bilinearly and masks by the nearest pixel: {listed}; the first is '
            f'{resampled[0][0]}',
            logging.INFO,
        )
    finer = [path for stack in stacks for path in stack.much_finer_files()]
    if finer:
        yield (
            f'{len(finer)} file(s) have pixels less than half as wide as the grid of their '
            f'place, and single pixels of them are taken: {shorten_list(finer, _SHOWN)}. Set grid= to the '
            f'sensor with the smallest pixels, or average the files first (gdalwarp -r '
            f'average)',
            logging.WARNING,
        )
    unclear = [
        image.paths[0]
        for stack in stacks
        for images in stack.place.images.values()
        for image in images
        if image.may_be_next_year
    ]
    if unclear:
        yield (
            f'{len(unclear)} file(s) have a time near New Year without a time zone, which is '
            f'taken as UTC, so that their year may be wrong: {shorten_list(unclear, _SHOWN)}. Add Z or the '
            f'offset to the time, such as T233000Z',
            logging.WARNING,
        )
