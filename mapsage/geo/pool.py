"""A pool of rasters that stay open between reads; each thread keeps a bounded number open."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Optional, Sequence

from .raster import Raster

_MOST_OPEN = 64  # operating systems commonly allow a process about 1,000 open files

_of_thread = threading.local()


def open_raster(path: str, bands: Optional[Sequence[int]] = None) -> Raster:
    """Return a raster that this thread keeps open, opened first if necessary.

    Args:
        path: Path of a file that GDAL reads.
        bands: Band numbers, as in ``Raster``.

    Returns:
        The same ``Raster`` for the same arguments, as long as it is among the 64 that this thread
        used last; older ones are closed.

    Raises:
        GeoError: If the file cannot be opened, or a band is missing.
    """
    rasters: OrderedDict = _of_thread.__dict__.setdefault('rasters', OrderedDict())
    key = path, None if bands is None else tuple(bands)
    if key not in rasters:
        rasters[key] = Raster(path, bands)
    rasters.move_to_end(key)
    if len(rasters) > _MOST_OPEN:
        rasters.popitem(last=False)[1].close()
    return rasters[key]
