"""tools/predict.py --mosaic: one map of neighboring scenes, as if they were one scene."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
import torch
from color_model import COLORS, paint, write_scene
from geo_scenes import write_areas
from map_runs import read, run
from mmengine.config import Config
from mmengine.registry import DefaultScope
from rasterio.warp import Resampling, reproject
from support import TINY_CONFIG, Launch, check_finished, main_leg

from mapsage.geo import GeoError
from mapsage.maps.errors import PredictError

GRID = rasterio.Affine(2, 0, 500000, 0, -2, 5300000)
UTM = 'EPSG:32633'


def write_six(folder: Path, colors: np.ndarray) -> List[Path]:
    """Cut (3, 192, 288) colors into six scenes of 96 x 96 pixels."""
    folder.mkdir()
    paths = []
    for row in (0, 96):
        for column in (0, 96, 192):
            paths.append(folder / f'scene_{row}_{column}.tif')
            write_bands(
                paths[-1],
                colors[:, row : row + 96, column : column + 96],
                GRID * rasterio.Affine.translation(column, row),
            )
    return paths


def write_bands(path: Path, values: np.ndarray, transform: Any, crs: str = UTM) -> Path:
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        count=3,
        height=values.shape[1],
        width=values.shape[2],
        dtype='uint8',
        transform=transform,
        crs=crs,
        nodata=0,
    ) as file:
        file.write(values)
    return path


@pytest.fixture(scope='module')
def sighted(tmp_path_factory: Any) -> Tuple[Path, Path]:
    """A model whose answer for a pixel depends on those around it, beyond a scene's border."""
    folder = tmp_path_factory.mktemp('sighted')
    config = folder / 'tiny.py'
    config.write_text(TINY_CONFIG.replace('{data_root!r}', "''"))
    from mmseg.apis import init_model

    torch.manual_seed(3)
    with DefaultScope.overwrite_default_scope('mmseg'):
        net = init_model(Config.fromfile(str(config)), device='cpu')
    meta = dict(dataset_meta=dict(classes=list('abcdefg')))
    torch.save(dict(state_dict=net.state_dict(), meta=meta), folder / 'tiny.pth')
    return config, folder / 'tiny.pth'


@pytest.fixture(scope='module')
def seen(sighted: Tuple[Path, Path], tmp_path_factory: Any) -> Tuple[List[Path], Path]:
    """Six scenes, and the folder with the map of the same ground as one scene."""
    folder = tmp_path_factory.mktemp('seen')
    noise = np.random.RandomState(0).randint(1, 255, (3, 24, 36)).astype(np.uint8)
    colors = noise.repeat(8, 1).repeat(8, 2)
    colors[:, 80:110, 100:140] = 0  # no data, across a border
    whole = write_bands(folder / 'whole.tif', colors, GRID)
    assert (
        run(sighted, whole, '--out', folder / 'out', '--window', 64, '--confidence', '--polygons')
        == 0
    )
    return write_six(folder / 'scenes', colors), folder / 'out'


OPTIONS = ('--mosaic', 'city', '--window', '64', '--confidence', '--polygons')


