"""Open files of a raster in forked processes and in threads."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geo_scenes import count_open_files, draw_classes, open_file_positions, paint, write_raster

from mapsage.geo import GeoError, Raster


def _sum_in_child(raster: Raster, expected: int, queue: Any) -> None:
    inherited = count_open_files(Path(raster.path))
    total = int(raster.read(0, 0, 300, 260)[0].sum())
    queue.put((total == expected, inherited, count_open_files(Path(raster.path))))


def test_forked_processes_open_their_own_handle(tmp_path: Path) -> None:
    values = paint(draw_classes())
    raster = Raster(write_raster(tmp_path / 'a.tif', values))
    raster.read(0, 0, 10, 10)
    position = open_file_positions(Path(raster.path))
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(raster, int(values.sum()), queue))
    child.start()
    same, inherited, opened = queue.get(timeout=60)
    child.join(60)
    # the child lets go of the handle that it inherited
    assert same and inherited == 1 and opened == 1 and child.exitcode == 0
    assert open_file_positions(Path(raster.path)) == position  # which both would have moved
    assert raster.read(0, 0, 10, 10)[1].all()


def test_threads_share_no_handle_and_close_leaves_none(tmp_path: Path) -> None:
    values = paint(draw_classes())
    path = Path(write_raster(tmp_path / 'a.tif', values))
    # A file that has just been written is opened again, because its times may not show a change.
    time.sleep(0.1)
    raster = Raster(path)
    assert count_open_files(path) == 0
    barrier = threading.Barrier(4)

    def read_rows(thread: int) -> int:
        for row in range(0, 250, 10):
            np.testing.assert_array_equal(
                raster.read(thread, row, 100, 10)[0],
                values[:, row : row + 10, thread : thread + 100],
            )
        barrier.wait(60)
        there = count_open_files(path)
        barrier.wait(60)
        return there

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read_rows, range(4))) == [4] * 4
    raster.close()
    assert count_open_files(path) == 0


def test_a_raster_may_stay_open(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', paint(draw_classes(20, 20)))
    with Raster(path, keep_open=True) as raster:
        position = open_file_positions(path)
        assert len(position) == 1
        assert raster.files() == [str(path)] and raster.read(0, 0, 5, 5)[1].all()
        assert count_open_files(path) == 1
    assert count_open_files(path) == 0
    assert Raster(path).files() == [str(path)] and count_open_files(path) == 0
    with pytest.raises(GeoError, match='has no band'):
        Raster(path, [4], keep_open=True)
    assert count_open_files(path) == 0


@pytest.mark.long
def test_threads_open_at_the_same_moment(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', paint(draw_classes(20, 20)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            with Raster(path) as raster, ThreadPoolExecutor(8) as threads:
                read = list(threads.map(lambda _: raster.read(0, 0, 5, 5)[1].all(), range(32)))
            assert all(read)
    finally:
        sys.setswitchinterval(interval)
