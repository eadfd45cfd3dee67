"""Scenes read as one raster: the same pixels where grids agree, GDAL's bilinear ones elsewhere."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import rasterio
from geo_scenes import count_open_files
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.crs import CRS
from rasterio.enums import Resampling
from rasterio.transform import Affine
from rasterio.vrt import WarpedVRT

from mapsage.geo import GeoError, Mosaic, Raster, RasterBlockError, mosaic

GRID = Affine(2, 0, 500000, 0, -2, 5300000)
UTM = 'EPSG:32633'


def write(
    path: Path, values: np.ndarray, transform: Affine = GRID, crs: Any = UTM, **options: Any
) -> str:
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        count=len(values),
        height=values.shape[1],
        width=values.shape[2],
        dtype=values.dtype,
        transform=transform,
        crs=crs,
        **options,
    ) as file:
        file.write(values)
    return str(path)


def ground(height: int, width: int, dtype: Any = np.uint16) -> np.ndarray:
    """Return four bands of noise; 0 occurs in single bands, and in all of them at two places."""
    values = np.random.RandomState(0).randint(0, 6, (4, height, width)).astype(dtype) * 40
    values[:, 3:9, 5:30] = 0
    values[:, height // 2 : height // 2 + 7, width // 2 :] = 0
    return values


@pytest.fixture(scope='module')
def six(tmp_path_factory: Any) -> Tuple[Raster, Mosaic]:
    """A scene, and it as six that overlap by some pixels; what others show is no data there."""
    folder = tmp_path_factory.mktemp('six')
    values = ground(70, 100)
    whole = write(folder / 'whole.tif', values, nodata=0)
    paths = []
    for row, rows in ((0, 37), (35, 35)):
        for column, columns in ((0, 30), (30, 40), (64, 36)):
            part = values[:, row : row + rows, column : column + columns].copy()
            part[:, 10:14, 10:14] = 0 if column == 64 else part[:, 10:14, 10:14]
            paths.append(
                write(
                    folder / f'{row}_{column}.tif',
                    part,
                    nodata=0,
                    transform=GRID * Affine.translation(column, row),
                )
            )
    hole = write(
        folder / 'hole.tif',
        values[:, 8:60, 70:90],
        nodata=0,
        transform=GRID * Affine.translation(70, 8),
    )
    return Raster(whole), Mosaic([*paths, hole])


@settings(max_examples=30)
@given(st.integers(-9, 100), st.integers(-9, 70), st.integers(1, 80), st.integers(1, 80))
def test_windows_are_those_of_the_one_scene(
    six: Tuple[Raster, Mosaic], column: int, row: int, width: int, height: int
) -> None:
    whole, parts = six
    for found, expected in zip(
        parts.read(column, row, width, height), whole.read(column, row, width, height)
    ):
        np.testing.assert_array_equal(found, expected)


def test_it_is_what_the_one_scene_is(six: Tuple[Raster, Mosaic]) -> None:
    whole, parts = six
    for name in ('width', 'height', 'bands', 'dtype', 'crs', 'transform', 'is_georeferenced'):
        assert getattr(parts, name) == getattr(whole, name), name
    assert parts.resampled == [] and len(parts.files()) == 7
    assert 'the mosaic of 7 scene(s): 100x70 pixels on the grid of' in parts.describe()
    again = pickle.loads(pickle.dumps(parts))
    np.testing.assert_array_equal(again.read(20, 20, 50, 40)[0], whole.read(20, 20, 50, 40)[0])
    values, valid = parts.read_reduced(7, 14, 40)
    np.testing.assert_array_equal(values, whole.read(0, 14, 100, 40)[0][:, ::7, ::7])
    assert valid.shape == values.shape[1:]


def test_few_files_stay_open(six: Tuple[Raster, Mosaic], monkeypatch: Any) -> None:
    _, parts = six
    monkeypatch.setattr(mosaic, 'most_open', lambda: 2)
    parts.read(0, 0, 100, 70)
    assert [count_open_files(Path(path)) for path in parts.files()].count(1) == 2
    parts.close()
    assert not any(count_open_files(Path(path)) for path in parts.files())


def smooth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return two bands of a ground, from coordinates in meters of ``UTM``."""
    return np.stack([3000 + 900 * np.sin(x / 40) * np.cos(y / 55), 1500 + 5 * (x % 997) / 3])


def scene_of(path: Path, transform: Affine, crs: str, side: int, dtype: Any = np.uint16) -> str:
    columns, rows = np.meshgrid(np.arange(side) + 0.5, np.arange(side) + 0.5)
    x, y = transform * (columns, rows)
    x, y = rasterio.warp.transform(CRS.from_string(crs), CRS.from_string(UTM), x.ravel(), y.ravel())
    values = smooth(np.array(x), np.array(y)).reshape(2, side, side)
    return write(path, values.astype(dtype), transform, crs, nodata=0)


TURNED = GRID * Affine.translation(70, 5) * Affine.rotation(20)
# the same ground in the next zone: about 120 m east of GRID's corner and 60 m south of it
EAST = rasterio.warp.transform(
    CRS.from_string(UTM), CRS.from_string('EPSG:32634'), [500120.0], [5299940.0]
)


