"""Rasters that stay open between reads; each thread keeps a bounded number open."""
from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from typing import Any, Dict, Optional, Sequence

from .raster import Raster

_FEWEST, _MOST = 64, 1024  # rasters that a thread keeps open

_of_thread = threading.local()


def open_raster(path: str, bands: Optional[Sequence[int]] = None) -> Raster:
    """Return a raster that this thread keeps open, opened first if necessary.

    Args:
        path: Path of a file that GDAL reads.
        bands: Band numbers, as in ``Raster``.

    Returns:
        The same ``Raster`` for the same arguments. Its file stays open as long as it is among those
        that this thread used last: a quarter of the files that the process may open, at least 64
        and at most 1,024. Older ones are closed, and a read opens them again.

    Raises:
        GeoError: If the file cannot be opened, or a band is missing.
    """
    rasters: Dict[Any, Raster] = _of_thread.__dict__.setdefault('rasters', {})
    used: OrderedDict = _of_thread.__dict__.setdefault('used', OrderedDict())  # ends with the last
    key = path, None if bands is None else tuple(bands)
    if key not in rasters:
        rasters[key] = Raster(path, bands)
    used[key] = None
    used.move_to_end(key)
    while len(used) > most_open():
        rasters[used.popitem(last=False)[0]].close()
    return rasters[key]


def most_open() -> int:
    """Return how many rasters a thread keeps open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if allowed == resource.RLIM_INFINITY else min(max(_FEWEST, allowed // 4), _MOST)
