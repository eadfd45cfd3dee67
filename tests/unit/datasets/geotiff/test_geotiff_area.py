"""An area of interest limits the windows and the labels of ``GeoTiffDataset``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from geo_scenes import UTM, write_areas, write_raster
from geotiff_data import build_dataset, load_window, write_scene
from mmengine.logging import MMLogger
from rasterio.features import geometry_mask

from mapsage.extras.streaming.cache.keys import sample_hashes
from mapsage.geo import GeoError

AREA = shapely.Point(500060, 4099960).buffer(30)
INSIDE = geometry_mask([AREA], (260, 300), UTM['transform'], invert=True)
PLACES = [
    (column, row)
    for row in (0, 128, 132)
    for column in (0, 128, 172)
    if INSIDE[row : row + 128, column : column + 128].any()
]


def write_area(root: Path, *shapes: Any) -> None:
    if (root / 'areas.gpkg').exists():
        (root / 'areas.gpkg').unlink()
    write_areas(root / 'areas.gpkg', shapes or (AREA,))


@pytest.mark.parametrize('test_mode', [False, True])
def test_windows_touch_it_and_labels_end_with_it(tmp_path: Path, test_mode: bool) -> None:
    values, classes = write_scene(tmp_path)
    write_area(tmp_path)
    expected = np.where(INSIDE, classes, 255)
    dataset = build_dataset(tmp_path, aoi='areas.gpkg', test_mode=test_mode)
    seen = np.full((388, 428), 255)
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        image, mask = load_window(dataset, index)
        np.testing.assert_array_equal(image, values[:, row : row + side, column : column + side])
        inside = np.s_[row : row + side, column : column + side]
        assert test_mode or (mask == expected[inside]).all()
        seen[inside] = np.where(mask == 255, seen[inside], mask)
    np.testing.assert_array_equal(seen[:260, :300], expected)
    places = [dataset.get_data_info(index)['window'][:2] for index in range(len(dataset))]
    assert places == PLACES and 2 < len(PLACES) < len(build_dataset(tmp_path)) == 9


def test_scenes_beside_it_are_named(tmp_path: Path, caplog: Any) -> None:
    values, classes = write_scene(tmp_path)
    beside = dict(UTM, transform=UTM['transform'] * UTM['transform'].translation(9000, 0))
    write_scene(tmp_path, 'b', beside)
    write_area(tmp_path)
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        dataset = build_dataset(tmp_path, aoi='areas.gpkg')
    finally:
        logger.removeHandler(caplog.handler)
    assert len(dataset) == len(PLACES)
    assert 'covers no pixel of' in caplog.text and 'b.tif' in caplog.text
    with pytest.raises(GeoError, match=r'covers no pixel of .*b\.tif.* aoi= and scenes='):
        build_dataset(tmp_path, scenes='scenes/b.tif', aoi='areas.gpkg')
    write_raster(tmp_path / 'scenes/a.tif', values, nodata=0)
    with pytest.raises(GeoError, match='no such file'):
        build_dataset(tmp_path, aoi='none.gpkg')


def test_cached_features_do_not_depend_on_it(tmp_path: Path) -> None:
    write_scene(tmp_path)
    found = []
    for shapes in ((AREA,), (AREA,), (AREA.buffer(1),)):
        write_area(tmp_path, *shapes)
        found.append(sample_hashes(build_dataset(tmp_path, labels=None, aoi='areas.gpkg')))
    assert found[0] == found[1] == found[2]
