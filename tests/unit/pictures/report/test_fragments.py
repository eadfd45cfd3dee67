"""Numbers, times and tables as pieces of HTML."""

from __future__ import annotations

import pytest

from mapsage.pictures.report.fragments import bar, change, duration, figure, picture, section, table


@pytest.mark.parametrize(
    'seconds, expected',
    [
        (0.4, '0 s'),
        (59.4, '59 s'),
        (59.6, '1 min 0 s'),
        (303, '5 min 3 s'),
        (3599.7, '1 h 0 min'),
        (7 * 3600 + 12 * 60 + 59, '7 h 12 min'),
    ],
)
def test_a_duration_has_two_units(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    'now, previous, expected',
    [
        (50.0, 40.0, '<span class="up">+10.00</span>'),
        (40.0, 50.0, '<span class="down">-10.00</span>'),
        (50.004, 50.0, '<span class="same">+0.00</span>'),
        (None, 50.0, ''),
        (50.0, None, ''),
    ],
)
def test_a_change_is_colored_only_where_two_decimals_show_it(
    now: float, previous: float, expected: str
) -> None:
    assert change(now, previous) == expected


def test_percentages_that_are_undefined_or_out_of_range() -> None:
    assert figure(None) == '' and figure(12.345) == '12.35'
    assert 'undefined' in bar(None)
    # Only the bar ends at the edge of the cell; the number is the value.
    assert '--p:100.0%' in bar(104.2) and '>104.20<' in bar(104.2) and '--p:0.0%' in bar(-3)


def test_titles_notes_and_names_are_escaped_and_cells_are_html() -> None:
    assert section('', '') == section('Empty', '') == ''
    assert section('a<b', '<i>body</i>', 'x&y') == (
        '<section><h2>a&lt;b</h2><p class="note">x&amp;y</p><i>body</i></section>'
    )
    assert '&lt;script&gt;' in picture(None, '<script>')
    assert table([['<b>1</b>', '2']], ['n'], 'kind') == (
        '<div class="wide"><table class="kind"><thead><tr><th>n</th></tr></thead>'
        '<tbody><tr><th><b>1</b></th><td>2</td></tr></tbody></table></div>'
    )