@pytest.mark.parametrize(
    'name, transform, crs, why',
    [
        ('turned', TURNED, UTM, 'rotated'),
        ('zone', Affine(2, 0, EAST[0][0], 0, -2, EAST[1][0]), 'EPSG:32634', 'EPSG:32634'),
        ('degrees', Affine(2.6e-5, 0, 15.0002, 0, -1.8e-5, 47.852), 'EPSG:4326', 'EPSG:4326'),
        ('shifted', GRID * Affine.translation(50.4, 10.25), UTM, 'shifted'),
        ('coarse', GRID * Affine.translation(20, 10) * Affine.scale(1.5), UTM, 'another size'),
    ],
)
def test_scenes_off_the_grid_are_interpolated_as_by_gdal(
    tmp_path: Path, name: str, transform: Affine, crs: str, why: str
) -> None:
    first = scene_of(tmp_path / 'first.tif', GRID, UTM, 40)
    other = scene_of(tmp_path / f'{name}.tif', transform, crs, 60)
    both = Mosaic([first, other])
    assert [path for path, _ in both.resampled] == [other] and why in both.resampled[0][1]
    assert why in both.describe()
    values, valid = both.read(0, 0, both.width, both.height)
    shift = both.transform
    with rasterio.open(other) as source, WarpedVRT(
        source,
        crs=UTM,
        transform=shift,
        width=both.width,
        height=both.height,
        resampling=Resampling.bilinear,
        tolerance=0.01,
    ) as warped:
        expected, known = warped.read(), warped.read_masks(1) > 0
    left, top = (round(number) for number in ~shift * (GRID.c, GRID.f))
    known[top : top + 40, left : left + 40] = True
    expected[:, top : top + 40, left : left + 40] = Raster(first).read(0, 0, 40, 40)[0]
    assert (known != valid).mean() < 0.02  # along the scene's edge
    both_know = known & valid
    difference = np.abs(values.astype(float) - expected)[:, both_know]
    assert both_know.sum() > 2500 and np.quantile(difference, 0.98) <= 1, difference.max()
    # Windows are parts of the whole, wherever they begin.
    part = both.read(33, 21, 30, 41)
    np.testing.assert_array_equal(part[1], valid[21:62, 33:63])
    assert np.abs(part[0].astype(int) - values[:, 21:62, 33:63]).max() <= 1


def test_the_grid_is_that_of_the_first_scene_that_is_not_turned(tmp_path: Path) -> None:
    turned = scene_of(tmp_path / 'turned.tif', TURNED, UTM, 40)
    straight = scene_of(tmp_path / 'straight.tif', GRID, UTM, 30)
    found = Mosaic([turned, straight])
    assert [path for path, _ in found.resampled] == [turned]
    assert (~found.transform * (GRID.c, GRID.f))[0] == 0
    alone = Mosaic([turned])
    assert alone.transform.b == 0 and alone.transform.a == pytest.approx(2)
    # Its corners lie in the mosaic, and the mosaic ends with them.
    columns, rows = zip(
        *(~alone.transform * (TURNED * corner) for corner in ((0, 0), (40, 0), (0, 40), (40, 40)))
    )
    assert 0 <= min(columns) < 1 and 0 <= alone.width - max(columns) < 1
    assert 0 <= min(rows) < 1 and 0 <= alone.height - max(rows) < 1
    assert alone.read(0, 0, alone.width, alone.height)[1].sum() == pytest.approx(1600, rel=0.02)


def test_what_is_no_data_in_every_scene_stays_so(tmp_path: Path) -> None:
    values = np.full((1, 20, 20), 7, np.float32)
    values[0, 5, 5] = np.nan
    one = write(tmp_path / 'one.tif', values)
    two = write(tmp_path / 'two.tif', values + 1, transform=GRID * Affine.translation(-3, -3))
    found, valid = Mosaic([one, two]).read(0, 0, 23, 23)
    # Each fills the other's hole; nothing is known of two corners.
    assert valid[8, 8] and found[0, 8, 8] == 8 and valid[5, 5] and found[0, 5, 5] == 7
    assert not valid[:3, 20:].any() and not valid[20:, :3].any() and valid.sum() == 23 * 23 - 18
    assert found[0, 10, 10] == 7 and found[0, 0, 0] == 8
    one, two = (write(tmp_path / f'{name}.tif', values) for name in ('one', 'two'))
    assert not Mosaic([one, two]).read(0, 0, 20, 20)[1][5, 5]


