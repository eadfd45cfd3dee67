"""A mosaic whose source is gone is an error, and never a scene with zeros in it."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio.shutil
from geo_scenes import damage_block, open_file_positions, write_mosaic, write_raster

from mapsage.geo import GeoError, Raster, RasterBlockError
from mapsage.geo.read_failures import BlockGrid

SIDE = 128


def write_sources(folder: Path, count: int = 3) -> Any:
    """Write scenes of random values from 1 on; return their paths."""
    random = np.random.RandomState(1)
    return [
        write_raster(folder / f'{number}.tif', random.randint(1, 255, (SIDE, SIDE)).astype('uint8'))
        for number in range(count)
    ]


def test_a_missing_source_is_named_when_the_scene_is_opened(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    mosaic = write_mosaic(tmp_path / 'm.vrt', sources)
    Raster(mosaic)
    sources[1].unlink()
    with pytest.raises(
        GeoError,
        match=r'm\.vrt is a mosaic of 3 file\(s\), and 1 of them cannot '
        r'be found: \S*/1\.tif\. ',
    ):
        Raster(mosaic)


def test_a_missing_source_of_a_mosaic_of_mosaics_is_named(tmp_path: Path) -> None:
    sources = write_sources(tmp_path / 'in', 4)
    parts = [write_mosaic(tmp_path / f'{at}.vrt', sources[at : at + 2]) for at in (0, 2)]
    whole = write_mosaic(tmp_path / 'whole.vrt', parts)
    assert Raster(whole).width == 4 * SIDE
    sources[3].unlink()
    with pytest.raises(GeoError, match=r'whole\.vrt .* 1 of them .*/in/3\.tif'):
        Raster(whole)
    parts[0].unlink()
    with pytest.raises(GeoError, match=r' 2 of them .*/0\.vrt, \S+/in/3\.tif'):
        Raster(whole)


def test_a_missing_archive_is_named_and_one_that_is_there_read(tmp_path: Path) -> None:
    source = write_sources(tmp_path, 1)[0]
    with zipfile.ZipFile(str(tmp_path / 'z.zip'), 'w') as archive:
        archive.write(str(source), 'a.tif')
    mosaic = tmp_path / 'm.vrt'
    rasterio.shutil.copy(f'/vsizip/{tmp_path}/z.zip/a.tif', str(mosaic), driver='VRT')
    expected = Raster(source).read(0, 0, SIDE, SIDE)[0]
    np.testing.assert_array_equal(Raster(mosaic).read(0, 0, SIDE, SIDE)[0], expected)
    (tmp_path / 'z.zip').unlink()
    with pytest.raises(GeoError, match=r'cannot be found: /vsizip/.*z\.zip/a\.tif'):
        Raster(mosaic)


@pytest.mark.parametrize('reduced', [False, True])
def test_every_read_fails_where_a_source_left_after_opening(reduced: bool, tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    expected = Raster(sources[0]).read(0, 0, SIDE, SIDE)[0]
    # GDAL keeps what it knows of sources while other mosaics are open.
    other = Raster(write_mosaic(tmp_path / 'other.vrt', sources[:1]))
    np.testing.assert_array_equal(other.read(0, 0, SIDE, SIDE)[0], expected)
    raster = Raster(write_mosaic(tmp_path / 'm.vrt', sources))
    sources[1].unlink()
    for _ in range(3):
        with pytest.raises(RasterBlockError, match=r'm\.vrt: the window .* cannot be decoded'):
            raster.read_reduced(2) if reduced else raster.read(SIDE // 2, 0, SIDE, SIDE)
        values, valid = raster.read(0, 0, SIDE, SIDE)  # the sources that are there are read
        np.testing.assert_array_equal(values, expected)
        assert valid.all()


def test_the_blocks_of_the_missing_source_are_named(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    raster = Raster(write_mosaic(tmp_path / 'm.vrt', sources))
    sources[2].unlink()
    with pytest.raises(RasterBlockError) as caught:
        raster.read(0, 0, 3 * SIDE, SIDE)
    grid = BlockGrid(raster.width, raster.height, *raster.blocks)
    assert caught.value.blocks == [
        block for block in grid.meeting((0, 0, 3 * SIDE, SIDE)) if block[0] + block[2] > 256
    ]


def test_every_read_of_a_damaged_source_fails(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    damage_block(sources[1], 1, 0, 0)
    raster = Raster(write_mosaic(tmp_path / 'm.vrt', sources))
    for _ in range(3):
        with pytest.raises(RasterBlockError):
            raster.read(SIDE, 0, SIDE, SIDE)


def test_a_failed_read_leaves_no_open_file_and_a_later_one_works(tmp_path: Path) -> None:
    path = write_sources(tmp_path, 1)[0]
    whole = tmp_path / 'whole.tif'
    shutil.copy(str(path), str(whole))
    damage_block(path, 1, 1, 1)
    raster = Raster(path)
    with pytest.raises(RasterBlockError, match=r'\(64, 64, 64, 64\)'):
        raster.read(0, 0, SIDE, SIDE)
    np.testing.assert_array_equal(raster.read(0, 0, 64, 64)[0], Raster(whole).read(0, 0, 64, 64)[0])
    assert len(open_file_positions(path)) == 1
    raster.close()
    assert open_file_positions(path) == []
