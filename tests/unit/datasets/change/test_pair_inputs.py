"""Days in the names of two scenes."""
from __future__ import annotations

import datetime

import pytest

from mapsage.datasets.change.pair_inputs import day_in_name

DAY = datetime.date(2019, 6, 14)


@pytest.mark.parametrize('name, day', [
    ('town_20190614.tif', DAY), ('2019-06-14.tif', DAY), ('a/20200101/2019_06_14.tif', DAY),
    ('T31TCJ_20190614T105031_B04.tif', DAY), ('20190614_of_20190614.tif', DAY),
    ('20190614_to_20230702.tif', None), ('20190231.tif', None), ('2019-0614.tif', None),
    ('tile_120190614.tif', None), ('tile_201906141.tif', None), ('18991231.tif', None),
    ('镇_20190614.tif', DAY), ('town.tif', None)])
def test_a_day_has_eight_digits_of_its_own(name: str, day: object) -> None:
    assert day_in_name(name) == day
