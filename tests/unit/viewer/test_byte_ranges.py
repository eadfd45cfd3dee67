"""Parts of files that a browser asks for."""
from __future__ import annotations

from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.viewer.byte_ranges import requested_part


@pytest.mark.parametrize('header, part', [
    (None, None), ('bytes=0-9', (0, 10)), ('bytes=90-', (90, 100)), ('bytes=90-500', (90, 100)),
    ('bytes=-10', (90, 100)), ('bytes=-500', (0, 100)), ('bytes=100-', (100, 100)),
    ('bytes=-0', (100, 100)), ('bytes=5-4', None), ('bytes=-', None), ('bytes=1-2,4-5', None),
    ('lines=1-2', None), ('bytes=a-b', None), ('bytes=٣-٤', None),
    # Python refuses to read a number of more than 4,300 digits
    (f'bytes={"9" * 5000}-', (10**5000, 100)), (f'bytes=-{"9" * 5000}', (0, 100)),
    (f'bytes=0-{"9" * 5000}', (0, 100)), (f'bytes={"0" * 5000}7-{"0" * 4999}9', (7, 10)),
    (f'bytes={"9" * 5000}-{"9" * 4999}', None)])
def test_parts_are_read_as_the_standard_says(header: Any, part: Any) -> None:
    asked = requested_part(header, 100)
    if part is not None and part[0] > 100:  # behind the end; how far, nobody reads
        assert asked is not None and asked[0] >= asked[1]
    else:
        assert asked == part


DIGITS = st.one_of(st.integers(0, 300).map(str), st.text('09', max_size=30),
                   st.integers(4290, 5000).map(lambda size: '9' * size),
                   st.integers(4290, 5000).map(lambda size: '0' * size + '7'))


@given(st.one_of(
    st.text(), st.none(), st.text('bytes=-0123456789, ').map('bytes={}'.format),
    st.tuples(DIGITS, DIGITS).map('bytes={0[0]}-{0[1]}'.format)), st.integers(0, 200))
def test_any_range_is_a_part_of_the_file_or_none(header: Optional[str], size: int) -> None:
    part = requested_part(header, size)
    if part is not None and part[0] < part[1]:
        assert 0 <= part[0] and part[1] <= size


@given(st.text('0123456789', max_size=40), st.text('0123456789', max_size=40),
       st.integers(0, 10**12))
def test_parts_are_those_of_numbers(first: str, last: str, size: int) -> None:
    """An answer that is computed with Python's own numbers."""
    part = requested_part(f'bytes={first}-{last}', size)
    if not first and not last or first and last and int(last) < int(first):
        assert part is None
        return
    assert part is not None
    if first:
        expected = min(int(first), size), min(size, int(last) + 1) if last else size
    else:
        expected = max(0, size - int(last)), size
    assert part == expected or part[0] >= part[1] and expected[0] >= expected[1]
