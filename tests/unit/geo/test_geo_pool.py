"""The pool of open rasters."""
from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, List

import pytest
from geo_scenes import count_open_files, draw_classes, paint, write_raster

from mapsage.geo import Raster, open_raster, pool


def test_pool_keeps_a_bounded_number_open(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pool, '_MOST', 5)
    paths = [write_raster(tmp_path / f'{i}.tif', draw_classes(20, 20)) for i in range(9)]
    kept = [open_raster(str(path)) for path in paths]
    for path in paths:
        assert open_raster(str(path)).read(0, 0, 20, 20)[1].all()
    assert [count_open_files(path) for path in paths] == [0] * 4 + [1] * 5
    assert all(open_raster(str(path)) is raster for path, raster in zip(paths, kept))


@pytest.mark.parametrize('allowed, kept', [(100, 64), (1024, 256), (10 ** 6, 1024)])
def test_pool_keeps_a_share_of_the_files_that_may_be_open(allowed: int, kept: int,
                                                          monkeypatch: Any) -> None:
    monkeypatch.setattr(pool.resource, 'getrlimit', lambda _: (allowed, allowed))
    assert pool.most_open() == kept


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
