"""What a reviewer has decided of windows of maps: a GeoPackage, which QGIS opens and edits.

Each decision is one transaction of SQLite: it is in the file before the answer, whenever the
process is killed, and several processes may write the same file. It is written by Python's SQLite
alone: a second copy of the library in this process, GDAL's, would drop its locks (sqlite.org,
"How To Corrupt An SQLite Database File", section 2.2.1).
"""
from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pyogrio.raw
import pyproj
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.geo import GeoError, reprojected
from mapsage.geo.cog import temporary_beside
from mapsage.geo.qgis_style import add_polygon_style
from mapsage.geo.raster import check_name

from .errors import ViewError

LAYER = 'review'
WRONG_MAP, WRONG_LABEL = 'wrong map', 'wrong label'
DECISIONS = {WRONG_MAP: (214, 39, 40), WRONG_LABEL: (255, 127, 14), 'unsure': (148, 103, 189),
             'right': (44, 160, 44)}
"""What can be decided of a window, and the color that QGIS shows it in."""

_PATIENCE = 5.0  # seconds that another program may keep the file locked
_KEY = 'map', 'column', 'row', 'width', 'height'
_FIELDS: Dict[str, type] = dict(
    decision=object, score=float, measure=object, map=object, path=object, column=np.int64,
    row=np.int64, width=np.int64, height=np.int64, checksum=np.int64, decided=object)
_COLUMNS = ', '.join(f'"{name}"' for name in _FIELDS)
_DECIDED = 'decision IS NOT NULL'  # a GIS may have added a polygon, or emptied the field
_SAME = ' AND '.join(f'"{name}" = ?' for name in _KEY)


class ReviewKey(NamedTuple):
    """A window in pixels of a map, which is named by its path from the folder of the review."""

    map: str
    column: int
    row: int
    width: int
    height: int


class ReviewDecision(NamedTuple):
    """A decision, the time of it, and the checksum of the map's classes that it was made on."""

    decision: str
    decided: str
    checksum: int

    @property
    def state(self) -> str:
        """Text that tells this decision from others of the same window."""
        return f'{self.decided} {self.decision}'


class ReviewedWindow(NamedTuple):
    """A window that was decided on.

    Attributes:
        decision: One of ``DECISIONS``.
        path: Path of the scene, empty where it was not known.
        box: The window in pixels of the scene: column, row, width, height.
        has_place: Whether the file holds its outline on the ground.
    """

    decision: str
    path: str
    box: Tuple[int, int, int, int]
    has_place: bool


class NotReviewError(ViewError):
    """The file is something else than a review."""


class StateChangedError(ViewError):
    """Somebody else has decided on the window in the meantime.

    Attributes:
        current: What the file says now, or None.
    """

    def __init__(self, current: Optional[ReviewDecision]) -> None:
        said = 'taken back' if current is None else f'decided: {current.decision}'
        super().__init__(f'In the meantime this tile was {said}. It is shown so now; press the key '
                         'again to change it.')
        self.current = current


