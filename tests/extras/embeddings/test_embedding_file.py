"""Files of embeddings: written and read back, by other tools too, and files of other tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from embedding_runs import unit_vectors, write_alpha_earth, write_bands, write_tessera
from geo_scenes import UTM
from qgis_here import qgis_python
from support import main_leg

from mapsage.extras.embeddings import embedding_file
from mapsage.extras.embeddings.embedding_file import (
    EmbeddingFile,
    EmbeddingWriter,
    band_names,
    check_one_identity,
    read_embeddings,
    tile_side,
)
from mapsage.extras.embeddings.errors import EmbeddingError
from mapsage.extras.embeddings.vectors import SCHEME, dequantize, quantize
from mapsage.geo import GeoError

pytestmark = main_leg

FACTS = dict(identity=dict(encoder='X', layer='backbone'), dequantize=SCHEME)


def write(path: Path, stored: np.ndarray, facts: Any = FACTS, rows: int = 100) -> Path:
    """Write (dims, height, width) int8 in strips."""
    working = path.with_name('working.tif')
    dims, height, width = stored.shape
    grid = UTM['crs'], UTM['transform']
    with EmbeddingWriter(working, width, height, dims, *grid, facts) as writer:
        for row in range(0, height, rows):
            writer.write(row, stored[:, row : row + rows])
    embedding_file.write_cog(working, path)
    return path


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stored = quantize(unit_vectors(np.random.RandomState(0), 20, 700, 1300))
    stored[:, 100:300, 200:500] = -128
    path = tmp_path_factory.mktemp('file') / 'a.tif'
    return stored, write(path, stored)


def test_every_tool_reads_the_same_values(written: Any) -> None:
    stored, path = written
    with rasterio.open(path) as file:
        np.testing.assert_array_equal(file.read(), stored)
        assert file.nodata == -128 and file.dtypes[0] == 'int8'
        assert file.descriptions == tuple(f'A{number:02d}' for number in range(20))
        assert file.crs == UTM['crs'] and file.transform == UTM['transform']
        assert json.loads(file.tags()['MAPSAGE_EMBEDDING']) == FACTS
        tags = file.tags()
    expected = np.where(stored == -128, np.nan, dequantize(stored))
    np.testing.assert_array_equal(read_embeddings(path), expected)
    window = read_embeddings(path, (190, 90, 40, 30))
    np.testing.assert_array_equal(window, expected[:, 90:120, 190:230])
    # The inverse that the file names is the one that was applied.
    inverse = json.loads(tags['MAPSAGE_EMBEDDING'])['dequantize']
    by_text = eval(inverse, dict(sign=np.sign, abs=np.abs, q=stored.astype(float)))  # noqa: S307
    known = stored != -128
    np.testing.assert_allclose(by_text[known], expected[known], rtol=1e-6)


def test_it_is_a_cloud_optimized_geotiff_with_overviews_of_unit_length(written: Any) -> None:
    stored, path = written
    if sys.version_info >= (3, 11):
        cogeo = pytest.importorskip('rio_cogeo')
        valid, errors, warnings = cogeo.cog_validate(str(path), quiet=True)
        assert valid and not errors and not warnings
    with rasterio.open(path) as file:
        assert file.overviews(1) == [2, 4]
    with rasterio.open(path, overview_level=0) as file:
        overview = file.read()
    assert overview.shape == (20, 350, 650) and (overview[:, 60:140, 110:240] == -128).all()
    length = np.linalg.norm(dequantize(overview)[:, 200:, 300:], axis=0)
    # GDAL's mean of random vectors would be about half as long.
    assert 0.97 < length.min() and length.max() < 1.03


def test_names_and_tiles() -> None:
    assert band_names(2)[-1] == 'A01' and band_names(64)[-1] == 'A63'
    assert band_names(2000)[0] == 'A0000' and band_names(100)[-1] == 'A99'
    assert [tile_side(dims) for dims in (3, 64, 65, 768, 2000)] == [512, 512, 256, 128, 64]


@pytest.mark.long
def test_2000_bands(tmp_path: Path) -> None:
    stored = quantize(unit_vectors(np.random.RandomState(0), 2000, 70, 90))
    file = EmbeddingFile(write(tmp_path / 'a.tif', stored))
    assert file.dims == 2000 and file.raster.blocks == (64, 64)
    np.testing.assert_array_equal(file.read(5, 6, 7, 8)[0], dequantize(stored)[:, 6:14, 5:12])


def test_gdalinfo_agrees(written: Any) -> None:
    _, path = written
    program = shutil.which('gdalinfo')
    if program is None:
        pytest.skip('gdalinfo (Debian: gdal-bin) is not installed')
    # Its own GDAL, whose data are not those of the GDAL in rasterio's wheel.
    environ = {key: value for key, value in os.environ.items() if key[:4] not in ('GDAL', 'PROJ')}
    told = json.loads(
        subprocess.run(
            [program, '-json', '-mm', str(path)], stdout=subprocess.PIPE, env=environ, check=True
        ).stdout
    )
    vectors = read_embeddings(path)
    assert [band['description'] for band in told['bands']] == band_names(len(vectors))
    assert {band['noDataValue'] for band in told['bands']} == {-128}
    for key, reduce in (('computedMin', np.nanmin), ('computedMax', np.nanmax)):
        extremes = np.array([band[key] for band in told['bands']], np.int8)
        np.testing.assert_array_equal(dequantize(extremes), reduce(vectors, (1, 2)))


def test_qgis_opens_it_with_its_band_names(written: Any) -> None:
    stored, path = written
    python = qgis_python()
    if python is None:
        pytest.skip('QGIS (Debian: python3-qgis) is not installed')
    code = (
        'import json, sys; from qgis.core import QgsApplication, QgsRasterLayer, QgsPointXY\n'
        "app = QgsApplication([], False); app.initQgis(); layer = QgsRasterLayer(sys.argv[1], 'a')\n"
        'provider, bands = layer.dataProvider(), range(1, layer.bandCount() + 1)\n'
        'point = QgsPointXY(*map(float, sys.argv[2:4]))\n'
        'print(json.dumps([layer.isValid(), [layer.bandName(i) for i in bands],'
        '[provider.sample(point, i)[0] for i in bands], layer.crs().authid()]))'
    )
    x, y = UTM['transform'] * (20.5, 10.5)
    environ = dict(QT_QPA_PLATFORM='offscreen', PATH='/usr/bin:/bin')
    words = [python, '-c', code, str(path), str(x), str(y)]
    done = subprocess.run(words, stdout=subprocess.PIPE, env=environ, check=True)
    is_valid, names, values, crs = json.loads(done.stdout)
    assert is_valid and crs == UTM['crs'].to_string()
    assert [name.split(': ')[1] for name in names] == band_names(20)
    # GDAL before 3.7 has no signed bytes, and QGIS shows 256 more for those below 0.
    np.testing.assert_array_equal(np.array(values, int).astype(np.int8), stored[:, 10, 20])


def test_alpha_earth_is_read_from_the_south(tmp_path: Path) -> None:
    vectors = unit_vectors(np.random.RandomState(0), 64, 30, 40)
    vectors[:, 3, 5] = np.nan
    file = EmbeddingFile(write_alpha_earth(tmp_path / 'a.tif', vectors))
    assert file.kind == 'alphaearth' and file.identity == dict(dataset='AlphaEarth Foundations')
    assert file.raster.transform.e > 0
    values, valid = file.read(0, 0, 40, 30)
    assert not valid[26, 5] and valid.sum() == 1199 and not values[:, 26, 5].any()
    np.testing.assert_allclose(values[:, ::-1][:, 10], vectors[:, 10], atol=0.01)


def test_tessera_has_ground_without_an_embedding(tmp_path: Path) -> None:
    vectors = 4 * np.random.RandomState(0).standard_normal((128, 20, 30)).astype('f4')
    vectors[:, 2, 3], vectors[:, 4, 5] = 0, np.nan
    file = EmbeddingFile(write_tessera(tmp_path / 'a.tif', vectors))
    values, valid = file.read(0, 0, 30, 20)
    assert file.kind == 'tessera' and file.dims == 128 and valid.sum() == 598
    np.testing.assert_array_equal(values[:, valid], vectors[:, valid])
    unit, _ = file.read_unit(0, 0, 30, 20)
    np.testing.assert_allclose(np.linalg.norm(unit[:, valid], axis=0), 1, rtol=1e-5)
    other = EmbeddingFile(write_tessera(tmp_path / 'b.tif', vectors, 'v1.1'))
    with pytest.raises(EmbeddingError, match=r'two kinds.*version differ \(v1 and v1.1\)'):
        check_one_identity([file, other])
    check_one_identity([file, file])


def test_a_file_without_its_scale_is_refused(tmp_path: Path) -> None:
    stored = quantize(unit_vectors(np.random.RandomState(0), 64, 8, 8))
    names = tuple(f'A{number:02d}' for number in range(64))
    for number, (values, nodata, described) in enumerate(
        (
            (stored, None, names),
            (stored[:32], -128, names[:32]),
            (stored.astype('f4'), -128, names),
            (stored, -128, tuple(f'B{name}' for name in names)),
        )
    ):
        path = write_bands(tmp_path / f'{number}.tif', values, described, nodata)
        with pytest.raises(EmbeddingError, match='nothing that says how its values become vectors'):
            EmbeddingFile(path)
    EmbeddingFile(write_bands(tmp_path / 'good.tif', stored, names, -128))
    with pytest.raises(GeoError, match='no such file'):
        EmbeddingFile(tmp_path / 'none.tif')


@pytest.mark.parametrize(
    'facts',
    [[], dict(identity=3, dequantize=SCHEME), dict(identity={}), dict(FACTS, dequantize='q / 127')],
)
def test_a_broken_tag_is_refused(tmp_path: Path, facts: Any) -> None:
    stored = quantize(unit_vectors(np.random.RandomState(0), 3, 8, 8))
    with pytest.raises(EmbeddingError, match='its tag MAPSAGE_EMBEDDING is'):
        EmbeddingFile(write(tmp_path / 'a.tif', stored, facts))


def test_a_changed_working_file_is_noticed(tmp_path: Path) -> None:
    stored = quantize(unit_vectors(np.random.RandomState(0), 3, 80, 90))
    writer = EmbeddingWriter(tmp_path / 'w.tif', 90, 80, 3, None, None, FACTS)
    writer.write(0, stored)
    writer._written[0] = (writer._file, 0, 80, [1, 1, 1])
    with pytest.raises(GeoError, match='the rows from 0 on are not what was written'):
        writer.close()
