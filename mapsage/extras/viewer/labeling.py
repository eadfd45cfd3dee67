"""Labels by clicks on rasters: points with a class, kept in a GeoPackage, and a map that follows.

Another extra computes the map as a `LabelSource` (`mapsage_launcher/extras.py`, program ``view``);
here are the points, their classes and colors, and what the page asks for. On the page, coordinates
are pixels of a raster, counted from its northern edge also where a file begins in the south.
"""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pyogrio.raw
import shapely
from affine import Affine
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.geo import GeoError, Raster, reprojected, to_map
from mapsage.geo.cog import temporary_beside

from .catalog import read_grid
from .errors import ViewError

_TILE = re.compile(
    r'labels/([0-9]{1,6})/(picture|classes)/[0-9]{1,9}/'
    r'([0-9]{1,2})/([0-9]{1,7})/([0-9]{1,7})'
)
_COLOR = re.compile('#[0-9a-fA-F]{6}')
_LAYER, _FIELDS = 'points', ['class', 'color']
_LONGEST_NAME, _FARTHEST = 80, 2**40


class Point(NamedTuple):
    """A click: number of the raster, place in its pixels from the northern edge, and the class."""

    file: int
    x: float
    y: float
    name: str


class LabelSource:
    """Interface of rasters that are labeled, and of the map that follows.

    Attributes:
        paths: The rasters.
    """

    paths: Sequence[Path]

    def commands(self, points: Path) -> List[str]:
        """Return what to type when the labels in a file are enough."""
        raise NotImplementedError

    def has_data(self, file: int, x: float, y: float) -> bool:
        """Return whether a place of a raster can be labeled."""
        raise NotImplementedError

    def fit(self, points: Sequence[Point], names: Sequence[str]) -> None:
        """Learn from points; the class of value 0 is the first name."""
        raise NotImplementedError

    def least_sure(self, file: int, points: Sequence[Point]) -> Tuple[float, float]:
        """Return the place to label next, as that of a point.

        Raises:
            UserError: If there is none.
        """
        raise NotImplementedError

    def tile(self, file: int, kind: str, level: int, column: int, row: int) -> bytes:
        """Return the bytes of 256 x 256 cells of 2**level pixels.

        Raises:
            IndexError: If there is no such tile.
        """
        raise NotImplementedError