class ReviewFile:
    """The decisions of a review; one of each window, the last.

    Args:
        path: Path of the GeoPackage, which the first decision makes.
        crs: CRS of the outlines in a new file, as WKT or by name.
    """

    def __init__(self, path: Any, crs: str) -> None:
        self.path, self._crs = Path(path), crs
        self._lock = threading.Lock()

    def read(self) -> Dict[ReviewKey, ReviewDecision]:
        """Return all decisions; none where there is no file.

        Raises:
            ViewError: If the file cannot be read, or is not a review.
        """
        if not self.path.exists():
            return {}
        with self._lock, self._open() as file:
            rows = file.execute(f'SELECT {_COLUMNS} FROM {LAYER} WHERE {_DECIDED} '
                                'ORDER BY decided, fid').fetchall()
        found = [dict(zip(_FIELDS, row)) for row in rows]
        return {ReviewKey(*(each[name] for name in _KEY)): ReviewDecision(
            str(each['decision']), str(each['decided']), each['checksum']) for each in found}

    def save(self, key: ReviewKey, decision: Optional[str], before: str, facts: Dict[str, Any],
             outline: Any = None, crs: str = '') -> Optional[ReviewDecision]:
        """Write a decision, or take it back; return it as it is in the file now.

        Args:
            key: The window.
            decision: One of ``DECISIONS``; None takes the present one back.
            before: ``state`` of the decision that is replaced; empty for none.
            facts: Values of the fields ``score``, ``measure``, ``path`` and ``checksum``.
            outline: Polygon of the window, or None for a map without coordinates.
            crs: CRS of the polygon, as WKT or by name.

        Raises:
            StateChangedError: If the file holds another decision than ``before``; nothing is
                written.
            ViewError: If it cannot be written.
        """
        with self._lock:
            if not self.path.exists():
                self._create()
            with self._open() as file:
                file.execute('BEGIN IMMEDIATE')
                rows = file.execute(
                    f'SELECT decision, decided, checksum FROM {LAYER} WHERE {_SAME} '
                    f'AND {_DECIDED} ORDER BY decided, fid', key).fetchall()
                current = ReviewDecision(*rows[-1]) if rows else None
                if ('' if current is None else current.state) != before:
                    raise StateChangedError(current)
                file.execute(f'DELETE FROM {LAYER} WHERE {_SAME}', key)
                saved = None
                if decision is not None:
                    now = datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%S.%fZ')
                    saved = ReviewDecision(decision, now, facts['checksum'])
                    self._insert(file, dict(facts, **key._asdict(), decision=decision, decided=now),
                                 outline, crs)
                file.execute("UPDATE gpkg_contents SET last_change = "
                             "strftime('%Y-%m-%dT%H:%M:%fZ', 'now') WHERE table_name = ?", (LAYER,))
                file.execute('COMMIT')
        return saved

    def _insert(self, file: sqlite3.Connection, values: Dict[str, Any], outline: Any, crs: str
                ) -> None:
        column, number = file.execute('SELECT column_name, srs_id FROM gpkg_geometry_columns '
                                      'WHERE table_name = ?', (LAYER,)).fetchone()
        placed = _placed(outline, crs, _crs_of(file, number))
        blob = None
        if placed is not None:
            box = shapely.bounds(placed)[[0, 2, 1, 3]]  # in the order of a GeoPackage
            # "GP", version 0, little-endian with such a box (GeoPackage 1.2, section 2.1.3)
            blob = struct.pack('<2sBBi4d', b'GP', 0, 3, number, *box) + shapely.to_wkb(placed)
            file.execute(
                'UPDATE gpkg_contents SET '
                + ', '.join(f'{end}_{axis} = {end}(coalesce({end}_{axis}, ?), ?)'
                            for axis in 'xy' for end in ('min', 'max')) + ' WHERE table_name = ?',
                [value for each in box.tolist() for value in (each, each)] + [LAYER])
        file.execute(f'INSERT INTO {LAYER} ("{column}", {_COLUMNS}) VALUES '
                     f'({", ".join("?" * (len(_FIELDS) + 1))})',
                     [blob, *(values[name] for name in _FIELDS)])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection; what is not committed at its end is not done."""
        try:
            with contextlib.closing(sqlite3.connect(
                    f'{self.path.absolute().as_uri()}?mode=rw', uri=True, timeout=_PATIENCE,
                    isolation_level=None)) as file:
                file.execute('PRAGMA synchronous = EXTRA')  # nor does a power failure take it back
                _add_functions(file)
                file.execute(f'SELECT {_COLUMNS} FROM {LAYER} LIMIT 0')
                yield file
        except sqlite3.Error as error:
            raise _error(self.path, error) from error

    def _create(self) -> None:
        try:
            check_name(self.path)
            with temporary_beside(self.path) as folder:
                made = folder / self.path.name
                pyogrio.raw.write(
                    str(made), np.array([], object),
                    [np.array([], kind) for kind in _FIELDS.values()], list(_FIELDS),
                    geometry_type='Polygon', crs=self._crs, driver='GPKG', layer=LAYER,
                    SPATIAL_INDEX='NO')
                add_polygon_style(made, LAYER, 'decision', list(DECISIONS),
                                  list(DECISIONS.values()), hollow=True)
                _name(made, self.path)
        except (GeoError, OSError, DataSourceError, DataLayerError) as error:
            raise _error(self.path, error) from error


def read_windows(path: Any) -> List[ReviewedWindow]:
    """Return the windows of a review.

    Raises:
        ViewError: If the file cannot be read, or is not a review.
    """
    if not Path(path).exists():
        raise ViewError(f'{path} does not exist; expected a review of tools/view.py.')
    with ReviewFile(path, '')._open() as file:
        column, = file.execute('SELECT column_name FROM gpkg_geometry_columns '
                               'WHERE table_name = ?', (LAYER,)).fetchone()
        return [ReviewedWindow(decision, scene, tuple(box), bool(has_place))
                for decision, scene, has_place, *box in file.execute(
                    f'SELECT decision, path, "{column}" IS NOT NULL, "column", "row", "width", '
                    f'"height" FROM {LAYER} WHERE {_DECIDED} ORDER BY fid')]


def is_review(path: Any) -> bool:
    """Return whether a file is a GeoPackage with the layer of a review.

    Raises:
        ViewError: If that cannot be told, since another program keeps the file locked.
    """
    if not Path(path).is_file():
        return False
    try:
        with ReviewFile(path, '')._open():
            return True
    except NotReviewError:
        return False


def as_text(path: Any) -> str:
    """Return a path as text that every encoding of a file holds, also one in GBK."""
    return str(path).encode('utf-8', 'backslashreplace').decode()


def _placed(outline: Any, crs: str, target: Optional[str]) -> Any:
    """Return an outline in the CRS of the file; None where it has no place there."""
    if outline is None or target is None:
        return None
    try:
        moved = reprojected(outline, crs, target)
    except pyproj.exceptions.ProjError:
        return None
    return moved if np.isfinite(shapely.bounds(moved)).all() else None


def _crs_of(file: sqlite3.Connection, number: int) -> Optional[str]:
    name, code, definition = file.execute(
        'SELECT organization, organization_coordsys_id, definition FROM gpkg_spatial_ref_sys '
        'WHERE srs_id = ?', (number,)).fetchone()
    if number in (-1, 0):  # undefined (GeoPackage 1.2, table 3)
        return None
    return f'EPSG:{code}' if name.upper() == 'EPSG' else definition


def _add_functions(file: sqlite3.Connection) -> None:
    """Add what the triggers of a spatial index call, which a GIS may have made."""
    for number, name in enumerate(('ST_MinX', 'ST_MaxX', 'ST_MinY', 'ST_MaxY')):
        file.create_function(name, 1, lambda blob, number=number: struct.unpack_from(
            '<4d', blob, 8)[number])
    file.create_function('ST_IsEmpty', 1, lambda blob: None if blob is None else 0)


def _name(made: Path, path: Path) -> None:
    """Give a new file its name, unless another process has made it in the meantime."""
    try:
        os.link(str(made), str(path))
    except FileExistsError:
        return
    except OSError:  # no such links on this file system
        os.replace(str(made), str(path))


def _error(path: Path, error: Exception) -> ViewError:
    text = str(error)
    if 'no such table' in text or 'no such column' in text or 'not a database' in text:
        return NotReviewError(f'{path} is no review of tools/view.py ({text}); it stays as it is. '
                              'Name another file with --review.')
    if 'locked' in text:
        return ViewError(f'{path} is kept locked by another program, such as QGIS while the layer '
                         f'is edited ({text}). Save there, and decide again.')
    return ViewError(f'cannot read or write {path}: {text}. Nothing was changed. Give write '
                     'permission or free space, or name a file elsewhere with --review.')
