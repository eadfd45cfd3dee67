"""A review: the tiles of all maps, the worst first, and the user's decisions on them.

The tiles are ranked once (`ranking.py`), when a page first asks for them. The decisions live in a
file that other programs may change (`decisions.py`), so nothing about them is kept in memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

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
from .decisions import DECISIONS, ReviewDecision, ReviewFile, ReviewKey, StateChangedError, as_text
from .errors import ViewError
from .ranking import RankedTile, order, rank, windows_of
from .session import ViewSession

MOST = 5000
"""Largest number of tiles in a review; nobody looks at more of them."""

# CRS of a review's file if no map has one.
_NO_CRS = 'EPSG:4326'


class Review:
    """The tiles of a session's maps in the order in which they are reviewed.

    A decision is in the file before the page gets an answer. Every answer reads the file again,
    because other viewers and QGIS may have written it meanwhile.

    Args:
        session: Maps to review.
        path: Path of the GeoPackage of decisions; default: ``review.gpkg`` beside the first map.
        say: Function that is called with a sentence about work that takes time.

    Raises:
        ViewError: If ``path`` is given and its folder cannot be created or written.
    """

    def __init__(
        self,
        session: ViewSession,
        path: Union[None, str, Path] = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._session, self._say = session, say
        self.path = Path(path or session.entries[0].path.with_name('review.gpkg'))
        if path is not None:
            _check_folder(self.path)
        self._file = ReviewFile(self.path, _first_crs(session))
        self._lock, self._requested = threading.Lock(), threading.Event()
        # Identity -> (number of the map, tile), the worst first.
        self._tiles: Dict[str, Tuple[int, RankedTile]] = {}
        self._rasters: Dict[int, Raster] = {}
        self._notes: List[str] = []
        self._doing: Optional[str] = 'The maps are being prepared.'

    def rank_when_asked(self) -> None:
        """Wait until a page asks for the tiles, then rank them.

        Ranking reads all maps, and many users never open the review.
        """
        self._requested.wait()
        self.rank()

    def rank(self) -> None:
        """Rank the tiles of all maps. The session must have been prepared."""
        tiles: List[Tuple[int, RankedTile]] = []
        for number, entry in enumerate(self._session.entries):
            try:
                tiles += [(number, tile) for tile in self._rank_map(number, entry)]
            except (GeoError, ViewError, RasterBlockError, OSError) as error:
                self._notes.append(f'{entry.name} is not reviewed: {error}')
                self._say(self._notes[-1])
        worst = order(tiles)[:MOST]
        if len(worst) < len(tiles):
            self._notes.append(f'{MOST:,} of {len(tiles):,} tiles, the worst ones.')
        with self._lock:
            self._tiles = {self._identity(number, tile): (number, tile) for number, tile in worst}
            self._doing = None

    def as_json(self) -> Dict[str, Any]:
        """Return the tiles with the decisions on them, the worst first.

        Raises:
            ViewError: If the file of decisions cannot be read.
        """
        self._requested.set()
        with self._lock:
            tiles, doing = list(self._tiles.items()), self._doing
        decisions = self._file.read()
        return dict(
            file=as_text(self.path.name),
            doing=doing,
            notes=list(self._notes),
            decisions=list(DECISIONS),
            tiles=[
                self._tile_json(identity, number, tile, decisions.get(self._key(number, tile)))
                for identity, (number, tile) in tiles
            ],
        )

    def decide(
        self, tile: str, decision: Optional[str], expected_state: str
    ) -> Tuple[bool, Dict[str, Any]]:
        """Write a decision, or take it back.

        Args:
            tile: Identity of the tile.
            decision: One of ``DECISIONS``; None takes the current one back.
            expected_state: Value of ``before`` that the tile had when it was shown.

        Returns:
            Whether the decision was written, and the new state of the ``tile``. If another decision
            was made in the meantime, nothing is written, and ``sentence`` says so.

        Raises:
            KeyError: If there is no such tile, because the maps have changed.
            ViewError: If the file cannot be written.
        """
        # A page that was loaded before the viewer was restarted may decide without asking first.
        self._requested.set()
        with self._lock:
            number, ranked = self._tiles[tile]
        raster, scenes = self._rasters[number], self._session.entries[number].scenes
        crs = raster.crs if raster.is_georeferenced else None
        facts = dict(
            score=ranked.score,
            measure=ranked.measure,
            checksum=ranked.checksum,
            path=_scene_name(scenes[0]) if len(scenes) == 1 else '',
        )
        try:
            saved = self._file.save(
                self._key(number, ranked),
                decision,
                expected_state,
                facts,
                None if crs is None else window_outline(raster, *ranked[:4]),
                '' if crs is None else crs.to_wkt(),
            )
        except StateChangedError as error:
            return False, dict(
                tile=self._tile_json(tile, number, ranked, error.current), sentence=str(error)
            )
        return True, dict(tile=self._tile_json(tile, number, ranked, saved))

    def _rank_map(self, number: int, entry: MapEntry) -> List[RankedTile]:
        # Closed at once: the decisions need the raster's CRS and transform, but not its file.
        with Raster(entry.path) as raster:
            self._rasters[number] = raster
        last_tenths = -1

        def report(share: float) -> None:
            nonlocal last_tenths
            tenths = int(share * 10)
            if tenths > last_tenths:
                last_tenths = tenths
                with self._lock:
                    self._doing = f'The tiles of {entry.name} are being ranked: {tenths}0 %.'

        return rank(
            entry.path,
            self._session.file(number, 'confidence'),
            self._session.file(number, 'truth'),
            list(windows_of((raster.height, raster.width), *entry.windows)),
            report,
        )

    def _key(self, number: int, tile: RankedTile) -> ReviewKey:
        folder = os.path.realpath(self.path.parent)
        name = os.path.relpath(os.path.realpath(self._session.entries[number].path), folder)
        return ReviewKey(as_text(name), *tile[:4])

    def _identity(self, number: int, tile: RankedTile) -> str:
        """Return the tile's name for the page, which changes with the content of the map."""
        text = repr((*self._key(number, tile), tile.checksum))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _tile_json(
        self, identity: str, number: int, tile: RankedTile, decision: Optional[ReviewDecision]
    ) -> Dict[str, Any]:
        # A decision on an earlier state of the map is shown, but it does not count.
        is_current = decision is not None and decision.checksum == tile.checksum
        return dict(
            id=identity,
            map=number,
            corners=self._corners(number, tile),
            score=tile.score,
            measure=tile.measure,
            before='' if decision is None else decision.state,
            decision=decision.decision if decision is not None and is_current else None,
            earlier=None if decision is None or is_current else decision.decision,
        )

    def _corners(self, number: int, tile: RankedTile) -> List[List[float]]:
        """Return the corners in the coordinates of the page."""
        raster, (left, top, width, height) = self._rasters[number], tile[:4]
        pixels = np.array(
            [(left, top), (left + width, top), (left + width, top + height), (left, top + height)],
            float,
        )
        # For a map without coordinates, the y axis of the page starts at the last row, upward.
        if raster.transform.is_identity:
            return (np.array([0, raster.height]) + pixels * [1, -1]).tolist()
        return to_map(raster.transform, pixels).tolist()


def _check_folder(path: Path) -> None:
    """Create the folder of a review at the start, not at the first decision.

    Raises:
        ViewError: If the folder cannot be created or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ViewError(
            f'--review {path}: its folder cannot be made ({error}); give another path.'
        ) from error
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
