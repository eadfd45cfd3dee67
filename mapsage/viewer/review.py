"""A review: tiles of all maps, the worst first, and what is decided of each."""
from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from mapsage.geo import (
    GeoError,
    Raster,
    RasterBlockError,
    is_gdal_name,
    to_map,
    window_outline,
)

from .catalog import MapEntry
from .decisions import (
    DECISIONS,
    ReviewDecision,
    ReviewFile,
    ReviewKey,
    StateChangedError,
    as_text,
)
from .errors import ViewError
from .ranking import RankedTile, order, rank, windows_of
from .session import ViewSession

MOST = 5000
"""Number of tiles in a review; more of them nobody looks at."""

_NO_CRS = 'EPSG:4326'  # of a review that begins with maps without one


class Review:
    """The tiles of the maps of a session in the order in which they are reviewed.

    Decisions are in the file before they are answered. The file is read anew for each answer:
    other viewers and QGIS may write it meanwhile.

    Args:
        session: Maps to review.
        path: Path of the GeoPackage of decisions; default: ``review.gpkg`` beside the first map.
        say: Function that is told of what takes time: a sentence.

    Raises:
        ViewError: If ``path`` is given and its folder cannot be made or written.
    """

    def __init__(self, session: ViewSession, path: Optional[Any] = None,
                 say: Callable[[str], None] = lambda text: None) -> None:
        self._session, self._say = session, say
        self.path = Path(path or session.entries[0].path.with_name('review.gpkg'))
        if path is not None:
            _check_folder(self.path)
        self._file = ReviewFile(self.path, _first_crs(session))
        self._lock, self._asked = threading.Lock(), threading.Event()
        self._tiles: Dict[str, Tuple[int, RankedTile]] = {}  # by identity, the worst first
        self._rasters: Dict[int, Raster] = {}
        self._notes: List[str] = []
        self._doing: Optional[str] = 'The maps are being prepared.'

    def rank_when_asked(self) -> None:
        """Rank the tiles once a page asks for them: that reads all maps, often for nothing."""
        self._asked.wait()
        self.rank()

    def rank(self) -> None:
        """Rank the tiles of all maps, which must have been prepared."""
        tiles: List[Tuple[int, RankedTile]] = []
        for number, entry in enumerate(self._session.entries):
            try:
                tiles += [(number, tile) for tile in self._rank_map(number, entry)]
            except (GeoError, ViewError, RasterBlockError, OSError) as error:
                self._notes.append(f'{entry.name} is not reviewed: {error}')
                self._say(self._notes[-1])
        kept = order(tiles)[:MOST]
        if len(kept) < len(tiles):
            self._notes.append(f'{MOST:,} of {len(tiles):,} tiles, the worst ones.')
        with self._lock:
            self._tiles = {self._identity(*each): each for each in kept}
            self._doing = None

    def as_json(self) -> Dict[str, Any]:
        """Return the tiles and what is decided of each, the worst first.

        Raises:
            ViewError: If the file of decisions cannot be read.
        """
        self._asked.set()
        with self._lock:
            tiles, doing = list(self._tiles.items()), self._doing
        decided = self._file.read()
        return dict(
            file=as_text(self.path.name), doing=doing, notes=list(self._notes),
            decisions=list(DECISIONS), tiles=[
                self._tile_json(name, *each, decided.get(self._key(*each)))
                for name, each in tiles])

    def decide(self, tile: str, decision: Optional[str], before: str
               ) -> Tuple[bool, Dict[str, Any]]:
        """Write a decision, or take it back.

        Args:
            tile: Identity of the tile.
            decision: One of ``DECISIONS``; None takes the present one back.
            before: The ``before`` that the tile had when it was shown.

        Returns:
            Whether it was written, and ``tile`` as it is now. It is not written, and ``sentence``
            says so, where another decision was made in the meantime.

        Raises:
            KeyError: If there is no such tile, as the maps have changed.
            ViewError: If the file cannot be written.
        """
        self._asked.set()  # by a page that was there before the viewer was started again
        with self._lock:
            number, ranked = self._tiles[tile]
        raster, scenes = self._rasters[number], self._session.entries[number].scenes
        crs = raster.crs if raster.is_georeferenced else None
        facts = dict(score=ranked.score, measure=ranked.measure, checksum=ranked.checksum,
                     path=_scene_name(scenes[0]) if len(scenes) == 1 else '')
        try:
            now = self._file.save(
                self._key(number, ranked), decision, before, facts,
                None if crs is None else window_outline(raster, *ranked[:4]),
                '' if crs is None else crs.to_wkt())
        except StateChangedError as error:
            return False, dict(tile=self._tile_json(tile, number, ranked, error.current),
                               sentence=str(error))
        return True, dict(tile=self._tile_json(tile, number, ranked, now))

    def _rank_map(self, number: int, entry: MapEntry) -> List[RankedTile]:
        with Raster(entry.path) as raster:  # its place is needed later, the file is not
            self._rasters[number] = raster
        told = -1

        def tell(share: float) -> None:
            nonlocal told
            if int(share * 10) > told:
                told = int(share * 10)
                with self._lock:
                    self._doing = f'The tiles of {entry.name} are being ranked: {told}0 %.'

        return rank(entry.path, self._session.file(number, 'confidence'),
                    self._session.file(number, 'truth'),
                    list(windows_of((raster.height, raster.width), *entry.windows)), tell)

    def _key(self, number: int, tile: RankedTile) -> ReviewKey:
        folder = os.path.realpath(self.path.parent)
        name = os.path.relpath(os.path.realpath(self._session.entries[number].path), folder)
        return ReviewKey(as_text(name), *tile[:4])

    def _identity(self, number: int, tile: RankedTile) -> str:
        """Return what names a tile to the page: another map, also of the same name, has others."""
        text = repr((*self._key(number, tile), tile.checksum))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _tile_json(self, name: str, number: int, tile: RankedTile,
                   decided: Optional[ReviewDecision]) -> Dict[str, Any]:
        fresh = decided is not None and decided.checksum == tile.checksum
        return dict(
            id=name, map=number, corners=self._corners(number, tile), score=tile.score,
            measure=tile.measure, before='' if decided is None else decided.state,
            decision=decided.decision if decided is not None and fresh else None,
            earlier=None if decided is None or fresh else decided.decision)

    def _corners(self, number: int, tile: RankedTile) -> List[List[float]]:
        """Return the corners in the coordinates of the page."""
        raster, (left, top, width, height) = self._rasters[number], tile[:4]
        pixels = np.array([(left, top), (left + width, top), (left + width, top + height),
                           (left, top + height)], float)
        if raster.transform.is_identity:  # in the page y grows upward from the last row
            return (np.array([0, raster.height]) + pixels * [1, -1]).tolist()
        return to_map(raster.transform, pixels).tolist()


def _check_folder(path: Path) -> None:
    """Make the folder of a review now: at the first decision it would be too late."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ViewError(f'--review {path}: its folder cannot be made ({error}); give another '
                        'path.') from error
    if not os.access(path.parent, os.W_OK):
        raise ViewError(f'--review {path}: its folder cannot be written; give another path.')


def _first_crs(session: ViewSession) -> str:
    """Return the CRS of the first map that has one, as WKT."""
    for entry in session.entries:
        with Raster(entry.path) as raster:
            if raster.is_georeferenced and raster.crs is not None:
                return raster.crs.to_wkt()
    return _NO_CRS


def _scene_name(name: str) -> str:
    return as_text(name if is_gdal_name(name) else os.path.realpath(name))
