"""The pool of open rasters."""
from __future__ import annotations

import threading
from pathlib import Path
from typing import List

from geo_scenes import count_open_files, draw_classes, paint, write_raster

from mapsage.geo import Raster, open_raster


def test_pool_keeps_a_bounded_number_open(tmp_path: Path) -> None:
    paths = [write_raster(tmp_path / f'{i}.tif', draw_classes(20, 20)) for i in range(70)]
    for path in paths:
        assert open_raster(str(path)).read(0, 0, 20, 20)[1].all()
    assert sum(count_open_files(path) for path in paths) == 64
    assert open_raster(str(paths[-1])) is open_raster(str(paths[-1]))


def test_a_raster_is_kept_by_thread_and_choice_of_bands(tmp_path: Path) -> None:
    path = str(write_raster(tmp_path / 'a.tif', paint(draw_classes(20, 20))))
    kept = open_raster(path, [2, 1])
    assert open_raster(path, (2, 1)) is kept and kept.bands == (2, 1)
    assert open_raster(path) is not kept and open_raster(path).bands == (1, 2, 3)
    others: List[Raster] = []
    thread = threading.Thread(target=lambda: others.append(open_raster(path, [2, 1])))
    thread.start()
    thread.join(60)
    assert len(others) == 1 and others[0] is not kept
