"""The file of a review: a GeoPackage with a reviewer's decisions on windows of maps.

QGIS can open and edit it. Each decision is one SQLite transaction, which is on the disk before the
reviewer gets an answer, and several processes may write the same file. Only Python's SQLite opens
the file: GDAL brings a second copy of the library, and two copies in one process drop each other's
locks (sqlite.org, "How To Corrupt An SQLite Database File", section 2.2.1). `review.py` decides
which windows are shown.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import pyogrio.raw
import pyproj
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.geo import GeoError, reprojected
from mapsage.geo.cog import temporary_beside
from mapsage.geo.gdal_files import check_name
from mapsage.geo.qgis_style import add_polygon_style

from .errors import ViewError

LAYER = 'review'
WRONG_MAP, WRONG_LABEL = 'wrong map', 'wrong label'
DECISIONS = {
    WRONG_MAP: (214, 39, 40),
    WRONG_LABEL: (255, 127, 14),
    'unsure': (148, 103, 189),
    'right': (44, 160, 44),
}
"""Possible decisions on a window, and the colors that QGIS shows them in."""

# Seconds to wait for another program that has locked the file.
_PATIENCE = 5.0
_KEY = 'map', 'column', 'row', 'width', 'height'
_FIELDS: Dict[str, type] = dict(
    decision=object,
    score=float,
    measure=object,
    map=object,
    path=object,
    column=np.int64,
    row=np.int64,
    width=np.int64,
    height=np.int64,
    checksum=np.int64,
    decided=object,
)
_COLUMNS = ', '.join(f'"{name}"' for name in _FIELDS)
# A GIS may have added a polygon without a decision, or emptied the field.
_DECIDED = 'decision IS NOT NULL'
_SAME = ' AND '.join(f'"{name}" = ?' for name in _KEY)


class ReviewKey(NamedTuple):
    """A window in pixels of a map; ``map`` is the map's path relative to the review's folder."""

    map: str
    column: int
    row: int
    width: int
    height: int


class ReviewDecision(NamedTuple):
    """A decision, its time, and the checksum of the map's classes that the reviewer saw."""

    decision: str
    decided: str
    checksum: int

    @property
    def state(self) -> str:
        """Text that distinguishes this decision from other decisions on the window."""
        return f'{self.decided} {self.decision}'


class ReviewedWindow(NamedTuple):
    """A window that was decided on.

    Attributes:
        decision: One of ``DECISIONS``.
        path: Path of the scene; empty if unknown.
        box: The window in pixels of the scene: column, row, width, height.
        has_place: Whether the file has the window's outline on the ground.
    """

    decision: str
    path: str
    box: Tuple[int, int, int, int]
    has_place: bool


class NotReviewError(ViewError):
    """The file is not a review."""


class StateChangedError(ViewError):
    """Somebody else has decided on the window in the meantime.

    Attributes:
        current: Decision in the file, or None.
    """

    def __init__(self, current: Optional[ReviewDecision]) -> None:
        change = 'taken back' if current is None else f'decided: {current.decision}'
        super().__init__(
            f'In the meantime this tile was {change}. It is shown so now; press the '
            'key again to change it.'
        )
        self.current = current