def test_six_scenes_become_the_map_of_one(
    sighted: Tuple[Path, Path], seen: Tuple[List[Path], Path], tmp_path: Path, capsys: Any
) -> None:
    scenes, expected = seen
    out = tmp_path / 'out'
    folder = scenes[0].parent
    assert run(sighted, folder, '--out', out, *OPTIONS) == 0
    said = capsys.readouterr().out
    assert 'the mosaic of 6 scene(s): 288x192 pixels on the grid of' in said
    assert 'interpolated' not in said
    assert sorted(path.name for path in out.iterdir() if path.suffix != '.xml') == [
        'city.gpkg',
        'city.json',
        'city.qml',
        'city.tif',
        'city_confidence.tif',
        'preview.png',
    ]
    for name in ('.tif', '_confidence.tif'):
        np.testing.assert_array_equal(read(out / f'city{name}'), read(expected / f'whole{name}'))
    assert len(np.unique(read(out / 'city.tif'))) > 3
    with rasterio.open(out / 'city.tif') as file:
        assert file.transform == GRID and file.crs.to_epsg() == 32633
    areas = [
        np.sort(pyogrio.raw.read(path)[3][3])
        for path in (out / 'city.gpkg', expected / 'whole.gpkg')
    ]
    np.testing.assert_array_equal(*areas)
    # Maps of the scenes one by one have seams: the model did not see beyond their borders.
    assert run(sighted, folder, '--out', tmp_path / 'apart', '--window', 64) == 0
    apart = np.concatenate(
        [
            np.concatenate(
                [read(tmp_path / 'apart' / f'scene_{row}_{column}.tif') for column in (0, 96, 192)],
                1,
            )
            for row in (0, 96)
        ]
    )
    assert (apart != read(out / 'city.tif')).any()
    # A second run skips it; a scene that changed, or another order, is another input.
    capsys.readouterr()
    assert run(sighted, folder, '--out', out, *OPTIONS) == 0
    assert 'skipped' in capsys.readouterr().out
    with pytest.raises(PredictError, match='made with another input'):
        run(sighted, *scenes[::-1], '--out', out, *OPTIONS)
    stat = os.stat(scenes[4])
    os.utime(scenes[4], ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(PredictError, match='made with another input'):
        run(sighted, folder, '--out', out, *OPTIONS)
    os.utime(scenes[4], ns=(stat.st_atime_ns, stat.st_mtime_ns))


@main_leg
def test_ranks_share_a_mosaic(
    sighted: Tuple[Path, Path], seen: Tuple[List[Path], Path], tmp_path: Path
) -> None:
    scenes, expected = seen
    check_finished(
        Launch(
            *sighted,
            *scenes,
            '--out',
            tmp_path,
            *OPTIONS,
            ranks=2,
            command=['bash', 'scripts/predict.sh'],
            environ={'ACCELERATOR': 'cpu'},
        ).finish()
    )
    for name in ('.tif', '_confidence.tif'):
        np.testing.assert_array_equal(
            read(tmp_path / f'city{name}'), read(expected / f'whole{name}')
        )


def test_a_turned_scene_and_one_of_another_zone(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """The map is that of the ground, but for pixels at the borders of colors."""
    classes = paint(192, 288)
    scenes = write_six(tmp_path / 'scenes', COLORS[classes].transpose(2, 0, 1))
    # The second shows its ground and more, turned by 30 degrees; the last lies in the next zone.
    for number, transform, crs in (
        (1, GRID * rasterio.Affine.translation(116, -50) * rasterio.Affine.rotation(30), UTM),
        (5, None, 'EPSG:32634'),
    ):
        row, column = int(number > 2) * 96, number % 3 * 96
        if transform is None:
            x, y = GRID * (column, row)
            (x,), (y,) = rasterio.warp.transform(UTM, crs, [x], [y])
            # The meridians of the zones converge: its north is turned by some degrees.
            transform = rasterio.Affine(2, 0, x - 60, 0, -2, y + 60)
        values = np.zeros((3, 160, 160), np.uint8)
        for band, plane in enumerate(COLORS[classes].transpose(2, 0, 1)):
            reproject(
                np.ascontiguousarray(plane),
                values[band],
                src_transform=GRID,
                src_crs=UTM,
                dst_transform=transform,
                dst_crs=crs,
                resampling=Resampling.nearest,
            )
        write_bands(scenes[number], values, transform, crs)
    assert run(model, *scenes, '--out', tmp_path / 'out', '--mosaic', 'city', '--polygons') == 0
    said = capsys.readouterr().out
    assert 'interpolated onto it: ' in said and 'scene_0_96.tif (rotated)' in said
    assert 'scene_96_192.tif (EPSG:32634)' in said
    with rasterio.open(tmp_path / 'out' / 'city.tif') as file:
        found, transform = file.read(1), file.transform
    left, top = (round(number) for number in ~transform * (GRID.c, GRID.f))
    found = found[top : top + 192, left : left + 288]
    # The turned scene's pixels do not end with the ground, only there is a jagged edge.
    assert not (found == 255)[1:, :-1].any() and (found == classes).mean() > 0.985
    away = np.ones(classes.shape, bool)  # pixels two or more from another color
    for shift in range(-2, 3):
        for axis in (0, 1):
            away &= np.roll(classes, shift, axis) == classes
    assert (found == classes)[away].mean() > 0.995
    report = json.loads((tmp_path / 'out' / 'city.json').read_text())
    assert report['settings']['mosaic'] and report['damage'] == []


def test_what_is_no_mosaic_is_said_before_anything_is_written(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    one = write_scene(tmp_path / 'one.tif', paint(40, 40), crs=UTM, transform=GRID)
    far = write_scene(
        tmp_path / 'far.tif',
        paint(40, 40),
        crs=UTM,
        transform=GRID * rasterio.Affine.translation(9000, 9000),
    )
    with pytest.raises((PredictError, GeoError), match='scenes lie far apart'):
        run(model, one, far, '--out', tmp_path / 'out', '--mosaic', 'city')
    with pytest.raises(PredictError, match='would overwrite .*one.tif'):
        run(model, one, '--out', tmp_path, '--mosaic', 'one')
    with pytest.raises(SystemExit):
        run(model, one, '--out', tmp_path, '--mosaic', 'maps/city')
    assert not list(tmp_path.glob('out/*'))


def test_an_area_of_a_mosaic(
    sighted: Tuple[Path, Path], seen: Tuple[List[Path], Path], tmp_path: Path
) -> None:
    scenes, expected = seen
    area = shapely.Polygon(
        [GRID * corner for corner in ((60, 50), (170, 50), (170, 140), (60, 140))]
    )
    aoi = write_areas(tmp_path / 'areas.gpkg', [area], UTM)
    assert run(sighted, *scenes, '--out', tmp_path / 'out', *OPTIONS, '--aoi', aoi) == 0
    inside = np.zeros((192, 288), bool)
    inside[50:140, 60:170] = True
    np.testing.assert_array_equal(
        read(tmp_path / 'out' / 'city.tif'), np.where(inside, read(expected / 'whole.tif'), 255)
    )
