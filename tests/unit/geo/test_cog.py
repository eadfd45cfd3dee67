"""Class maps as Cloud Optimized GeoTIFFs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Set, Tuple

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from geo_scenes import CLASSES, DEGREES, PALETTE, PIXELS, UTM, draw_classes, write_raster
from warm_python import warm_python

from mapsage.geo import (
    CONFIDENCE_NODATA,
    ClassMapWriter,
    GeoError,
    MapInfo,
    confidence_path,
    read_classes,
    write_cog,
)
from mapsage.geo.cog import temporary_beside

ROOT = Path(__file__).resolve().parents[3]


def _scene_sized_map() -> Tuple[np.ndarray, np.ndarray]:
    classes = np.tile(draw_classes(), (5, 5))[:1200, :1400]
    classes[:100, :64] = 255
    confidence = (np.arange(classes.size).reshape(classes.shape) // 7 % 101).astype(np.uint8)
    confidence[classes == 255] = CONFIDENCE_NODATA
    return classes, confidence


def _write(folder: Path, place: dict, names: Any = CLASSES) -> Path:
    classes, confidence = _scene_sized_map()
    info = MapInfo(names, PALETTE, **place)
    with ClassMapWriter(folder / 'work.tif', 1400, 1200, info, confidence=True) as writer:
        for row in (*range(500, 1200, 100), *range(0, 500, 125)):  # in any order and height
            rows = slice(row, row + (100 if row >= 500 else 125))
            writer.write(row, classes[rows], confidence[rows])
    write_cog(folder / 'work.tif', folder / 'map.tif')
    write_cog(confidence_path(folder / 'work.tif'), confidence_path(folder / 'map.tif'))
    return folder / 'map.tif'


@pytest.mark.parametrize('place', [UTM, DEGREES], ids=['utm', 'degrees'])
def test_map_has_its_place_colors_and_names(tmp_path: Path, place: dict) -> None:
    path = _write(tmp_path, place, ('ground', 'a<b & "c"', 'Wässer 水'))
    classes, confidence = _scene_sized_map()
    with rasterio.open(path) as file:
        np.testing.assert_array_equal(file.read(1), classes)
        assert file.crs == place['crs'] and file.transform == place['transform']
        a, _, left, _, e, top = place['transform'][:6]
        assert file.bounds == pytest.approx((left, top + 1200 * e, left + 1400 * a, top))
        assert file.nodata == 255 and file.dtypes == ('uint8',)
        table = file.colormap(1)
        assert [list(table[i][:3]) for i in range(3)] == PALETTE and table[255][3] == 0
        assert file.block_shapes == [(512, 512)] and file.overviews(1) == [2, 4]
        assert file.compression.value.lower() == 'deflate'
        small = file.read(1, out_shape=(300, 350))
        assert set(np.unique(small)) == {0, 1, 2, 255}  # classes, not means of them
    assert [entry['name'] for entry in read_classes(path)] == ['ground', 'a<b & "c"', 'Wässer 水']
    assert [entry['color'] for entry in read_classes(path)] == PALETTE
    with rasterio.open(confidence_path(path)) as file:
        np.testing.assert_array_equal(file.read(1), confidence)
        assert file.transform == place['transform'] and file.nodata == CONFIDENCE_NODATA
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        'map.tif',
        'map.tif.aux.xml',
        'map_confidence.tif',
        'work.tif',
        'work_confidence.tif',
    ]


def test_gdal_finds_the_class_names(tmp_path: Path) -> None:
    path = _write(tmp_path, UTM)
    # GDAL takes the names into a copy, in a format that stores them by itself
    rasterio.shutil.copy(str(path), str(tmp_path / 'copy.vrt'), driver='VRT')
    text = (tmp_path / 'copy.vrt').read_text()
    assert [name for name in CLASSES if f'<Category>{name}</Category>' in text] == list(CLASSES)
    assert text.index('ground') < text.index('house') < text.index('water')


def test_validator_accepts_it(tmp_path: Path) -> None:
    cogeo = pytest.importorskip('rio_cogeo', reason='rio-cogeo needs Python 3.11 here')
    path = _write(tmp_path, UTM)
    for name in (path, confidence_path(path)):
        assert cogeo.cog_validate(str(name), strict=True) == (True, [], [])


def test_map_in_pixels(tmp_path: Path) -> None:
    with rasterio.open(_write(tmp_path, PIXELS)) as file:
        assert file.crs is None and file.transform.is_identity
        np.testing.assert_array_equal(file.read(1), _scene_sized_map()[0])


def test_wrong_classes_and_folders(tmp_path: Path) -> None:
    with pytest.raises(GeoError, match='3 class names and 2 colors'):
        MapInfo(CLASSES, PALETTE[:2])
    with pytest.raises(GeoError, match='256 classes and nodata=255'):
        MapInfo(['x'] * 256, [[0, 0, 0]] * 256)
    with pytest.raises(GeoError, match='folder .*absent does not exist'):
        ClassMapWriter(tmp_path / 'absent' / 'map.tif', 8, 8, MapInfo(CLASSES, PALETTE))
    work = write_raster(tmp_path / 'work.tif', draw_classes())
    with pytest.raises(GeoError, match='cannot write into .*absent.*make the folder'):
        write_cog(work, tmp_path / 'absent' / 'map.tif')


def test_damaged_working_file_leaves_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, UTM)
    before = path.read_bytes()
    os.truncate(tmp_path / 'work.tif', os.path.getsize(tmp_path / 'work.tif') // 2)
    with pytest.raises(GeoError, match='Nothing was left'):
        write_cog(tmp_path / 'work.tif', tmp_path / 'other.tif')
    with pytest.raises(GeoError):
        write_cog(tmp_path / 'work.tif', path)
    assert path.read_bytes() == before  # the map that was there stays
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(('.', 'other'))]


def _die_while_writing(folder: Path) -> None:
    with temporary_beside(folder / 'map.tif') as one, temporary_beside(folder / 'other.tif'):
        (one / 'part').write_text('half a map')
        os.kill(os.getpid(), signal.SIGKILL)


def test_folder_of_a_killed_process_goes_with_the_next(tmp_path: Path) -> None:
    def folders() -> Set[str]:
        return {path.name for path in tmp_path.iterdir()}

    child = multiprocessing.get_context('fork').Process(target=_die_while_writing, args=(tmp_path,))
    child.start()
    child.join(60)
    other = {name for name in folders() if name.startswith('.other.tif.')}
    assert len(folders()) == 2 and len(other) == 1
    with temporary_beside(tmp_path / 'map.tif') as living:
        with temporary_beside(tmp_path / 'map.tif') as second:  # the first belongs to a live one
            assert folders() == other | {living.name, second.name}
            assert f'.{os.getpid()}.' in living.name
    assert folders() == other


# For this process the disk is full once a file has so many bytes.
FULL_DISK = """
import os, resource, sys
import numpy as np
sys.path[:0] = [{root!r}, {tests!r}]
from geo_scenes import CLASSES, PALETTE, UTM
from mapsage.geo import ClassMapWriter, GeoError, MapInfo, write_cog, write_polygons
os.chdir(sys.argv[1])
cells = np.random.RandomState(0).randint(0, 3, (150, 150)).astype(np.uint8)
noise = np.kron(cells, np.ones((3, 3), np.uint8))
def write_work():
    with ClassMapWriter('work.tif', 450, 450, MapInfo(CLASSES, PALETTE, **UTM)) as file:
        for row in range(0, 450, 50):
            file.write(row, noise[row:row + 50])
stages = dict(
    work=(3000, write_work), map=(3000, lambda: write_cog('work.tif', 'map.tif')),
    polygons=(200000, lambda: write_polygons('work.tif', 'map.gpkg', CLASSES)))
for stage, (size, action) in stages.items():
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        action()
    except GeoError as error:
        print(stage, 'GeoError:', error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(stage, 'left', sorted(os.listdir()))
    write_work()
"""


def test_full_disk_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    script = tmp_path / 'full_disk.py'
    script.write_text(FULL_DISK.format(root=str(ROOT), tests=str(ROOT / 'tests')))
    (tmp_path / 'disk').mkdir()
    done = subprocess.run(
        [warm_python(), str(script), str(tmp_path / 'disk')],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
    )
    for stage, name in (('work', 'work.tif'), ('map', 'map.tif'), ('polygons', 'map.gpkg')):
        assert f'{stage} GeoError: cannot write {name}: ' in done.stdout, done.stdout[-3000:]
        assert f"{stage} left ['work.tif']" in done.stdout
    assert done.stdout.count('free space there or write elsewhere') == 3
