"""Rasters that stay open between reads; each thread has a bounded number of open files.

Opening a file takes longer than reading a window, and a process may open a limited number of files.
Rasters are per thread, because GDAL's handles are.
"""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from typing import Dict, Optional, Sequence, Tuple

from .raster import Conversion, Raster

# Limits of the number of open rasters of a thread.
_FEWEST, _MOST = 64, 1024

_thread_state = threading.local()

_Key = Tuple[str, Optional[Tuple[int, ...]], Optional[Conversion]]


def open_raster(
    path: str,
    bands: Optional[Sequence[int]] = None,
    known: Optional[Raster] = None,
    conversion: Optional[Conversion] = None,
) -> Raster:
    """Return a raster from this thread's pool, and open it if necessary.

    Args:
        path: Path of a file that GDAL reads.
        bands: Band numbers, as in ``Raster``.
        known: The raster, if its header has been read; if it has this path, the header is not
            read again.
        conversion: Conversion of the values, as in ``Raster``.

    Returns:
        The same ``Raster`` for the same arguments. The files of the rasters that this thread used
        last stay open (see ``most_open``). Others are closed, and a read opens them again. If a
        file has changed, the raster reads the new file.

    Raises:
        GeoError: If the file cannot be opened, or a band is missing.
    """
    rasters: Dict[_Key, Raster] = _thread_state.__dict__.setdefault('rasters', {})
    # Keys of the open rasters, from the least to the most recently used one.
    recent: OrderedDict = _thread_state.__dict__.setdefault('recent', OrderedDict())
    key = path, None if bands is None else tuple(bands), conversion
    if key not in rasters:
        # Separate handles, because a thread closes all handles of the rasters in its pool.
        raster = (
            known.with_other_handles()
            if known is not None and known.path == path
            else Raster(path, bands, True, conversion)
        )
        rasters[key] = raster.pool()
    rasters[key].refresh()
    recent[key] = None
    recent.move_to_end(key)
    while len(recent) > most_open():
        rasters[recent.popitem(last=False)[0]].close()
    return rasters[key]


def close_raster(path: str, bands: Optional[Sequence[int]] = None) -> None:
    """Close a raster of this thread's pool, so that GDAL forgets its decoded blocks."""
    key = path, None if bands is None else tuple(bands), None
    raster = _thread_state.__dict__.get('rasters', {}).get(key)
    if raster is not None:
        raster.close()
        _thread_state.recent.pop(key, None)


def most_open() -> int:
    """Return the largest number of open rasters of a thread.

    It is a quarter of the files that the process may open, at least 64 and at most 1,024.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if allowed == resource.RLIM_INFINITY else min(max(_FEWEST, allowed // 4), _MOST)
