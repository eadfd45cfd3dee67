"""Errors of damaged and truncated files name the blocks; the rest of the file is readable."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from geo_scenes import damage_block, draw_classes, paint, write_raster

from mapsage.geo import Raster, RasterBlockError
from mapsage.geo.read_failures import BlockGrid


def test_damaged_block_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    values = paint(draw_classes())
    path = write_raster(tmp_path / 'a.tif', values)
    damage_block(path, 1, 2, 1)
    raster = Raster(path)
    with pytest.raises(RasterBlockError) as caught:
        raster.read(100, 60, 150, 90)
    error = pickle.loads(pickle.dumps(caught.value))  # as from a worker
    assert (error.path, error.window) == (str(path), (100, 60, 150, 90))
    assert error.blocks == [(128, 64, 64, 64)] and str(error.blocks[0]) in str(error)
    assert 'IReadBlock failed' in error.reason and str(path) in str(error)
    np.testing.assert_array_equal(raster.read(192, 64, 64, 64)[0], values[:, 64:128, 192:256])


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_raster(
        tmp_path / 'a.tif', np.random.RandomState(0).randint(0, 255, (3, 260, 300)).astype('uint8')
    )
    os.truncate(path, os.path.getsize(path) * 2 // 3)
    raster = Raster(path)
    with pytest.raises(RasterBlockError, match=r'a\.tif: the window .* damaged are \d+ block'):
        raster.read(0, 0, 300, 260)
    assert raster.read(0, 0, 64, 64)[1].all()


def test_blocks_that_a_window_meets_end_at_the_edge_of_the_scene() -> None:
    grid = BlockGrid(width=300, height=130, rows=64, columns=128)
    assert list(grid.meeting((128, 64, 128, 64))) == [(128, 64, 128, 64)]
    assert list(grid.meeting((127, 63, 2, 2))) == [
        (0, 0, 128, 64),
        (128, 0, 128, 64),
        (0, 64, 128, 64),
        (128, 64, 128, 64),
    ]
    assert list(grid.meeting((290, 129, 10, 1))) == [(256, 128, 44, 2)]
