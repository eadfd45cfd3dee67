"""Two scenes of a command line: days in their names, and what is said of them."""

from __future__ import annotations

import datetime
from pathlib import Path

import cv2
import numpy as np
import pytest
import rasterio
from rasterio.transform import from_origin

from mapsage.geo.places.pair_inputs import PairInputs, day_in_name

DAY = datetime.date(2019, 6, 14)


@pytest.mark.parametrize(
    'name, day',
    [
        ('town_20190614.tif', DAY),
        ('2019-06-14.tif', DAY),
        ('a/20200101/2019_06_14.tif', DAY),
        ('T31TCJ_20190614T105031_B04.tif', DAY),
        ('20190614_of_20190614.tif', DAY),
        ('20190614_to_20230702.tif', None),
        ('20190231.tif', None),
        ('2019-0614.tif', None),
        ('tile_120190614.tif', None),
        ('tile_201906141.tif', None),
        ('18991231.tif', None),
        ('镇_20190614.tif', DAY),
        ('town.tif', None),
    ],
)
def test_a_day_has_eight_digits_of_its_own(name: str, day: object) -> None:
    assert day_in_name(name) == day


def write(path: Path, image: np.ndarray) -> str:
    with rasterio.open(
        str(path),
        'w',
        driver='GTiff',
        dtype='uint8',
        count=len(image),
        height=300,
        width=900,
        crs=32631,
        transform=from_origin(5e5, 45e5, 0.5, 0.5),
    ) as file:
        file.write(image)
    return str(path)


def test_a_prediction_says_shift_and_unknown_dates(tmp_path: Path) -> None:
    """Only band 2 is shifted, and the model takes only band 2."""
    rng = np.random.default_rng(0)
    ground = cv2.GaussianBlur(rng.integers(0, 255, (300, 910, 2), np.uint8), (0, 0), 1.5)
    before, after = ground[:, 5:905], np.stack([ground[:, 5:905, 0], ground[:, 2:902, 1]], 2)
    paths = [
        write(tmp_path / name, image.transpose(2, 0, 1))
        for name, image in (('town_20190614.tif', before), ('later.tif', after))
    ]
    inputs = {
        bound: PairInputs(dict(max_shift=bound, sensors=dict(image=dict(bands=[2], max_dates=2))))
        for bound in (1, 4, None)
    }
    for pair in inputs.values():
        assert pair.find(paths) == {'town_20190614_to_later': paths[0]}
        assert pair.dates(paths[0]) == ['2019-06-14', '']
    shift, dates = inputs[1].describe(paths[0])
    assert float(shift.split('(')[1].split()[0]) == pytest.approx(3, abs=0.1)
    assert 'more than max_shift=1' in shift and 'more than' not in inputs[4].describe(paths[0])[0]
    assert dates.startswith('the dates are not known') and 'town_20190614.tif' in dates
    assert len(inputs[None].describe(paths[0])) == 1
