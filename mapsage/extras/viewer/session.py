"""The maps that a viewer shows, and their files in the form that a browser reads.

Maps are prepared one after the other in a thread, while `server.py` already answers from other
threads; a lock guards what both use. `display.py` makes the copies.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import GeoError, RasterBlockError

from .catalog import MapEntry, check_servers
from .display import (
    AS_BY_DEFAULT,
    Matrix,
    Progress,
    TruthSettings,
    scene_for_display,
    truth_for_display,
)
from .errors import ViewError


class ViewSession:
    """The maps of a viewer and their files, which are prepared one map after the other.

    Only files of the session reach the browser. If a file of a map cannot be shown, the map gets a
    note that says why, and its other files are shown.

    Args:
        entries: Maps to show.
        truth: Settings for reading the labels.
        say: Function that is called with a sentence about work that takes time.
        allow_remote: Whether servers are asked for scenes and labels that files name.
    """

    def __init__(
        self,
        entries: Sequence[MapEntry],
        truth: TruthSettings = AS_BY_DEFAULT,
        say: Callable[[str], None] = lambda text: None,
        allow_remote: bool = False,
    ) -> None:
        self.entries = list(entries)
        self._allow_remote = allow_remote
        self._truth_settings = truth
        self._say = say
        self._lock = threading.Lock()
        self._files: Dict[Tuple[int, str], Path] = {}
        self._stamps: Dict[Tuple[int, str], str] = {}
        self._confusion: Dict[int, Matrix] = {}
        self._doing: Dict[int, str] = {}
        self._ready: Dict[int, bool] = {}
        for number, entry in enumerate(self.entries):
            self._add(number, 'map', entry.path)
            if entry.confidence is not None:
                self._add(number, 'confidence', entry.confidence)

    def prepare(self) -> None:
        """Make the copies that the browser needs, map by map."""
        for number in range(len(self.entries)):
            self.prepare_map(number)

    def prepare_map(self, number: int) -> None:
        """Make the copies of one map's scene and labels that the browser needs."""
        entry = self.entries[number]
        if entry.scenes:
            self._prepare_file(
                number, 'scene', lambda progress: self._prepare_scene(number, progress)
            )
        if entry.truth is not None:
            self._prepare_file(
                number, 'truth', lambda progress: self._prepare_truth(number, progress)
            )
        with self._lock:
            self._doing.pop(number, None)
            self._ready[number] = True

    def as_json(self, url_of: Callable[[int, str], str]) -> Dict[str, Any]:
        """Return the catalog for the page: facts, state and URLs of all maps.

        Args:
            url_of: Function that returns the URL of a file, from the number of the map and the
                kind.
        """
        with self._lock:
            kinds = list(self._files)
            state = [
                (
                    self._ready.get(number, False),
                    self._doing.get(number),
                    self._confusion.get(number),
                )
                for number in range(len(self.entries))
            ]
        maps = []
        for number, entry in enumerate(self.entries):
            ready, doing, confusion = state[number]
            maps.append(
                dict(
                    entry.as_json(),
                    ready=ready,
                    doing=doing,
                    **scores_of(confusion),
                    files={kind: url_of(number, kind) for owner, kind in kinds if owner == number},
                    polygons=url_of(number, 'polygons') if entry.polygons is not None else None,
                )
            )
        return dict(maps=maps)

    def file(self, number: int, kind: str) -> Optional[Path]:
        """Return the path of a file of a map, or None if the viewer has none of this kind."""
        with self._lock:
            return self._files.get((number, kind))

    def stamp(self, number: int, kind: str) -> str:
        """Return size and time that the file had when the viewer found it, see `stamp_of`."""
        with self._lock:
            return self._stamps[number, kind]

    def _add(self, number: int, kind: str, path: Path) -> None:
        with self._lock:
            self._files[number, kind] = path
            self._stamps[number, kind] = stamp_of(path)

    def _prepare_scene(self, number: int, progress: Progress) -> Path:
        entry = self.entries[number]
        if not self._allow_remote:
            check_servers(entry.scenes, entry.path.with_suffix('.json').name)
        return scene_for_display(entry, progress)

    def _prepare_truth(self, number: int, progress: Progress) -> Path:
        if not self._allow_remote:
            check_servers([str(self.entries[number].truth)], 'the command')
        path, confusion = truth_for_display(self.entries[number], progress, self._truth_settings)
        with self._lock:
            self._confusion[number] = confusion
        return path

    def _prepare_file(self, number: int, kind: str, make: Callable[[Progress], Path]) -> None:
        """Add the file that ``make`` returns, and report its progress; an error becomes a note."""
        entry = self.entries[number]
        last_percent = -1

        def report(share: float) -> None:
            nonlocal last_percent
            percent = int(share * 10) * 10
            if percent > last_percent:
                last_percent = percent
                text = f'preparing the {kind} of {entry.name} for the browser: {percent} %'
                self._say(text)
                with self._lock:
                    self._doing[number] = text

        try:
            self._add(number, kind, make(report))
        except (GeoError, ViewError, RasterBlockError, OSError) as error:
            entry.notes.append(f'The {kind} is not shown: {error}')
            self._say(entry.notes[-1])


def scores_of(confusion: Optional[Matrix]) -> Dict[str, Any]:
    """Return the scores that the page shows.

    Args:
        confusion: Numbers of pixels, (labeled class, class in the map).

    Returns:
        ``accuracy``: numbers of right and of labeled pixels. ``iou``: IoU of each class, 0 to 1;
        None for a class that occurs neither in the labels nor in the map. Both are None without a
        matrix.
    """
    if confusion is None:
        return dict(accuracy=None, iou=None)
    matrix = np.array(confusion, np.int64)
    right = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - right
    return dict(
        accuracy=[int(right.sum()), int(matrix.sum())],
        iou=[float(hits / pixels) if pixels else None for hits, pixels in zip(right, union)],
    )


def stamp_of(path: Path) -> str:
    """Return a text with size and modification time of a file, for a URL."""
    stat = path.stat()
    return f'{stat.st_size:x}-{stat.st_mtime_ns:x}'
