"""Scans of whole scenes: each done by one process of a machine, and cached for later starts.

A scan finds out where a scene has data or labels. Locks divide the scenes among the processes of a
machine; they only save work, and every process falls back to scanning by itself. So a missing lock,
a full disk or a killed process costs time, never a wrong result.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Callable, Iterator, List, Optional, Sequence

import numpy as np
from mmengine.logging import print_log

from mapsage.base.file_locks import lock, unlock
from mapsage.base.files import atomic_write
from mapsage.base.process import return_free_memory
from mapsage.geo import GeoError, Raster, stamp

FOLDER_VARIABLE = 'MAPSAGE_SCENE_CACHE'

# Format of the cached files. It is part of their names, so files of another format are not read.
_FORMAT = 3
# Seconds for which a process waits for a scan of another process before it scans by itself.
_PATIENCE = 600.0
# Seconds between two checks whether another process is done.
_PAUSE = 0.05
# Seconds of scanning after which the log says what takes so long.
_LOG_AFTER = 5.0
# Number of scans after which free memory is returned. GDAL's blocks leave gaps in the heap, so that
# glibc would keep tens of megabytes. It takes a tenth of one scan of 1,024 x 1,024 pixels.
_TRIM_AFTER = 8


def scan_scenes(
    scenes: Sequence[Raster],
    settings: Sequence[object],
    scan: Callable[[Raster], np.ndarray],
    settings_of_scenes: Sequence[object] = (),
) -> List[np.ndarray]:
    """Return ``scan(scene)`` for each scene, from the cache if it has been computed before.

    Processes of one machine that call this at the same time scan different scenes, and then wait
    for each other's results. They coordinate by locks of the operating system, which end with the
    process. A process that gets no lock or no cache folder, or has waited too long, scans by
    itself.

    The cache is below the user's cache folder, or below ``$MAPSAGE_SCENE_CACHE``; if that cannot be
    written, in the folder for temporary files. An entry is valid for the path, size and time of
    change of all files of a scene.

    Args:
        scenes: Scenes.
        settings: JSON values that determine, together with a scene, what ``scan`` returns.
        scan: Function that reads a scene, which is closed then, and returns an array.
        settings_of_scenes: JSON value for each scene that only this scene's result depends on;
            empty if there are none.

    Raises:
        RasterBlockError: If a scene is damaged.
    """
    folder = cache_folder()
    results: List[Optional[np.ndarray]] = []
    common = json.dumps(list(settings))
    paths = [
        None if folder is None else _entry(folder, scene, common, scene_settings)
        for scene, scene_settings in zip(scenes, settings_of_scenes or [None] * len(scenes))
    ]
    log_at = time.monotonic() + _LOG_AFTER
    scans = 0
    for scene, path in zip(scenes, paths):
        result = None if path is None else _load(path)
        if result is None:
            with _scan_lock(path) as acquired:
                if acquired:
                    result = _scan_and_save(scene, path, scan)
                    scans += 1
                    if scans % _TRIM_AFTER == 0:
                        return_free_memory()
        if time.monotonic() > log_at:
            log_at = math.inf
            print_log(
                f'{len(scenes)} scene(s) are read once, to find where they have data or labels; '
                f'the result is kept in {folder} for later starts',
                logger='current',
            )
        results.append(result)
    deadline = time.monotonic() + _PATIENCE
    return [
        _wait(scene, path, scan, deadline) if result is None else result
        for scene, path, result in zip(scenes, paths, results)
    ]


def cache_folder() -> Optional[Path]:
    """Return the cache folder, which is created if necessary, or None if none can be written."""
    configured = os.environ.get(FOLDER_VARIABLE)
    user_cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    temporary = os.path.join(gettempdir(), f'mapsage-{os.getuid()}')
    for folder in (configured or os.path.join(user_cache, 'mapsage', 'scenes'), temporary):
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            # Any user can create a folder of this name in the folder for temporary files.
            safe = folder != temporary or os.stat(temporary).st_uid == os.getuid()
            if safe and os.access(folder, os.W_OK):
                return Path(folder)
        except OSError:
            continue
    return None


def _entry(folder: Path, scene: Raster, settings: str, scene_settings: object) -> Optional[Path]:
    """Return the path of a scene's cached result.

    Returns None if one of the scene's files has no stamp, so that a change would not be noticed.
    """
    try:
        stamps = [stamp(path) for path in scene.files()]
    except (OSError, GeoError):
        return None
    # A stamp of one value is the name of the file only.
    if any(len(file_stamp) < 2 for file_stamp in stamps):
        return None
    key = [_FORMAT, settings, scene_settings, list(scene.bands), scene.facts()['validity'], stamps]
    return folder / f'{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.npy'


def _load(path: Path) -> Optional[np.ndarray]:
    """Return a cached result, or None if the file is missing or cut off."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None


def _scan_and_save(
    scene: Raster, path: Optional[Path], scan: Callable[[Raster], np.ndarray]
) -> np.ndarray:
    # Another process may have written the result before this one got the lock.
    result = None if path is None else _load(path)
    if result is None:
        with scene:
            result = scan(scene)
        if path is not None:
            data = io.BytesIO()
            np.save(data, result)
            try:
                atomic_write(path, data.getvalue())
            except OSError:
                # For example a full disk. The next start scans again.
                pass
    return result


def _wait(
    scene: Raster, path: Optional[Path], scan: Callable[[Raster], np.ndarray], deadline: float
) -> np.ndarray:
    """Return the result of a scene for which another process had the lock.

    If that process ends without a result, or the deadline passes, scan the scene here.
    """
    # Without a path every process gets the lock.
    assert path is not None
    while time.monotonic() < deadline:
        result = _load(path)
        if result is not None:
            return result
        with _scan_lock(path) as acquired:
            if acquired:
                break
        time.sleep(_PAUSE)
    # The lock is released again: if no result can be saved, the waiting processes scan in parallel
    # and not one after the other.
    return _scan_and_save(scene, path, scan)


@contextlib.contextmanager
def _scan_lock(path: Optional[Path]) -> Iterator[bool]:
    """Lock a scan between the processes of a machine; yield whether this process got the lock.

    The lock file is in the folder for temporary files, because locks on shared disks may be missing
    or hang.
    """
    name = os.path.join(gettempdir(), f'mapsage-{os.getuid()}-{path.stem}.lock') if path else ''
    try:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        # No process of this machine can get the lock, so each one scans by itself.
        yield True
        return
    acquired = bool(lock(file))
    try:
        yield acquired
    finally:
        if acquired:
            with contextlib.suppress(OSError):
                os.unlink(name)
            # Closing the file would not be enough if a child was forked in the meantime: it
            # inherits the lock.
            unlock(file)
        os.close(file)
