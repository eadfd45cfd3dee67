"""The open files of one raster: one for each process and thread that reads it.

GDAL's handles have a position in the file, so two threads, or a process and its fork, cannot share
one. `Raster` reads through this class and can therefore be pickled, forked and used in threads.
"""
from __future__ import annotations

import os
import threading
from typing import Any, Dict, Tuple

import rasterio
from rasterio.errors import RasterioError, RasterioIOError

from .errors import GeoError
from .gdal_files import describe_open_failure, open_file


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

        GDAL reports a mosaic's source that cannot be opened only once per handle; further reads of
        the same handle would return zeros.
        """
        handle = self._handles.pop((os.getpid(), threading.get_ident()), None)
        if handle is not None:
            handle.close()

    def close(self) -> None:
        """Close the handles of this process; a later read opens a new one."""
        handles, self._handles = self._handles, {}
        for (process, _), handle in handles.items():
            if process == os.getpid():
                handle.close()

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__, _handles={})