def test_damage_is_told_in_blocks_of_the_mosaic(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr('mapsage.geo.grid_position.BLOCK', 32)
    values = np.random.RandomState(0).randint(1, 255, (1, 64, 64)).astype(np.uint8)
    tiled = dict(tiled=True, blockxsize=32, blockysize=32, compress='deflate')
    paths: List[str] = [
        write(
            tmp_path / f'{number}.tif',
            values,
            transform=GRID * Affine.translation(64 * number, 0),
            **tiled,
        )
        for number in (0, 1)
    ]
    with rasterio.open(paths[1]) as file:
        offset = int(file.tags(1, ns='TIFF').get('BLOCK_OFFSET_0_0', 0)) or int(
            file.get_tag_item('BLOCK_OFFSET_0_0', 'TIFF', bidx=1)
        )
    with open(paths[1], 'r+b') as damaged:
        damaged.seek(offset)
        damaged.write(b'\xff' * 64)
    both = Mosaic(paths)
    with pytest.raises(RasterBlockError, match='1.tif') as caught:
        both.read(40, 0, 60, 64)
    assert caught.value.blocks == [(64, 0, 32, 32)]
    np.testing.assert_array_equal(both.read(96, 0, 32, 64)[0], values[:, :, 32:])


def test_scenes_that_make_no_mosaic_are_named(tmp_path: Path) -> None:
    values = np.ones((3, 8, 8), np.uint8)
    first = write(tmp_path / 'first.tif', values)
    with pytest.warns(rasterio.errors.NotGeoreferencedWarning):
        nowhere = write(tmp_path / 'nowhere.tif', values, Affine.identity(), None)
    for words, other in (
        ('nowhere.tif has no georeference', nowhere),
        (
            'bare.tif has no CRS and .*first.tif has EPSG:32633',
            write(tmp_path / 'bare.tif', values, crs=None),
        ),
        (
            r'few.tif has 2 band\(s\) of uint8, and .*first.tif 3',
            write(tmp_path / 'few.tif', values[:2]),
        ),
        (
            r'deep.tif has 3 band\(s\) of uint16',
            write(tmp_path / 'deep.tif', values.astype(np.uint16)),
        ),
        (
            'scenes lie far apart',
            write(tmp_path / 'far.tif', values, GRID * Affine.translation(500, 500)),
        ),
        ('no such file', str(tmp_path / 'no.tif')),
    ):
        with pytest.raises(GeoError, match=words):
            Mosaic([first, other])


# Another CRS, pixels of another size, and a shift by a part of a pixel: all are interpolated.
OFF_GRID = dict(
    degrees=('EPSG:4326', Affine(3e-5, 0, 15.001, 0, -2e-5, 47.848)),
    size=(UTM, Affine(1.7, 0, 500010, 0, -1.7, 5299990)),
    shifted=(UTM, Affine(2, 0, 500010.7, 0, -2, 5299990.7)),
)


@pytest.mark.parametrize(
    'parts',
    [
        [np.s_[:, :25], np.s_[:, 25:]],
        [np.s_[:, 25:], np.s_[:, :25]],
        [np.s_[:20, :25], np.s_[:20, 25:], np.s_[20:, :25], np.s_[20:, 25:]],
        [np.s_[:, :30], np.s_[:, 22:]],
    ],
    ids=['east of it', 'west of it', 'four', 'overlapping'],
)
@pytest.mark.parametrize('name', list(OFF_GRID))
def test_neighbors_with_one_grid_are_interpolated_without_a_seam(
    tmp_path: Path, name: str, parts: List[Any]
) -> None:
    crs, transform = OFF_GRID[name]
    values = ground(40, 50)
    base = write(tmp_path / 'base.tif', values[:, :6, :6])
    whole = write(tmp_path / 'whole.tif', values, transform, crs, nodata=0)
    tiles = [
        write(
            tmp_path / f'{number}.tif',
            np.ascontiguousarray(values[(slice(None), *part)]),
            transform * Affine.translation(part[1].start or 0, part[0].start or 0),
            crs,
            nodata=0,
        )
        for number, part in enumerate(parts)
    ]
    expected, found = Mosaic([base, whole]), Mosaic([base, *tiles])
    assert (found.width, found.height) == (expected.width, expected.height)
    assert [path for path, _ in found.resampled] == tiles
    box = (0, 0, found.width, found.height)
    for one, other in zip(found.read(*box), expected.read(*box)):
        np.testing.assert_array_equal(one, other)
    assert set(found.files()) >= {base, *tiles}


def test_scenes_with_another_between_them_keep_their_order(tmp_path: Path) -> None:
    """The first scene with data counts, also where the second one could be joined to the third."""
    crs, transform = OFF_GRID['size']
    values = ground(40, 50) + 1
    base = write(tmp_path / 'base.tif', values[:, :6, :6])
    west = write(tmp_path / 'west.tif', values[:, :, :30], transform, crs)
    middle = write(
        tmp_path / 'middle.tif',
        np.full((4, 30, 20), 999, np.uint16),
        Affine(2, 0, 500030, 0, -2, 5299980),
    )
    east = write(
        tmp_path / 'east.tif', values[:, :, 25:], transform * Affine.translation(25, 0), crs
    )
    found = Mosaic([base, west, middle, east]).read(0, 0, 60, 60)[0]
    first = Mosaic([base, west]).read(0, 0, 60, 60)
    np.testing.assert_array_equal(
        np.where(first[1], found[:, :60, :60], 0), np.where(first[1], first[0], 0)
    )
    # Where the first scene has no data, the one in the middle comes before its neighbor.
    assert (found == 999).any()
