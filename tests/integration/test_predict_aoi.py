"""tools/predict.py --aoi: only windows that touch the area, and no data next to it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pyogrio.raw
import pyproj
import pytest
import shapely
from color_model import paint, write_scene
from geo_scenes import write_areas
from map_runs import read, run
from range_server import RangeServer
from rasterio.features import geometry_mask
from rasterio.transform import Affine
from support import ROOT, Launch, check_finished, main_leg, on_host

from mapsage.geo import GeoError
from mapsage.maps.errors import PredictError

PLACE = Affine(0.5, 0, 500000, 0, -0.5, 5000000)
UTM = dict(crs='EPSG:32633', transform=PLACE)

pytestmark = on_host


def in_pixels(shape: Any) -> Any:
    """Return a shape that is given in pixels of the scene in its CRS."""
    return shapely.transform(shape, lambda points: np.stack(PLACE * points.T, 1))


AREA = in_pixels(shapely.Point(150, 90).buffer(45))


def masked(classes: np.ndarray, *shapes: Any) -> np.ndarray:
    inside = geometry_mask(shapes or (AREA,), classes.shape, PLACE, invert=True)
    return np.where(inside, classes, 255)


def test_the_map_and_its_polygons_end_with_the_area(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    classes = paint(200, 310)
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM)
    degrees = pyproj.Transformer.from_crs(32633, 4326, always_xy=True)
    lonlat = shapely.transform(AREA, lambda points: np.stack(degrees.transform(*points.T), 1))
    aoi = write_areas(tmp_path / 'areas.geojson', [lonlat], 'EPSG:4326')
    options = [scene, '--out', tmp_path / 'out', '--confidence', '--polygons', '--aoi']
    assert run(model, *options, aoi) == 0
    said = capsys.readouterr().out
    expected = masked(classes)
    made = read(tmp_path / 'out/field.tif')
    assert (made != expected).sum() <= 2  # a center that rounding puts on the other side
    np.testing.assert_array_equal(read(tmp_path / 'out/field_confidence.tif') == 255, made == 255)
    _, _, _, fields = pyogrio.raw.read(tmp_path / 'out/field.gpkg', columns=['area_px'])
    assert fields[0].sum() == (made != 255).sum()
    report = json.loads((tmp_path / 'out/field.json').read_text())
    assert report['beside_aoi'] == (made == 255).sum() and report['no_data'] == 0
    share = 100 * (made != 255).mean()
    assert f'masked to the area of interest, {share:.1f} % of the scene' in said
    assert '9 of 28 windows touch' in said and '9 windows in' in said
    assert run(model, *options, aoi) == 0
    assert 'skipped' in capsys.readouterr().out
    same = write_areas(tmp_path / 'copy.geojson', [lonlat], 'EPSG:4326')
    assert run(model, *options, same) == 0
    other = write_areas(tmp_path / 'other.gpkg', [AREA.buffer(2)], 'EPSG:32633')
    for more in (['--aoi', other], []):
        with pytest.raises(PredictError, match='made with another aoi'):
            run(model, *options[:-1], *more)


def test_what_lies_inside_does_not_change(model: Tuple[Path, Path], tmp_path: Path) -> None:
    """Also where the model sees the scene in another size, and where the scene has no data."""
    classes = np.random.RandomState(0).randint(0, 4, (200, 260)).astype(np.uint8)
    classes[60:80] = 255
    scene = write_scene(tmp_path / 'a.tif', classes, **UTM, nodata=0)
    aoi = write_areas(
        tmp_path / 'areas.gpkg', [AREA, in_pixels(shapely.box(240, 0, 300, 20.2))], 'EPSG:32633'
    )
    for options in ([], ['--scale', 0.4], ['--scale', 1.7]):
        for name, more in (('whole', []), ('part', ['--aoi', aoi])):
            assert run(model, scene, '--out', tmp_path / name, '--overwrite', *options, *more) == 0
        whole = read(tmp_path / 'whole/a.tif')
        np.testing.assert_array_equal(
            read(tmp_path / 'part/a.tif'),
            masked(whole, AREA, in_pixels(shapely.box(240, 0, 300, 20.2))),
        )


@main_leg
def test_ranks_share_the_windows_that_touch(model: Tuple[Path, Path], tmp_path: Path) -> None:
    classes = paint(2000, 200)
    scene = write_scene(tmp_path / 'field.tif', classes, **UTM)
    low = in_pixels(shapely.box(0, 1400, 200, 2000))  # all of it in the last third
    aoi = write_areas(tmp_path / 'areas.gpkg', [low], 'EPSG:32633')
    options = [scene, '--out', tmp_path / 'out', '--aoi', aoi]
    finished = Launch(
        *model,
        *options,
        ranks=3,
        command=['bash', 'scripts/predict.sh'],
        environ={'PYTHONPATH': str(ROOT / 'tests'), 'ACCELERATOR': 'cpu', 'COLOR_SECONDS': '0.01'},
    ).finish()
    check_finished(finished)
    np.testing.assert_array_equal(read(tmp_path / 'out/field.tif'), masked(classes, low))
    # 13 rows of 4 windows in runs of 4, and one more row above each run that no neighbor continues. A
    # rank that is faster than the others may do it all.
    windows = int(re.search(r'(\d+) windows in', finished.output).group(1))
    assert 52 <= windows <= 52 + 4 * 4 and windows % 4 == 0


def test_scenes_beside_the_area(model: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    classes = paint(80, 90)
    here = write_scene(tmp_path / 'here.tif', classes, **UTM)
    there = write_scene(
        tmp_path / 'there.tif',
        classes,
        crs='EPSG:32633',
        transform=PLACE * Affine.translation(5000, 0),
    )
    bare = write_scene(tmp_path / 'bare.tif', classes)
    aoi = write_areas(
        tmp_path / 'areas.gpkg', [in_pixels(shapely.box(10, 10, 40, 50))], 'EPSG:32633'
    )
    out = ['--out', tmp_path / 'out', '--aoi', aoi]
    assert run(model, here, there, *out) == 0
    said = capsys.readouterr().out
    assert 'areas.gpkg covers no pixel of' in said and 'there.tif: in EPSG:32633 the area' in said
    assert 'it is left out' in said and not (tmp_path / 'out/there.tif').exists()
    assert run(model, here, there, *out) == 0
    with pytest.raises(PredictError, match='there.tif: in EPSG:32633 .*Check that the files'):
        run(model, there, *out)
    with pytest.raises(GeoError, match='bare.tif has no georeference'):
        run(model, bare, *out)
    with pytest.raises(GeoError, match='none.gpkg: no such file'):
        run(model, here, '--out', tmp_path / 'out', '--aoi', tmp_path / 'none.gpkg')


def test_only_what_is_needed_is_asked_of_a_server(
    model: Tuple[Path, Path], tmp_path: Path, server: RangeServer
) -> None:
    classes = np.random.RandomState(0).randint(0, 4, (1024, 512)).astype(np.uint8)
    write_scene(tmp_path / 'served/a.tif', classes, **UTM, tiled=True, blockxsize=64, blockysize=64)
    corner = in_pixels(shapely.box(0, 0, 50, 50))
    write_areas(tmp_path / 'areas.gpkg', [corner], 'EPSG:32633')
    os.link(tmp_path / 'areas.gpkg', tmp_path / 'served/areas.gpkg')
    assert (
        run(
            model,
            f'{server.url}/ok/a.tif',
            '--out',
            tmp_path / 'out',
            '--aoi',
            f'{server.url}/ok/areas.gpkg',
            '--window',
            64,
            '--overlap',
            0,
        )
        == 0
    )
    np.testing.assert_array_equal(read(tmp_path / 'out/a.tif'), masked(classes, corner))
    sent = [int(line.split()[-1]) for line in server.requests() if '/a.tif' in line]
    assert sum(sent) < 0.3 * classes.size * 3