class Labeling:
    """The points that a user has clicked.

    Args:
        source: Rasters, and the map that follows the points.
        path: GeoPackage of the points, which is read if it exists, and written at every change.

    Raises:
        ViewError: If the file is not one of these, or has points elsewhere.
    """

    def __init__(self, source: LabelSource, path: str) -> None:
        self.source, self._path = source, Path(path)
        self._rasters = [Raster(raster) for raster in source.paths]
        self._transforms = [_from_north(raster) for raster in self._rasters]
        self._lock = threading.Lock()
        self._points: List[Point] = []
        # In the order of the values on the map. Replaced, never changed: other threads read it.
        self._colors: Dict[str, str] = {}
        self._earlier: List[Tuple[List[Point], Dict[str, str]]] = []
        self._version = 0
        if self._path.exists():
            self._load()
            source.fit(self._points, list(self._colors))

    def describe(self) -> Dict[str, Any]:
        """Return what the page draws: version, classes, points, file and the next commands."""
        return dict(
            version=self._version,
            classes=[dict(name=name, color=color) for name, color in self._colors.items()],
            points=[point._asdict() for point in self._points],
            path=str(self._path),
            undo=len(self._earlier),
            commands=self.source.commands(self._path),
        )

    def catalog(self) -> List[Dict[str, Any]]:
        """Return the rasters as the page has maps."""
        empty: Dict[str, Any] = dict(classes=[], notes=[], files={}, polygons=None)
        empty.update(ready=True, doing=None, accuracy=None, iou=None)
        return [
            dict(read_grid(path), name=path.stem, transform=list(transform)[:6], **empty)
            for path, transform in zip(self.source.paths, self._transforms)
        ]

    def tile_at(self, url_path: str) -> Optional[bytes]:
        """Return the tile of a path of a URL; None if there is none."""
        match = _TILE.fullmatch(url_path)
        if match is None:
            return None
        file, kind, *place = match.groups()
        try:
            return self.source.tile(int(file), kind, *map(int, place))
        except IndexError:
            return None

    def change(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Do what the page asks for, write the points, and return :meth:`describe`.

        One click at a time: another that comes meanwhile waits.

        Args:
            request: ``do``: ``add`` a point (``file``, ``x``, ``y``, ``name``, ``color``),
                ``color`` a class (``name``, ``color``), ``rename`` one (``name``, ``to``), ``undo``
                the last of these; or ``unsure``, which only adds ``unsure`` to the answer, column
                and row in ``file`` of the place to label next.

        Raises:
            UserError: If there are no data at the point, or the request is something else.
        """
        with self._lock:
            if request.get('do') == 'unsure':
                place = self.source.least_sure(self._file(request), self._points)
                return dict(self.describe(), unsure=place)
            before, earlier = (self._points, self._colors), list(self._earlier)
            try:
                if request.get('do') != 'undo':
                    self._edit(request)
                    self._earlier.append(before)
                elif self._earlier:
                    self._points, self._colors = self._earlier.pop()
                self._save()
            except ViewError:
                (self._points, self._colors), self._earlier = before, earlier
                raise
            self.source.fit(self._points, list(self._colors))
            self._version += 1
            return self.describe()

    def _edit(self, request: Dict[str, Any]) -> None:
        name, to = (str(request.get(key, '')).strip()[:_LONGEST_NAME] for key in ('name', 'to'))
        what, color, colors = request.get('do'), str(request.get('color')), dict(self._colors)
        if what == 'rename' and name in colors and to:
            self._points = [
                point._replace(name=to) if point.name == name else point for point in self._points
            ]
            color = colors.get(to, colors[name])
            # Two classes of one name become one.
            colors = {to if key == name else key: value for key, value in colors.items()}
            name = to
        elif what == 'add' and name and _COLOR.fullmatch(color):
            self._points = [*self._points, self._point(request, name)]
        elif what != 'color' or name not in colors or not _COLOR.fullmatch(color):
            raise ViewError(f'{str(request)[:200]} is no change of labels.')
        self._colors = {**colors, name: color}

    def _file(self, request: Dict[str, Any]) -> int:
        file = request.get('file')
        if type(file) is not int or not 0 <= file < len(self._rasters):
            raise ViewError(f'{file!r} is no number of a raster.')
        return file

    def _point(self, request: Dict[str, Any], name: str) -> Point:
        file, x, y = self._file(request), request.get('x'), request.get('y')
        if not isinstance(x, (int, float)) or not isinstance(y, (int, float)):
            raise ViewError(f'{x!r}, {y!r} is no place.')
        if not (abs(x) + abs(y) < _FARTHEST and self.source.has_data(file, x, y)):
            raise ViewError(
                f'{self.source.paths[file].name} has no data at {x:.1f}, {y:.1f}: click where '
                f'there is a picture.'
            )
        return Point(file, float(x), float(y), name)

    def _load(self) -> None:
        try:
            layers = [str(name) for name, _ in pyogrio.list_layers(self._path)]
            fields = list(map(str, pyogrio.read_info(self._path)['fields']))
            if (layers, fields) != ([_LAYER], _FIELDS):
                raise DataSourceError(f'it has {", ".join(layers)}: {", ".join(fields)}')
            _, _, geometry, (names, colors) = pyogrio.raw.read(self._path)
            shapes = shapely.from_wkb(geometry)
            if set(shapely.get_type_id(shapes)) - {0} or not all(map(_COLOR.fullmatch, colors)):
                raise DataSourceError('it has more than points with colors')
        except (DataSourceError, DataLayerError, TypeError) as error:
            raise ViewError(
                f'--points {self._path} would be overwritten and is no file of this page ({error}): '
                f'name another one.'
            ) from error
        for shape, name, color in zip(shapes, names, colors):
            for file, raster in enumerate(self._rasters):
                place = shapely.get_coordinates(self._moved(shape, 0, file))
                x, y = to_map(~self._transforms[file], place)[0].tolist()
                if 0 <= x < raster.width and 0 <= y < raster.height:
                    self._points.append(Point(file, x, y, str(name)))
                    self._colors[str(name)] = str(color)
                    break
            else:
                raise ViewError(
                    f'--points {self._path} has a point outside of what is shown, which would be '
                    f'lost: name another file.'
                )

    def _save(self) -> None:
        shapes = [
            self._moved(
                shapely.Point(to_map(self._transforms[p.file], np.array([[p.x, p.y]]))[0]),
                p.file,
                0,
            )
            for p in self._points
        ]
        crs = self._rasters[0].crs
        columns = [p.name for p in self._points], [self._colors[p.name] for p in self._points]
        try:
            with temporary_beside(self._path) as folder, warnings.catch_warnings():
                # Pixels of a raster without a CRS have none either.
                warnings.simplefilter('ignore', UserWarning)
                pyogrio.raw.write(
                    str(folder / self._path.name),
                    shapely.to_wkb(np.array(shapes, object)),
                    [np.array(column, object) for column in columns],
                    _FIELDS,
                    driver='GPKG',
                    layer=_LAYER,
                    geometry_type='Point',
                    crs=None if crs is None else crs.to_wkt(),
                )
                (folder / self._path.name).replace(self._path)
        except (GeoError, OSError, DataSourceError, DataLayerError) as error:
            raise ViewError(f'{self._path} cannot be written: {error}') from error

    def _moved(self, shape: Any, source: int, target: int) -> Any:
        """Return a shape of the CRS of a raster in that of another."""
        first, second = self._rasters[source].crs, self._rasters[target].crs
        if first is None or second is None or first == second:
            return shape
        return reprojected(shape, first.to_wkt(), second.to_wkt())


def _from_north(raster: Raster) -> Affine:
    """Return the transform of a raster's pixels, counted from its northern edge."""
    if raster.transform.e <= 0 or not raster.is_georeferenced:
        return raster.transform
    return raster.transform * Affine.translation(0, raster.height) * Affine.scale(1, -1)
