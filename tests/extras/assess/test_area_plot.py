"""The picture of areas: a whisker for each class, in the color of its kind, on a fitting scale."""

from __future__ import annotations

import numpy as np

from mapsage.extras.assess.area_plot import AreaLine, render_areas

_BLUE, _ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def columns_of(pixels: np.ndarray, color: tuple, first: int, last: int) -> np.ndarray:
    """Return the columns with a color in some rows."""
    near = abs(pixels[first:last].astype(int) - np.array(color)).sum(2) < 12
    return np.flatnonzero(near.any(0))


def test_whiskers_span_the_intervals_on_a_linear_scale() -> None:
    lines = [AreaLine('forest', 50, 40, 60, 45, False), AreaLine('water', 30, 10, 80, 45, True)]
    pixels = render_areas(lines, 'ha', 'Areas', 'map.tif')
    forest = columns_of(pixels, _BLUE, 98, 138)
    water = columns_of(pixels, _ORANGE, 142, 182)
    assert (len(forest), len(water)) > (0, 0)
    # 70 of 84 ha and 20 of 84 ha on 620 pixels.
    assert abs(np.ptp(water) - 70 / 84 * 620) < 8 and abs(np.ptp(forest) - 20 / 84 * 620) < 8
    assert len(columns_of(pixels, _ORANGE, 98, 138)) == 0


def test_rare_classes_have_a_logarithmic_scale_and_zero_does_not_break_it() -> None:
    lines = [
        AreaLine('forest $x$', 5000, 4900, 5100, 5000, False),
        AreaLine('fire' * 20, 5, 2, 10, 4, False),
        AreaLine('none', 0, 0, 3, 0, True),
    ]
    pixels = render_areas(lines, 'ha', 'Areas', 'map.tif')
    # A factor of 5 is as wide for the rare class as it would be for the common one.
    assert np.ptp(columns_of(pixels, _BLUE, 142, 182)) > 40
    assert np.ptp(columns_of(pixels, _BLUE, 98, 138)) < 20
    assert len(columns_of(pixels, _ORANGE, 190, 224)) > 0
