"""Thresholds of pseudo-labels, compared with sorted confidences."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.labeling.thresholds import PERCENT, class_thresholds


def count(*confidences: list) -> np.ndarray:
    return np.array([np.bincount(pixels, minlength=PERCENT) for pixels in confidences], np.int64)


def test_a_rare_class_keeps_its_best_pixels_and_a_sure_one_has_the_limit() -> None:
    frequent, rare, absent = [99] * 90 + [50] * 10, [60, 55, 50, 45, 40, 35, 30, 25, 20, 20], []
    counts = count(frequent, rare, absent)
    assert class_thresholds(counts, 0.9, 0.2).tolist() == [90, 55, 90]
    assert class_thresholds(counts, 0.9, 0).tolist() == [90, 90, 90]


@pytest.mark.parametrize('least, percent', [(0.9, 90), (0.895, 90), (0.07, 7), (0.29, 29), (1, 100),
                                            (0, 0)])
def test_fractions_of_a_per_cent_are_rounded_up(least: float, percent: int) -> None:
    assert class_thresholds(count([]), least, 0.2).tolist() == [percent]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(0, 100),
       st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_what_is_kept_is_the_share_or_all_above_the_limit(
        confidences: list, limit: int, share: float) -> None:
    threshold = int(class_thresholds(count(confidences), limit / 100, share)[0])
    minimum = share * len(confidences)
    assert threshold <= limit
    assert sum(pixel >= threshold for pixel in confidences) >= minimum - 1e-9
    if threshold < limit:
        # A higher threshold would keep less than the share.
        assert sum(pixel > threshold for pixel in confidences) < minimum + 1e-9
