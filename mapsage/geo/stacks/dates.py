"""Dates as day numbers, which float32 holds exactly and a device turns into dates again.

A day number counts days since 1899-12-31, so 1900-01-01 is 1 and every date of an image is
positive. 0 marks a missing date.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Tuple

if TYPE_CHECKING:
    import torch

# Day number of a date that is missing.
NO_DAY = 0

_EPOCH = datetime.date(1899, 12, 31).toordinal()
# Days from 0000-03-01 to the epoch. Python's earliest year is 1; its March begins 365 days later.
_DAYS_FROM_MARCH_OF_YEAR_0 = _EPOCH - (datetime.date(1, 3, 1).toordinal() - 365)


def day_number(date: datetime.date) -> int:
    """Return the number of days from 1899-12-31 to ``date``.

    Raises:
        ValueError: If the date is before 1900, when no image had been taken from the air or space
            that a model could use.
    """
    number = date.toordinal() - _EPOCH
    if number <= NO_DAY:
        raise ValueError(f'date {date}, expected 1900-01-01 or later.')
    return number


def calendar(days: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return year, month (1 to 12) and day of the month (1 to 31) of day numbers.

    Integer arithmetic on the device of ``days``: the algorithm ``civil_from_days`` of Howard
    Hinnant (https://howardhinnant.github.io/date_algorithms.html), in 32 bits.

    Args:
        days: Day numbers of any shape, int or float; a missing date gives 1899, 12, 31.

    Returns:
        Three int32 tensors of the same shape.
    """
    import torch

    since_march = days.to(torch.int32) + _DAYS_FROM_MARCH_OF_YEAR_0
    era = _divide(since_march, 146097)
    day_of_era = since_march - era * 146097
    year_of_era = _divide(
        day_of_era
        - _divide(day_of_era, 1460)
        + _divide(day_of_era, 36524)
        - _divide(day_of_era, 146096),
        365,
    )
    # Years begin in March here, so that the leap day is the last day of a year.
    day_in_year = day_of_era - (
        365 * year_of_era + _divide(year_of_era, 4) - _divide(year_of_era, 100)
    )
    shifted_month = _divide(5 * day_in_year + 2, 153)
    day = day_in_year - _divide(153 * shifted_month + 2, 5) + 1
    month = torch.where(shifted_month < 10, shifted_month + 3, shifted_month - 9)
    year = year_of_era + era * 400 + (month <= 2).to(torch.int32)
    return year, month, day


def day_of_year(days: torch.Tensor) -> torch.Tensor:
    """Return the day of the year, 1 to 366, of day numbers; int32, of the same shape."""
    import torch

    year, month, day = calendar(days)
    is_leap = ((year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))).to(torch.int32)
    # Days before a month, counted from March and moved to January.
    before = _divide(153 * ((month + 9) % 12) + 2, 5)
    return torch.where(month > 2, before + 59 + is_leap, before - 306) + day


def _divide(values: torch.Tensor, divisor: int) -> torch.Tensor:
    import torch

    return torch.div(values, divisor, rounding_mode='floor')
