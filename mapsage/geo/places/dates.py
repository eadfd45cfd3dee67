"""Dates of images: reading them from file names and lists, and choosing some of many."""

from __future__ import annotations

import datetime
import re
from typing import List, NamedTuple, Sequence, TypeVar

from mapsage.geo.stacks import day_number

_Item = TypeVar('_Item')

# A date, and perhaps a time with or without a time zone: 20240131, 2024-01-31T10:20:30Z.
_DATE = re.compile(
    r'(\d{4})(-?)(\d{2})\2(\d{2})'
    r'(?:[T ]?(\d{2}):?(\d{2})(?::?(\d{2})(?:\.\d+)?)?\s*(Z|[+-]\d{2}:?\d{2})?)?'
)
# Widest difference of local time from UTC, in hours.
_WIDEST_ZONE = 14


class ImageDate(NamedTuple):
    """Date of an image in UTC.

    Attributes:
        date: The date.
        may_be_next_year: Whether the text has a time without a time zone so close to New Year that
            the year depends on the zone.
    """

    date: datetime.date
    may_be_next_year: bool = False


def parse_date(text: str) -> ImageDate:
    """Return the date that a text such as ``20240131`` or ``2024-01-31T10:20:30+02:00`` names.

    A time with a time zone is converted to UTC; a time without one is taken as UTC.

    Raises:
        ValueError: If the text is no date.
    """
    match = _DATE.fullmatch(text.strip())
    expected = (
        'expected YYYYMMDD or YYYY-MM-DD from 1900 on, with or without a time such as T102030Z'
    )
    if match is None:
        raise ValueError(f'{text!r} is no date; {expected}.')
    year, _, month, day, hour, minute, second, zone = match.groups()
    try:
        moment = datetime.datetime(
            int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0)
        )
        if zone and zone != 'Z':
            offset = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
            moment += offset if zone[0] == '-' else -offset
        # Raises an error before 1900, which a stack cannot hold.
        day_number(moment.date())
        width = datetime.timedelta(hours=_WIDEST_ZONE)
        unclear = bool(hour and not zone and (moment - width).year != (moment + width).year)
    except (ValueError, OverflowError) as error:
        raise ValueError(f'{text!r} is no date ({str(error).rstrip(".")}); {expected}.') from None
    return ImageDate(moment.date(), unclear)


def spread_evenly(items: Sequence[_Item], count: int) -> List[_Item]:
    """Return at most ``count`` items, evenly spread over the sequence, the first and last included.

    A single item is the one in the middle.
    """
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[len(items) // 2]]
    return [
        items[(2 * number * (len(items) - 1) + count - 1) // (2 * (count - 1))]
        for number in range(count)
    ]
