"""All images of a place as one raster: the bands of a stack, read on one grid.

`PlaceRaster` has the interface of `Raster`, so windows, splits, areas of interest, labels and maps
treat a place like a scene. Nothing is copied or built beforehand: a window is composed of the files
when it is read. `mapsage/geo/stacks/layout.py` says which band is what.

Shapes:
    values    (image_channels, height, width): pixels of all dates, then 1 where they are valid
    valid     (height, width) bool: any date of any sensor is valid
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.geo import (
    BLOCK,
    GeoError,
    Globe,
    Raster,
    RasterOnGrid,
    box_on_grid,
    open_raster,
    pixel_side,
    read_on_grid,
)
from mapsage.geo.grid_position import intersection, slices_in
from mapsage.geo.scene_facts import STORED, facts_of, open_scene
from mapsage.geo.sensor_rules import Product
from mapsage.geo.stacks import NO_DAY, StackLayout, day_number

from .places import DatedImage, Place
from .sensor_files import Band, SensorFiles

# Pixels of the grid that are so many times as wide as those in a file are worth a warning.
_MUCH_FINER = 2.0

# Pixels whose sides differ by this factor at most have the same size: a projection changes sizes.
_SAME_SIDE = 1.01

# Columns that are read at a time to find valid pixels.
_SCAN_WIDTH = 1024

Box = Tuple[int, int, int, int]


class _BandFile(NamedTuple):
    """A file of an image, and which bands of it are read."""

    path: str
    bands: Tuple[int, ...]
    position: RasterOnGrid

    def read(
        self, box: Box, copies: Mapping[str, str], nearest: bool = False
    ) -> Tuple[np.ndarray, np.ndarray]:
        path = copies.get(self.path, self.path)
        raster = open_raster(path, self.bands, conversion=self.position.raster.conversion)
        return self.position.read(box, raster, nearest)


class _Layer:
    """A date of a sensor, on the grid of the place.

    Args:
        image: Files of the image.
        sensor: Settings of the sensor.
        grid: Raster with the grid.

    Attributes:
        files: Files of the bands.
        mask: Band of classes that tells which pixels are clouded, or None.
        box: Extent of the image on the grid.
    """

    def __init__(self, image: DatedImage, sensor: SensorFiles, grid: Raster) -> None:
        self.files = [
            _open(path, bands, grid, sensor.units, item)
            for (path, bands), item in zip_longest(bands_of_files(image, sensor), image.items)
        ]
        if image.date is not None:
            for file in self.files:
                raster, day = file.position.raster, image.date.strftime('%Y%m%d')
                raster.scene = replace(facts_of(raster), day=day)
        self.clouds = sensor.clouds
        self.mask: Optional[_BandFile] = None
        if sensor.clouds is not None:
            mask_bands = (
                (1,)
                if sensor.clouds.band is None
                else _numbers(image.paths[0], [sensor.clouds.band], sensor.name)
            )
            if image.mask is not None or sensor.clouds.band is not None:
                self.mask = _open(image.mask or image.paths[0], mask_bands, grid)
        self.box = self.files[0].position.box

    @property
    def rasters(self) -> List[Raster]:
        """Rasters of the bands and of the mask."""
        return [file.position.raster for file in (*self.files, *([self.mask] if self.mask else []))]

    @property
    def may_have_gaps(self) -> bool:
        """Whether a pixel inside the box may be invalid."""
        return (
            self.mask is not None
            or any(raster.may_have_gaps for raster in self.rasters)
            or any(file.position.difference or file.position.box != self.box for file in self.files)
        )

    def read(self, box: Box, copies: Mapping[str, str], values: np.ndarray) -> np.ndarray:
        """Read a box of the grid.

        Args:
            box: Box of the grid.
            copies: Fast copies: path of a file -> path of its copy.
            values: Array (bands, height, width) that receives the valid pixels, and 0 elsewhere.

        Returns:
            The valid pixels, bool (height, width).
        """
        shared = intersection(box, self.box)
        if shared != box:
            values[:] = 0
        if shared is None:
            return np.zeros(values.shape[1:], bool)
        inside = slices_in(shared, box)
        band, shared_valid = 0, self._clear(shared, copies)
        for file in self.files:
            count = len(file.bands)
            pixels, has_data = file.read(shared, copies)
            values[(slice(band, band + count), *inside)] = pixels
            shared_valid = has_data if shared_valid is None else shared_valid & has_data
            band += count
        assert shared_valid is not None, 'an image has a file'
        # Pixels that are invalid in a single file are 0 already.
        if (self.mask is not None or len(self.files) > 1) and not shared_valid.all():
            np.copyto(values[(slice(None), *inside)], 0, where=~shared_valid)
        if shared == box:
            return shared_valid
        valid = np.zeros(values.shape[1:], bool)
        valid[inside] = shared_valid
        return valid

    def read_reduced_valid(self, factor: int, row: int, height: int, width: int) -> np.ndarray:
        """Return the valid pixels among every ``factor``-th of the rows from ``row`` on."""
        file = self.files[0]
        whole = (
            self.mask is None
            and len(self.files) == 1
            and not file.position.difference
            and self.box == (0, 0, file.position.raster.width, file.position.raster.height)
            and self.box[2] == width
        )
        if whole:
            return open_raster(file.path, file.bands).read_reduced(factor, row, height)[1]
        bands = sum(len(file.bands) for file in self.files)
        side = _SCAN_WIDTH - _SCAN_WIDTH % factor
        columns = []
        # Square by square, because neighboring rows are in the same blocks of a file.
        for left in range(0, width, max(side, factor)):
            box = left, row, min(max(side, factor), width - left), height
            values = np.zeros((bands, height, box[2]), np.float32)
            columns.append(self.read(box, {}, values)[::factor, ::factor])
        return np.concatenate(columns, 1)

    def _clear(self, box: Box, copies: Mapping[str, str]) -> Optional[np.ndarray]:
        """Return the pixels of a box without clouds, bool (height, width); None without a mask."""
        if self.mask is None or self.clouds is None:
            return None
        clear = np.zeros((box[3], box[2]), bool)
        shared = intersection(box, self.mask.position.box)
        if shared is not None:
            classes, has_data = self.mask.read(shared, copies, nearest=True)
            clear[slices_in(shared, box)] = has_data & np.isin(classes[0], self.clouds.clear)
        return clear


class _TiledLayer:
    """A date of a sensor, shown by one or several files; at each pixel the first with data counts.

    Args:
        layers: Layers of the files, in the order in which they count.

    Attributes:
        files, clouds, box: As in ``_Layer``; of all files together.
    """

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = list(layers)
        self.files = [file for layer in layers for file in layer.files]
        self.clouds = layers[0].clouds
        left, top = (min(layer.box[axis] for layer in layers) for axis in (0, 1))
        right, bottom = (
            max(layer.box[axis] + layer.box[axis + 2] for layer in layers) for axis in (0, 1)
        )
        self.box = left, top, right - left, bottom - top

    @property
    def rasters(self) -> List[Raster]:
        """Rasters of the bands and of the masks."""
        return [raster for layer in self._layers for raster in layer.rasters]

    @property
    def may_have_gaps(self) -> bool:
        """Whether a pixel inside the box may be invalid."""
        return all(layer.may_have_gaps or layer.box != self.box for layer in self._layers)

    def read(self, box: Box, copies: Mapping[str, str], values: np.ndarray) -> np.ndarray:
        """Read a box of the grid, as ``_Layer`` does."""
        valid = self._layers[0].read(box, copies, values)
        for layer in self._layers[1:]:
            if not valid.all() and intersection(box, layer.box) is not None:
                others = np.empty_like(values)
                added = layer.read(box, copies, others) & ~valid
                np.copyto(values, others, where=added)
                valid = valid | added
        return valid

    def read_reduced_valid(self, factor: int, row: int, height: int, width: int) -> np.ndarray:
        """Return the valid pixels among every ``factor``-th of the rows from ``row`` on."""
        valid = [layer.read_reduced_valid(factor, row, height, width) for layer in self._layers]
        return np.logical_or.reduce(valid)


class PlaceRaster(Raster):
    """All images of a place as one raster.

    Files that are not on the grid are interpolated: pixels bilinearly, masks by the nearest pixel.

    Args:
        place: Files of the place.
        sensors: Settings of the sensors.
        grid: Path of the raster whose grid the place has; default: :func:`finest_image`.

    Attributes:
        place: Files of the place.
        layout: Order of the bands.
        days: Day number of each date of each sensor; 0 for a missing date.
        resampled: Path of each file that is not on the grid, with the difference.
        units: Unit of each sensor whose values are not read as they are stored.

    Raises:
        GeoError: If a file cannot be opened, lacks bands, or does not overlap the grid, or if the
            place has no image.
    """

    def __init__(
        self, place: Place, sensors: Mapping[str, SensorFiles], grid: Optional[str] = None
    ) -> None:
        self.place = place
        self.layout = StackLayout.of_config(
            {
                name: dict(bands=sensor.bands, max_dates=sensor.max_dates)
                for name, sensor in sensors.items()
            }
        )
        grid = grid or finest_image(place, sensors)
        with Raster(grid) as reference:
            self.path, self.crs, self.transform = str(grid), reference.crs, reference.transform
            self.width, self.height = reference.width, reference.height
            self.is_georeferenced = reference.is_georeferenced
            self.control_points, self.blocks = reference.control_points, (BLOCK, BLOCK)
            self.validity = reference.validity
        self.bands = tuple(range(1, self.layout.image_channels + 1))
        self.nodata = None
        self.units = {
            name: sensor.units for name, sensor in sensors.items() if sensor.units != STORED
        }
        self._layers: List[Optional[_TiledLayer]] = []
        days: List[int] = []
        for name, sensor in sensors.items():
            images = place.images.get(name, [])
            self._layers += [
                _TiledLayer([_Layer(tile, sensor, self) for tile in image.tiles])
                for image in images
            ]
            days += [NO_DAY if image.date is None else day_number(image.date) for image in images]
            missing = sensor.max_dates - len(images)
            self._layers += [None] * missing
            days += [NO_DAY] * missing
        self.days = tuple(days)
        rasters = self._rasters()
        for raster in rasters:
            self._check_position(raster)
        layers = [layer for layer in self._layers if layer is not None]
        self.is_remote = any(raster.is_remote for raster in rasters)
        self.dtype = np.dtype(
            np.uint8
            if all(
                file.position.raster.dtype == np.uint8 for layer in layers for file in layer.files
            )
            else np.float32
        )
        self.may_have_gaps = all(
            layer.may_have_gaps or layer.box != (0, 0, self.width, self.height) for layer in layers
        )
        self.resampled = [
            (file.path, file.position.difference)
            for layer in layers
            for file in layer.files
            if file.position.difference
        ]
        self._copies: Dict[str, str] = {}
        self._globe: Optional[Globe] = None

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window, as ``Raster.read`` does.

        Returns:
            Values (image_channels, height, width) in ``dtype``, and the pixels that any date of any
            sensor has, bool (height, width).

        Raises:
            RasterBlockError: If pixels of the window cannot be decoded in one of the files. The
                error lists blocks of the grid, squares of 512 pixels.
        """
        return read_on_grid((column, row, width, height), self.width, self.height, self._compose)

    def _compose(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        layout, (_, _, width, height) = self.layout, box
        # Every date is written below; filling all with 0 first would take as long as reading.
        values = np.empty((layout.image_channels, height, width), self.dtype)
        any_valid = np.zeros((height, width), bool)
        band, number = 0, 0
        for sensor in layout.sensors:
            for _ in range(sensor.max_dates):
                layer, pixels = self._layers[number], values[band : band + len(sensor.bands)]
                if layer is None:
                    pixels[:] = values[layout.pixel_channels + number] = 0
                else:
                    valid = layer.read(box, self._copies, pixels)
                    values[layout.pixel_channels + number] = valid
                    any_valid |= valid
                band += len(sensor.bands)
                number += 1
        return values, any_valid

    def read_with_nodata(
        self, column: int, row: int, width: int, height: int
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window as :meth:`read` does; a stack has no value that means "no data"."""
        return self.read(column, row, width, height)

    def read_reduced(
        self, factor: int, row: int = 0, height: Optional[int] = None
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Return which pixels are valid among every ``factor``-th, as ``Raster.read_reduced``.

        The values have no bands: programs that read at a low resolution look for data only.
        """
        height = self.height - row if height is None else height
        valid = np.zeros((-(-height // factor), -(-self.width // factor)), bool)
        for layer in self._layers:
            if layer is not None and not valid.all():
                valid |= layer.read_reduced_valid(factor, row, height, self.width)
        return np.zeros((0, *valid.shape), self.dtype), valid

    def site(self, column: float, row: float) -> Tuple[float, float]:
        """Return longitude and latitude in degrees of a pixel; NaN without a georeference."""
        if not self.is_georeferenced:
            return float('nan'), float('nan')
        if self._globe is None:
            self._globe = Globe(self)
        longitude, latitude = (
            float(axis[0]) for axis in self._globe.degrees(np.array([[column, row]], np.float64))
        )
        if not (np.isfinite(longitude) and np.isfinite(latitude)):
            return float('nan'), float('nan')
        return (longitude + 180) % 360 - 180, latitude

    def read_from(self, copies: Mapping[str, str]) -> PlaceRaster:
        """Return the same place, read from copies: path of a file -> path of its copy."""
        copied: PlaceRaster = object.__new__(PlaceRaster)
        copied.__dict__.update(self.__dict__, _copies=dict(copies))
        return copied

    def for_preview(self) -> Raster:
        """Return the file that has the grid, which a picture of the place shows."""
        return Raster(self.path)

    def facts(self) -> Dict[str, Any]:
        """Return the grids of the files and what makes their pixels invalid, as JSON values."""
        facts = [raster.facts() for raster in self._rasters()]
        clouds = [
            None
            if layer is None or layer.clouds is None
            else [str(layer.clouds.band), *layer.clouds.clear]
            for layer in self._layers
        ]
        return dict(
            grid=[fact['grid'] for fact in facts],
            validity=dict(files=[fact['validity'] for fact in facts], clouds=clouds),
            **(dict(units=self.units) if self.units else {}),
        )

    def files(self) -> List[str]:
        """Return the paths of all files that the pixels come from."""
        return list(dict.fromkeys(path for raster in self._rasters() for path in raster.files()))

    def source_paths(self) -> List[str]:
        """Return the paths of the images and masks."""
        return list(dict.fromkeys(raster.path for raster in self._rasters()))

    def close(self) -> None:
        """Close the files of the place that are open in this process."""
        for raster in self._rasters():
            raster.close()

    def __getstate__(self) -> Dict[str, Any]:
        # A transformer of PROJ belongs to one process.
        return dict(self.__dict__, _globe=None)

    def __deepcopy__(self, memo: object) -> PlaceRaster:
        # A place does not change, and a copy of a sample must not copy it.
        return self

    def __repr__(self) -> str:
        # The text identifies cached samples, so it must be the same in every process.
        # Cached samples of earlier versions, which had stored values only, stay valid.
        units = f', {self.units}' * bool(self.units)
        return f'PlaceRaster({self.place}, {self.layout}, {self.path}{units})'

    def _rasters(self) -> List[Raster]:
        return [raster for layer in self._layers if layer is not None for raster in layer.rasters]

    def _check_position(self, raster: Raster) -> None:
        """Raise an error if a file does not overlap the grid, or its position is unknown."""
        subject = f'place {self.place.name!r}: {raster.path}'
        if raster.is_georeferenced != self.is_georeferenced:
            bare = raster if self.is_georeferenced else self
            raise GeoError(
                f'{subject} and {self.path}, which has the grid, cannot be laid over '
                f'each other: {bare.path} {bare.georeference_gap}.'
            )
        if not self.is_georeferenced:
            if (raster.width, raster.height) != (self.width, self.height):
                raise GeoError(
                    f'{subject} is {raster.width} x {raster.height} pixels, and '
                    f'{self.path} {self.width} x {self.height}; without georeference '
                    'all images of a place need the same size.'
                )
            return
        box = box_on_grid(raster, self.crs, self.transform, (self.width, self.height))
        if intersection(box, (0, 0, self.width, self.height)) is None:
            raise GeoError(
                f'{subject} does not overlap {self.path}, which has the grid of {self.width} x '
                f'{self.height} pixels: it lies at the columns {box[0]} to {box[0] + box[2]} and '
                f'the rows {box[1]} to {box[1] + box[3]}. Check the name of the place and the CRS '
                'of both files.'
            )

    def images(self) -> Iterator[Tuple[str, Raster]]:
        """Yield the files of the sensors' bands, in the order of the dates."""
        layers = iter(self._layers)
        for sensor in self.layout.sensors:
            for layer in islice(layers, sensor.max_dates):
                for file in layer.files if layer else ():
                    yield sensor.name, file.position.raster

    def much_finer_files(self) -> List[str]:
        """Return the files whose pixels are much smaller than the pixels of the grid.

        Bilinear interpolation takes single pixels of such a file, without smoothing.
        """
        if not self.is_georeferenced:
            return []
        side = pixel_side(self)
        return [
            raster.path for raster in self._rasters() if pixel_side(raster) * _MUCH_FINER < side
        ]


def finest_image(place: Place, sensors: Mapping[str, SensorFiles]) -> str:
    """Return the path of the first image of the sensor with the smallest pixels at a place.

    If several sensors have pixels of this size, it is the one of them with the most bands.

    Args:
        place: Files of the place.
        sensors: Settings of the sensors.

    Raises:
        GeoError: If the place has no image, or a file cannot be opened.
    """
    paths = {name: images[0].paths[0] for name, images in place.images.items() if images}
    if not paths:
        raise GeoError(f'place {place.name!r} has no image of {sorted(sensors)}.')
    if len(paths) == 1:
        return next(iter(paths.values()))
    sides = {}
    for name, path in paths.items():
        with Raster(path) as raster:
            side = pixel_side(raster)
        sides[name] = side if side == side else float('inf')
    finest = min(sides.values())
    chosen = [name for name, side in sides.items() if side <= finest * _SAME_SIDE]
    return paths[max(chosen, key=lambda name: len(sensors[name].bands))]


def bands_of_files(image: DatedImage, sensor: SensorFiles) -> List[Tuple[str, Tuple[int, ...]]]:
    """Return the paths of an image's files, each with the numbers of the bands to read."""
    if len(image.paths) > 1 or sensor.has_band_files:
        return [(path, (1,)) for path in image.paths]
    return [(image.paths[0], _numbers(image.paths[0], sensor.bands, sensor.name))]


def _numbers(path: str, bands: Sequence[Band], sensor: str) -> Tuple[int, ...]:
    """Return the numbers of bands that are named by number or description.

    Names of a file without descriptions mean its bands in their order.
    """
    if all(isinstance(band, int) for band in bands):
        return tuple(int(band) for band in bands)
    with Raster(path) as raster:
        descriptions = {raster.header.descriptions[band - 1]: band for band in raster.bands}
        count = len(raster.bands)
    if set(descriptions) <= {None} and count == len(bands):
        return tuple(range(1, count + 1))
    numbers: List[int] = []
    for band in bands:
        number: Union[int, None] = band if isinstance(band, int) else descriptions.get(band)
        if number is None:
            described = (
                ', '.join(f'{index} ({name})' for name, index in descriptions.items() if name)
                or f'{count} without a description'
            )
            raise GeoError(
                f'{path} of sensor {sensor!r} has no band {band!r}; it has the bands '
                f'{described}. Name bands by number, such as bands=[1, 2], or set the '
                f'descriptions (rio edit-info).'
            )
        numbers.append(number)
    return tuple(numbers)


def _open(
    path: str,
    bands: Tuple[int, ...],
    grid: Raster,
    units: str = STORED,
    item: Optional[Product] = None,
) -> _BandFile:
    with open_scene(path, bands, units=units, item=item) as raster:
        size = grid.width, grid.height
        box = box_on_grid(raster, grid.crs, grid.transform, size)
        return _BandFile(path, bands, RasterOnGrid(raster, box, grid.crs, grid.transform, size))
