"""Day numbers against Python's own calendar."""

import datetime

import pytest
import torch

from mapsage.geo.stacks import calendar, day_number, day_of_year

_DATES = (
    [datetime.date(1900, 1, 1) + datetime.timedelta(days=37 * step) for step in range(3000)]
    + [
        datetime.date(year, month, day)
        for year in (1900, 1999, 2000, 2023, 2024, 2100)
        for month, day in ((1, 1), (2, 28), (3, 1), (12, 31))
    ]
    + [datetime.date(2024, 2, 29)]
)


def test_calendar_and_day_of_year_are_pythons():
    days = torch.tensor([day_number(date) for date in _DATES]).float().view(1, -1)
    year, month, day = calendar(days)
    assert torch.stack([year, month, day], -1)[0].tolist() == [
        [date.year, date.month, date.day] for date in _DATES
    ]
    assert day_of_year(days)[0].tolist() == [date.timetuple().tm_yday for date in _DATES]


def test_a_date_before_1900_is_refused():
    assert day_number(datetime.date(1900, 1, 1)) == 1
    with pytest.raises(ValueError, match='1899-12-31, expected 1900-01-01 or later'):
        day_number(datetime.date(1899, 12, 31))
