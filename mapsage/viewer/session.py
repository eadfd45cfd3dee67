"""What a viewer shows: the maps, the copies that are made for them, and the files of each."""
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
    TruthSettings,
    scene_for_display,
    truth_for_display,
)
from .errors import ViewError


class ViewSession:
    """The maps of a viewer and their files, which are prepared one map after the other.

    Only files that are named here reach the browser. What cannot be shown of a map becomes a note
    of that map; the others are shown.

    Args:
        entries: Maps to show.
        truth: How the labels are read.
        say: Function that is told of what takes time: a sentence.
        allow_remote: Whether servers are asked for scenes and labels that files name.
    """

    def __init__(self, entries: Sequence[MapEntry], truth: TruthSettings = AS_BY_DEFAULT,
                 say: Callable[[str], None] = lambda text: None, allow_remote: bool = False
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
        """Make what the browser cannot read otherwise, map by map."""
        for number in range(len(self.entries)):
            self.prepare_map(number)

    def prepare_map(self, number: int) -> None:
        """Make what the browser cannot read otherwise of one map."""
        entry = self.entries[number]
        if entry.scenes:
            self._try(number, 'scene', lambda tell: self._scene(number, tell))
        if entry.truth is not None:
            self._try(number, 'truth', lambda tell: self._truth(number, tell))
        with self._lock:
            self._doing.pop(number, None)
            self._ready[number] = True

    def as_json(self, place: Callable[[int, str], str]) -> Dict[str, Any]:
        """Return what the page needs to know.

        Args:
            place: Function that returns the URL of a file, from the number of the map and the kind.
        """
        with self._lock:
            kinds = list(self._files)
            state = [(self._ready.get(number, False), self._doing.get(number),
                      self._confusion.get(number)) for number in range(len(self.entries))]
        maps = []
        for number, entry in enumerate(self.entries):
            ready, doing, confusion = state[number]
            maps.append(dict(
                entry.as_json(), ready=ready, doing=doing, **scores_of(confusion),
                files={kind: place(number, kind) for of, kind in kinds if of == number},
                polygons=place(number, 'polygons') if entry.polygons is not None else None))
        return dict(maps=maps)

    def file(self, number: int, kind: str) -> Optional[Path]:
        """Return the path of a file of a map, or None if the viewer has none of this kind."""
        with self._lock:
            return self._files.get((number, kind))

    def stamp(self, number: int, kind: str) -> str:
        """Return what told the file from others of its name when the viewer found it."""
        with self._lock:
            return self._stamps[number, kind]

    def _add(self, number: int, kind: str, path: Path) -> None:
        with self._lock:
            self._files[number, kind] = path
            self._stamps[number, kind] = stamp_of(path)

    def _scene(self, number: int, tell: Callable[[float], None]) -> Path:
        entry = self.entries[number]
        if not self._allow_remote:
            check_servers(entry.scenes, entry.path.with_suffix('.json').name)
        return scene_for_display(entry, tell)

    def _truth(self, number: int, tell: Callable[[float], None]) -> Path:
        if not self._allow_remote:
            check_servers([str(self.entries[number].truth)], 'the command')
        path, confusion = truth_for_display(self.entries[number], tell, self._truth_settings)
        with self._lock:
            self._confusion[number] = confusion
        return path

    def _try(self, number: int, kind: str, make: Callable[[Callable[[float], None]], Path]) -> None:
        entry = self.entries[number]
        told = -1

        def tell(share: float) -> None:
            nonlocal told
            percent = int(share * 10) * 10
            if percent > told:
                told = percent
                text = f'preparing the {kind} of {entry.name} for the browser: {percent} %'
                self._say(text)
                with self._lock:
                    self._doing[number] = text

        try:
            self._add(number, kind, make(tell))
        except (GeoError, ViewError, RasterBlockError, OSError) as error:
            entry.notes.append(f'The {kind} is not shown: {error}')
            self._say(entry.notes[-1])


def scores_of(confusion: Optional[Matrix]) -> Dict[str, Any]:
    """Return what the page shows of a confusion matrix.

    Returns:
        ``accuracy``: numbers of right and of labeled pixels. ``iou``: of each class 0 to 1, None of
        one that is neither in the labels nor in the map there. Both None without a matrix.
    """
    if confusion is None:
        return dict(accuracy=None, iou=None)
    matrix = np.array(confusion, np.int64)
    right = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - right
    return dict(accuracy=[int(right.sum()), int(matrix.sum())],
                iou=[float(hits / whole) if whole else None for hits, whole in zip(right, union)])


def stamp_of(path: Path) -> str:
    """Return size and time of a file, as a part of a URL."""
    stat = path.stat()
    return f'{stat.st_size:x}-{stat.st_mtime_ns:x}'
