"""Scans of whole scenes: done by one process of a machine, and kept for later starts."""
from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Callable, List, Optional, Sequence

import numpy as np
from mmengine.logging import print_log

from mapsage.atomic_write import atomic_write
from mapsage.geo import GeoError, Raster, stamp

FOLDER_VARIABLE = 'MAPSAGE_SCENE_CACHE'

_FORMAT = 2  # of the files; another one has other names
_PATIENCE = 600.0  # seconds for which a process waits for others, before it scans by itself
_PAUSE = 0.05  # seconds between two looks whether another process is done
_WORTH_A_LINE = 5.0  # seconds of scanning after which the log says what takes so long


def scan_scenes(scenes: Sequence[Raster], what: Sequence[Any],
                scan: Callable[[Raster], np.ndarray]) -> List[np.ndarray]:
    """Return ``scan(scene)`` for each scene, from a file where it has been computed before.

    Processes of one machine that ask at the same time take different scenes, and each waits for
    what the others scan. They agree by locks of the operating system, which end with the process
    that holds them, and only work is saved by them: whoever finds no lock, no folder, or nobody
    to finish in time scans by itself.

    Results are kept below the user's cache folder, or below ``$MAPSAGE_SCENE_CACHE``; if it cannot
    be written, in the folder for temporary files. They belong to the path, size and time of change
    of all files of a scene.

    Args:
        scenes: Scenes.
        what: Values of JSON that together with a scene decide what ``scan`` returns.
        scan: Function of a scene that reads it.

    Raises:
        RasterBlockError: If a scene is damaged.
    """
    folder = cache_folder()
    found: List[Optional[np.ndarray]] = []
    paths = [None if folder is None else _entry(folder, scene, what) for scene in scenes]
    clock = _Clock(len(scenes), folder)
    for scene, path in zip(scenes, paths):
        result = None if path is None else _load(path)
        if result is None:
            with _ScanLock(path) as mine:
                if mine:
                    result = _scan_and_keep(scene, path, scan)
        clock.look()
        found.append(result)
    deadline = time.monotonic() + _PATIENCE
    return [_wait(scene, path, scan, deadline) if result is None else result
            for scene, path, result in zip(scenes, paths, found)]


def cache_folder() -> Optional[Path]:
    """Return the folder of the results, made first if necessary; None if none can be written."""
    named = os.environ.get(FOLDER_VARIABLE)
    user = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    own = os.path.join(gettempdir(), f'mapsage-{os.getuid()}')
    for place in (named or os.path.join(user, 'mapsage', 'scenes'), own):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            safe = place != own or os.stat(own).st_uid == os.getuid()  # its parent is everybody's
            if safe and os.access(place, os.W_OK):
                return Path(place)
        except OSError:
            continue
    return None


def _entry(folder: Path, scene: Raster, what: Sequence[Any]) -> Optional[Path]:
    """Return where the result for a scene is kept; None if one of its files has no stamp."""
    try:
        stamps = [stamp(path) for path in scene.files()]
    except (OSError, GeoError):
        return None
    if any(len(each) < 2 for each in stamps):  # a name alone
        return None
    about = [_FORMAT, list(what), list(scene.bands), scene.validity.facts(), stamps]
    return folder / f'{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.npy'


def _load(path: Path) -> Optional[np.ndarray]:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):  # not there, or cut off
        return None


def _scan_and_keep(scene: Raster, path: Optional[Path], scan: Callable[[Raster], np.ndarray]
                   ) -> np.ndarray:
    result = None if path is None else _load(path)  # written while this process took its turn
    if result is None:
        result = scan(scene)
        if path is not None:
            data = io.BytesIO()
            np.save(data, result)
            try:
                atomic_write(path, data.getvalue())
            except OSError:  # a full disk: the next start scans again
                pass
    return result


def _wait(scene: Raster, path: Optional[Path], scan: Callable[[Raster], np.ndarray],
          deadline: float) -> np.ndarray:
    """Return the result of a scene that another process scans, or has given up."""
    assert path is not None  # otherwise it was this process's turn
    while time.monotonic() < deadline:
        result = _load(path)
        if result is not None:
            return result
        with _ScanLock(path) as free:
            if free:
                break
        time.sleep(_PAUSE)
    # Without taking the turn: if nothing can be kept, all who waited scan side by side.
    return _scan_and_keep(scene, path, scan)


class _ScanLock:
    """A lock between processes of one machine; entering says whether this process has it.

    It lies in the folder for temporary files, since locks on shared disks may be missing or hang.
    """

    def __init__(self, path: Optional[Path]) -> None:
        self._name = None if path is None else os.path.join(
            gettempdir(), f'mapsage-{os.getuid()}-{path.stem}.lock')
        self._file: Optional[int] = None

    def __enter__(self) -> bool:
        if self._name is None:
            return True
        try:
            self._file = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return True  # no lock can be had here, for any process
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            os.close(self._file)
            self._file = None
            return False

    def __exit__(self, *exception: Any) -> None:
        if self._file is None or self._name is None:
            return
        try:
            os.unlink(self._name)
        except OSError:
            pass
        fcntl.flock(self._file, fcntl.LOCK_UN)  # also for children that were forked meanwhile
        os.close(self._file)
        self._file = None


class _Clock:
    """Says in the log, once, that scenes are being scanned, if that takes long."""

    def __init__(self, count: int, folder: Optional[Path]) -> None:
        self._start: Optional[float] = time.monotonic()
        self._text = (f'{count} scene(s) are read once, to find where they have data or labels; '
                      f'what is found is kept in {folder} for later starts')

    def look(self) -> None:
        """Look how long it has taken."""
        if self._start is not None and time.monotonic() - self._start > _WORTH_A_LINE:
            self._start = None
            print_log(self._text, logger='current')