class ReviewFile:
    """The decisions of a review: the last one for each window.

    Args:
        path: Path of the GeoPackage, which the first decision creates.
        crs: CRS of the outlines in a new file, as WKT or by name.
    """

    def __init__(self, path: Union[str, Path], crs: str) -> None:
        self.path, self._crs = Path(path), crs
        self._lock = threading.Lock()

    def read(self) -> Dict[ReviewKey, ReviewDecision]:
        """Return all decisions; empty if the file does not exist.

        Raises:
            ViewError: If the file cannot be read, or is not a review.
        """
        if not self.path.exists():
            return {}
        with self._lock, self._open() as file:
            rows = file.execute(
                f'SELECT {_COLUMNS} FROM {LAYER} WHERE {_DECIDED} ORDER BY decided, fid'
            ).fetchall()
        records = [dict(zip(_FIELDS, row)) for row in rows]
        return {
            ReviewKey(*(record[name] for name in _KEY)): ReviewDecision(
                str(record['decision']), str(record['decided']), record['checksum']
            )
            for record in records
        }

    def save(
        self,
        key: ReviewKey,
        decision: Optional[str],
        expected_state: str,
        facts: Dict[str, Any],
        outline: Optional[shapely.Polygon] = None,
        crs: str = '',
    ) -> Optional[ReviewDecision]:
        """Write a decision, or take it back; return the decision that is now in the file.

        Args:
            key: The window.
            decision: One of ``DECISIONS``; None takes the current one back.
            expected_state: ``state`` of the decision that is replaced; empty for none.
            facts: Values of the fields ``score``, ``measure``, ``path`` and ``checksum``.
            outline: Polygon of the window, or None for a map without coordinates.
            crs: CRS of the polygon, as WKT or by name.

        Raises:
            StateChangedError: If the file has another decision than ``expected_state``. Nothing is
                written.
            ViewError: If the file cannot be written.
        """
        with self._lock:
            if not self.path.exists():
                self._create()
            with self._open() as file:
                file.execute('BEGIN IMMEDIATE')
                rows = file.execute(
                    f'SELECT decision, decided, checksum FROM {LAYER} WHERE {_SAME} '
                    f'AND {_DECIDED} ORDER BY decided, fid',
                    key,
                ).fetchall()
                current = ReviewDecision(*rows[-1]) if rows else None
                if ('' if current is None else current.state) != expected_state:
                    raise StateChangedError(current)
                file.execute(f'DELETE FROM {LAYER} WHERE {_SAME}', key)
                saved = None
                if decision is not None:
                    now = datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%S.%fZ')
                    saved = ReviewDecision(decision, now, facts['checksum'])
                    self._insert(
                        file,
                        dict(facts, **key._asdict(), decision=decision, decided=now),
                        outline,
                        crs,
                    )
                file.execute(
                    'UPDATE gpkg_contents SET last_change = '
                    "strftime('%Y-%m-%dT%H:%M:%fZ', 'now') WHERE table_name = ?",
                    (LAYER,),
                )
                file.execute('COMMIT')
        return saved

    def _insert(
        self,
        file: sqlite3.Connection,
        values: Dict[str, Any],
        outline: Optional[shapely.Polygon],
        crs: str,
    ) -> None:
        column, number = file.execute(
            'SELECT column_name, srs_id FROM gpkg_geometry_columns WHERE table_name = ?', (LAYER,)
        ).fetchone()
        polygon = _reproject(outline, crs, _crs_of(file, number))
        blob = None
        if polygon is not None:
            # In the order of a GeoPackage: min x, max x, min y, max y.
            bounds = shapely.bounds(polygon)[[0, 2, 1, 3]]
            # "GP", version 0, flags 3: little-endian, with bounds (GeoPackage 1.2, section 2.1.3).
            blob = struct.pack('<2sBBi4d', b'GP', 0, 3, number, *bounds) + shapely.to_wkb(polygon)
            file.execute(
                'UPDATE gpkg_contents SET '
                + ', '.join(
                    f'{end}_{axis} = {end}(coalesce({end}_{axis}, ?), ?)'
                    for axis in 'xy'
                    for end in ('min', 'max')
                )
                + ' WHERE table_name = ?',
                [value for bound in bounds.tolist() for value in (bound, bound)] + [LAYER],
            )
        file.execute(
            f'INSERT INTO {LAYER} ("{column}", {_COLUMNS}) VALUES '
            f'({", ".join("?" * (len(_FIELDS) + 1))})',
            [blob, *(values[name] for name in _FIELDS)],
        )

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection; uncommitted changes are discarded at the end of the context."""
        try:
            with contextlib.closing(
                sqlite3.connect(
                    f'{self.path.absolute().as_uri()}?mode=rw',
                    uri=True,
                    timeout=_PATIENCE,
                    isolation_level=None,
                )
            ) as file:
                # A committed decision survives even a power failure.
                file.execute('PRAGMA synchronous = EXTRA')
                _add_functions(file)
                file.execute(f'SELECT {_COLUMNS} FROM {LAYER} LIMIT 0')
                yield file
        except sqlite3.Error as error:
            raise _error(self.path, error) from error

    def _create(self) -> None:
        try:
            check_name(self.path)
            with temporary_beside(self.path) as folder:
                new_file = folder / self.path.name
                pyogrio.raw.write(
                    str(new_file),
                    np.array([], object),
                    [np.array([], kind) for kind in _FIELDS.values()],
                    list(_FIELDS),
                    geometry_type='Polygon',
                    crs=self._crs,
                    driver='GPKG',
                    layer=LAYER,
                    SPATIAL_INDEX='NO',
                )
                add_polygon_style(
                    new_file,
                    LAYER,
                    'decision',
                    list(DECISIONS),
                    list(DECISIONS.values()),
                    hollow=True,
                )
                _link_unless_exists(new_file, self.path)
        except (GeoError, OSError, DataSourceError, DataLayerError) as error:
            raise _error(self.path, error) from error


def read_windows(path: Union[str, Path]) -> List[ReviewedWindow]:
    """Return the windows of a review.

    Raises:
        ViewError: If the file cannot be read, or is not a review.
    """
    if not Path(path).exists():
        raise ViewError(f'{path} does not exist; expected a review of tools/view.py.')
    with ReviewFile(path, '')._open() as file:
        (column,) = file.execute(
            'SELECT column_name FROM gpkg_geometry_columns WHERE table_name = ?', (LAYER,)
        ).fetchone()
        return [
            ReviewedWindow(decision, scene, tuple(box), bool(has_place))
            for decision, scene, has_place, *box in file.execute(
                f'SELECT decision, path, "{column}" IS NOT NULL, "column", "row", "width", '
                f'"height" FROM {LAYER} WHERE {_DECIDED} ORDER BY fid'
            )
        ]


def is_review(path: Union[str, Path]) -> bool:
    """Return whether a file is a GeoPackage with the layer of a review.

    Raises:
        ViewError: If the file cannot be read, for example because another program has locked it.
    """
    if not Path(path).is_file():
        return False
    try:
        with ReviewFile(path, '')._open():
            return True
    except NotReviewError:
        return False


def as_text(path: Union[str, Path]) -> str:
    """Return a path as valid UTF-8 text, with undecodable bytes (such as GBK) as escapes."""
    return str(path).encode('utf-8', 'backslashreplace').decode()


def _reproject(
    outline: Optional[shapely.Polygon], crs: str, target: Optional[str]
) -> Optional[shapely.Polygon]:
    """Return an outline in the CRS of the file; None if it cannot be projected."""
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
        'WHERE srs_id = ?',
        (number,),
    ).fetchone()
    # Undefined Cartesian and geographic CRS (GeoPackage 1.2, table 3).
    if number in (-1, 0):
        return None
    return f'EPSG:{code}' if name.upper() == 'EPSG' else definition


def _add_functions(file: sqlite3.Connection) -> None:
    """Add the SQL functions that a spatial index calls, which a GIS may have added to the file."""
    for number, name in enumerate(('ST_MinX', 'ST_MaxX', 'ST_MinY', 'ST_MaxY')):
        file.create_function(
            name, 1, lambda blob, number=number: struct.unpack_from('<4d', blob, 8)[number]
        )
    file.create_function('ST_IsEmpty', 1, lambda blob: None if blob is None else 0)


def _link_unless_exists(new_file: Path, path: Path) -> None:
    """Give a new file its final path, unless another process has created that in the meantime."""
    try:
        os.link(str(new_file), str(path))
    except FileExistsError:
        return
    # The file system has no hard links.
    except OSError:
        os.replace(str(new_file), str(path))


def _error(path: Path, error: Exception) -> ViewError:
    text = str(error)
    if 'no such table' in text or 'no such column' in text or 'not a database' in text:
        return NotReviewError(
            f'{path} is not a review of tools/view.py ({text}); it was not '
            'changed. Name another file with --review.'
        )
    if 'locked' in text:
        return ViewError(
            f'{path} is kept locked by another program, such as QGIS while the layer '
            f'is edited ({text}). Save there, and decide again.'
        )
    return ViewError(
        f'cannot read or write {path}: {text}. Nothing was changed. Give write '
        'permission or free space, or name a file elsewhere with --review.'
    )
