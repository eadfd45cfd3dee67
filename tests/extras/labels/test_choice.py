"""Which windows are chosen, against the rule carried out one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mapsage.extras.labels.choice import choose, class_weights

FAR = np.arange(20)[:, None] * np.array([[9.0, 0.0]])


def test_doubt_about_a_rare_class_counts_more() -> None:
    weights = class_weights(np.array([870, 90, 40, 0]))
    assert weights[0] < 1 < weights[1] < weights[2] <= 5 and weights[3] == 1
    assert np.isclose((weights * [0.87, 0.09, 0.04, 0]).sum(), 1)
    assert class_weights(np.array([10**6, 1]))[1] == 5


def test_unlike_windows_go_before_slightly_more_uncertain_ones() -> None:
    features = np.array([[0, 0], [0, 0.1], [5, 5], [0.1, 0]], float)
    scores = np.array([1, 0.99, 0.8, 0.98])
    assert choose(scores, FAR[:4], 2, 1.5, features) == [0, 2]
    assert choose(scores, FAR[:4], 2, 1.5) == [0, 1]


def test_neighbors_are_not_chosen_and_no_window_without_a_score() -> None:
    positions = np.array([[0, 0], [1, 0], [0.9, 0.9], [1.5, 0], [4, 0]])
    scores = np.array([5, 4, 3, 2, 0.0])
    assert choose(scores, positions, 9, 1.5) == [0, 3]
    assert choose(scores, positions, 9, 0) == [0, 1, 2, 3]
    assert choose(np.zeros(5), positions, 9, 0) == []


def test_equal_windows_are_chosen_until_the_count() -> None:
    same = np.ones((20, 3))
    assert choose(np.ones(20), FAR, 7, 1.5, same) == list(range(7))


def test_named_windows_lead_whatever_their_scores_and_others_keep_away() -> None:
    positions = np.array([[0, 0], [1, 0], [2, 0], [4, 0], [9, 9]])
    scores = np.array([5, 0, 0, 3, 4.0])
    assert choose(scores, positions, 9, 1.5, first=[2, 1]) == [2, 1, 4, 3]
    assert choose(scores, positions, 1, 1.5, first=[2, 1]) == [2]
    assert choose(np.zeros(5), positions, 9, 1.5, np.ones((5, 2)), [3]) == [3]


@given(st.integers(1, 12), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_choice_is_the_best_of_the_available_windows(
    windows: int, count: int, random: object
) -> None:
    state = np.random.RandomState(random.randrange(2**31))  # type: ignore[attr-defined]
    scores = state.rand(windows).round(2)
    positions, features = state.rand(windows, 2) * 4, state.rand(windows, 3)
    chosen = choose(scores, positions, count, 1.0, features)
    spread = features.std(0)
    scaled = ((features - features.mean(0)) / np.where(spread > 0, spread, 1)).round(3)
    for number, index in enumerate(chosen):
        earlier = chosen[:number]
        available = [
            window
            for window in range(windows)
            if window not in earlier
            and scores[window] > 0
            and all(
                np.hypot(*(positions[window] - positions[neighbor])) >= 1 for neighbor in earlier
            )
        ]
        gains = {
            window: scores[window]
            * min(
                [np.sqrt(((scaled[window] - scaled[neighbor]) ** 2).sum()) for neighbor in earlier]
                or [1]
            )
            for window in available
        }
        assert gains[index] >= max(gains.values()) - 1e-9
    if len(chosen) < count:
        assert all(
            scores[window] == 0
            or window in chosen
            or any(np.hypot(*(positions[window] - positions[neighbor])) < 1 for neighbor in chosen)
            for window in range(windows)
        )
