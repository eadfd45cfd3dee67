"""The open files of one raster: one for each process and thread that reads it.

GDAL's handles have a position in the file, so two threads, or a process and its fork, cannot share
one. `Raster` reads through this class and can therefore be pickled, forked and used in threads.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Dict, Optional, Sequence, Tuple

import rasterio
from rasterio.env import get_gdal_config
from rasterio.errors import RasterioError, RasterioIOError
from rasterio.transform import from_origin

from .errors import GeoError
from .gdal_files import describe_open_failure, open_file

# Nanoseconds within which a file may change twice with the same time: a tick of the kernel, and the
# two seconds of file systems that store whole seconds.
_TICK, _COARSE_TICK = 20_000_000, 2_000_000_000
# Largest number of files that are looked at before every read.
_MANY = 64
# Number of datasets in GDAL's pool if GDAL_MAX_DATASET_POOL_SIZE is not set.
_POOL_SIZE = 100
# Any georeference: rasterio warns of files without.
_SOMEWHERE = from_origin(0, 1, 1, 1)


class FileHandles:
    """Opens a file when a process or thread first needs it, and keeps it open.

    Args:
        path: Path of a file, or a name that GDAL opens.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # (process, thread) -> the open file.
        self._handles: Dict[Tuple[int, int], rasterio.DatasetReader] = {}

    def open(self) -> rasterio.DatasetReader:
        """Open the file once more; the caller closes it.

        Raises:
            GeoError: If the file cannot be opened.
        """
        try:
            return open_file(self.path)
        # Before rasterio 1.4 the second class is not a subclass of the first.
        except (RasterioError, RasterioIOError) as error:
            raise GeoError(describe_open_failure(self.path, error)) from error

    def get(self) -> rasterio.DatasetReader:
        """Return this thread's open file, and open it if necessary.

        Raises:
            GeoError: If the file cannot be opened.
        """
        key = os.getpid(), threading.get_ident()
        handle = self._handles.get(key)
        if handle is None:
            # A forked process inherits the handles of its parent, and both would move the same
            # file position. The keys are copied first because other threads may add handles
            # during the loop.
            for inherited in list(self._handles):
                if inherited[0] != key[0]:
                    self._handles.pop(inherited, None)
            handle = self._handles[key] = self.open()
        return handle

    def is_open(self) -> bool:
        """Return whether this thread has the file open."""
        return (os.getpid(), threading.get_ident()) in self._handles

    def drop(self) -> None:
        """Close this thread's handle, for example after a read has failed.

        GDAL reports a mosaic's source that cannot be opened only once per handle, and once per
        process while other mosaics are open; further reads would return zeros.
        """
        handle = self._handles.pop((os.getpid(), threading.get_ident()), None)
        if handle is not None:
            is_mosaic = handle.driver == 'VRT'
            handle.close()
            if is_mosaic:
                forget_sources()

    def close(self) -> None:
        """Close the handles of this process; a later read opens a new one."""
        handles, self._handles = self._handles, {}
        for (process, _), handle in handles.items():
            if process == os.getpid():
                handle.close()

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__, _handles={})


def forget_sources() -> None:
    """Make GDAL forget which sources of mosaics it could not open.

    Its pool of datasets (GDALDatasetPool) keeps the failure of a source, without the error, until
    as many others have been opened as the pool holds. Here these are files of a pixel in memory.
    """
    count = int(get_gdal_config('GDAL_MAX_DATASET_POOL_SIZE') or _POOL_SIZE)
    with rasterio.MemoryFile() as memory:
        with memory.open(
            driver='GTiff', width=1, height=1, count=1, dtype='uint8', transform=_SOMEWHERE
        ):
            pass
        pixel = memory.read()
    files = [rasterio.MemoryFile(pixel) for _ in range(count)]
    sources = ''.join(
        f'<SimpleSource><SourceFilename>{file.name}</SourceFilename></SimpleSource>'
        for file in files
    )
    with rasterio.open(
        f'<VRTDataset rasterXSize="1" rasterYSize="1"><GeoTransform>'
        f'{", ".join(map(str, _SOMEWHERE.to_gdal()))}</GeoTransform>'
        f'<VRTRasterBand dataType="Byte" band="1">{sources}</VRTRasterBand>'
        f'</VRTDataset>'
    ) as mosaic:
        mosaic.read()
    for file in files:
        file.close()


class FileStates:
    """States of some files on disk: times, sizes and numbers (inodes).

    A look costs a ``stat`` of every file and of one folder. More than 64 files, which a mosaic may
    have, are looked at once a second, and whenever other states were taken since.

    Args:
        paths: Paths of local files.
        companions: Paths of files in one folder that GDAL reads as well if they exist.
    """

    _taken = 0

    def __init__(self, paths: Sequence[str], companions: Sequence[str] = ()) -> None:
        FileStates._taken += 1
        self.paths = (*paths, *(path for path in companions if os.path.exists(path)))
        self._needed = len(paths)
        self._missing = tuple(path for path in companions if path not in self.paths)
        self._folder_time = 0
        self._next_look, self._taken_before = 0.0, 0
        self._states = [_state(path) for path in self.paths]
        # A further change of a file that has just changed may give it the same state.
        self._is_final = not any(_is_recent(max(state[:2])) for state in self._states if state)

    def may_have_changed(self) -> bool:
        """Return whether a file may have changed since."""
        if len(self.paths) > _MANY:
            now = time.monotonic()
            if now < self._next_look and self._taken_before == FileStates._taken:
                return False
            self._next_look, self._taken_before = now + 1, FileStates._taken
        states = [_state(path) for path in self.paths]
        # A file that has left is no other file: reading it fails, or the open one is read.
        if None in states[: self._needed]:
            return False
        return not self._is_final or states != self._states or self._has_companion()

    def _has_companion(self) -> bool:
        """Return whether a companion exists that did not."""
        if not self._missing:
            return False
        # A new name changes the folder, so that one look at it replaces one for every name.
        folder = _state(os.path.dirname(self._missing[0]) or '.')
        if folder and folder[0] == self._folder_time:
            return False
        self._folder_time = 0 if folder is None or _is_recent(folder[0]) else folder[0]
        return any(os.path.exists(path) for path in self._missing)


def _state(path: str) -> Optional[Tuple[int, ...]]:
    """Return times of the last changes in nanoseconds, size and inode; None without a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def _is_recent(changed: int) -> bool:
    """Return whether a file could change now without another time."""
    tick = _TICK if changed % 1_000_000_000 else _COARSE_TICK
    return -_COARSE_TICK < time.time_ns() - changed < tick
