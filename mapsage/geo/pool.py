"""Rasters that stay open between reads, a bounded number in each thread."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Optional, Sequence

from .raster import Raster

_MOST_OPEN = 64  # a system allows a process about 1,000 files

_of_thread = threading.local()


def open_raster(path: str, bands: Optional[Sequence[int]] = None) -> Raster:
    """Return the raster from those this thread keeps open; the longest unused one is closed."""
    rasters: OrderedDict = _of_thread.__dict__.setdefault('rasters', OrderedDict())
    key = path, None if bands is None else tuple(bands)
    if key not in rasters:
        rasters[key] = Raster(path, bands)
    rasters.move_to_end(key)
    if len(rasters) > _MOST_OPEN:
        rasters.popitem(last=False)[1].close()
    return rasters[key]
