"""Thresholds of pseudo-labels against sorted confidences."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.labeling.thresholds import PERCENT, class_thresholds


def count(*confidences: list) -> np.ndarray:
    return np.array([np.bincount(each, minlength=PERCENT) for each in confidences], np.int64)


def test_a_rare_class_keeps_its_best_pixels_and_a_sure_one_has_the_limit() -> None:
    frequent, rare, nowhere = [99] * 90 + [50] * 10, [60, 55, 50, 45, 40, 35, 30, 25, 20, 20], []
    found = class_thresholds(count(frequent, rare, nowhere), 0.9, 0.2)
    assert found.tolist() == [90, 55, 90]
    assert class_thresholds(count(frequent, rare, nowhere), 0.9, 0).tolist() == [90, 90, 90]


@pytest.mark.parametrize('least, percent', [(0.9, 90), (0.895, 90), (0.07, 7), (0.29, 29), (1, 100),
                                            (0, 0)])
def test_fractions_of_a_per_cent_are_rounded_up(least: float, percent: int) -> None:
    assert class_thresholds(count([]), least, 0.2).tolist() == [percent]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(0, 100),
       st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_what_is_kept_is_the_share_or_all_above_the_limit(
        confidences: list, limit: int, share: float) -> None:
    threshold = int(class_thresholds(count(confidences), limit / 100, share)[0])
    kept = [each for each in confidences if each >= threshold]
    assert threshold <= limit and len(kept) >= share * len(confidences) - 1e-9
    if threshold < limit:  # no higher one keeps the share
        assert sum(each > threshold for each in confidences) < share * len(confidences) + 1e-9
