"""Blocks, folds and intervals against slower computations, scikit-learn and simulated labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import main_leg

from mapsage.extras.embeddings.classifiers import METHODS, Classifier
from mapsage.extras.embeddings.cross_validation import (
    _accuracy,
    _iou,
    _jackknife,
    as_record,
    as_table,
    assign_blocks,
    assign_folds,
    cross_validate,
)

pytestmark = main_leg


@given(st.integers(0, 1000), st.integers(2, 60), st.integers(1, 5))
def test_a_block_is_in_one_fold(seed: int, count: int, classes: int) -> None:
    random = np.random.RandomState(seed)
    places, labels = random.uniform(-1e6, 1e6, (count, 2)), random.randint(0, classes, count)
    blocks, side = assign_blocks(places, None)
    corner = places.min(0)
    for block in range(blocks.max() + 1):
        cell = np.floor((places[blocks == block] - corner) / side)
        assert len(cell) and (cell == cell[0]).all()
    folds = assign_folds(blocks, labels)
    assert all(len(set(folds[blocks == block])) == 1 for block in set(blocks))
    assert len(set(folds)) == min(5, blocks.max() + 1)


def test_the_side_of_blocks() -> None:
    places = np.array([[0.0, 0.0], [1000.0, 10.0]])
    assert assign_blocks(places, None)[1] == 100
    assert assign_blocks(places, 2000.0)[0].tolist() == [0, 0]
    assert assign_blocks(places[:1], None)[0].tolist() == [0]


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip('sklearn.metrics')
    random = np.random.RandomState(0)
    labels, predicted = random.randint(0, 3, 200), random.randint(0, 3, 200)
    matrix = metrics.confusion_matrix(labels, predicted).astype(float)
    expected = metrics.jaccard_score(labels, predicted, average=None)
    np.testing.assert_allclose(_iou(matrix), expected)
    assert _accuracy(matrix) == pytest.approx(metrics.accuracy_score(labels, predicted))


def test_an_interval_of_equal_blocks_is_the_textbook_one() -> None:
    """For a mean over equal blocks, the jackknife is the standard error of the blocks' means."""
    stats = pytest.importorskip('scipy.stats')
    random = np.random.RandomState(0)
    right = random.randint(2, 10, 12)
    matrices = np.zeros((12, 2, 2))
    matrices[:, 0, 0], matrices[:, 0, 1] = right, 10 - right
    score = _jackknife(matrices, _accuracy)
    low, high = stats.t.interval(0.95, 11, loc=(right / 10).mean(), scale=stats.sem(right / 10))
    assert (score.low, score.high) == (pytest.approx(low), pytest.approx(high))


def test_all_right_is_no_certainty() -> None:
    matrices = np.zeros((20, 2, 2))
    matrices[:, 0, 0] = 5
    score = _jackknife(matrices, _accuracy)
    # 20 good blocks are seen with probability 0.025 if a share of 0.168 is bad.
    assert score.value == score.high == 1 and score.low == pytest.approx(0.025 ** (1 / 20))


def test_intervals_contain_the_truth_where_neighbors_agree() -> None:
    """Labels in clusters that are right or wrong together, as on the ground."""
    random, hits = np.random.RandomState(0), 0
    for _ in range(300):
        chance = random.beta(8, 2, 25)
        right = random.binomial(8, chance)
        matrices = np.zeros((25, 2, 2))
        matrices[:, 0, 0], matrices[:, 0, 1] = right, 8 - right
        score = _jackknife(matrices, _accuracy)
        hits += score.low <= 0.8 <= score.high
    assert 0.92 <= hits / 300 <= 0.98


def clusters(count: int = 120) -> tuple:
    """Return vectors of three classes, their labels, and the blocks of ten neighbors each."""
    random = np.random.RandomState(0)
    labels = np.arange(count) % 3
    vectors = np.eye(3, 8)[labels] + 0.15 * random.standard_normal((count, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), labels, np.arange(count) // 10


@pytest.mark.parametrize('method', METHODS)
def test_every_method_learns_and_is_not_tested_on_what_it_saw(method: str) -> None:
    pytest.importorskip('sklearn')
    vectors, labels, blocks = clusters()
    result = cross_validate(method, vectors, labels, blocks, 3)
    assert result.accuracy.value > 0.95 and result.blocks == 12
    # Labels that only memory could know are guessed.
    chance = cross_validate(
        method, vectors, np.random.RandomState(1).permutation(labels), blocks, 3
    )
    assert chance.accuracy.value < 0.55
    again = Classifier(method, vectors, labels, 3).probabilities(vectors)
    np.testing.assert_array_equal(
        again, Classifier(method, vectors, labels, 3).probabilities(vectors)
    )
    np.testing.assert_allclose(again.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize('method', METHODS)
def test_a_class_that_is_missing_in_a_fold(method: str) -> None:
    pytest.importorskip('sklearn')
    vectors, labels, _ = clusters()
    # All labels of class 2 lie in one block, which is the only one of two classes.
    blocks = np.where(labels == 2, 0, 1 + np.arange(len(labels)) % 5)
    result = cross_validate(method, vectors, labels, blocks, 3)
    assert result.iou[2].value == 0 and result.iou[0].value > 0.5
    only = Classifier(method, vectors[labels == 1], labels[labels == 1], 3)
    assert only.predict(vectors[:4])[0].tolist() == [1, 1, 1, 1]
    record = as_record(result, ['a', 'b', 'c'])
    assert record['iou']['c'][0] == 0 and record['blocks'] == 6
    assert as_table([result], ['a', 'b', 'c'])[0].split() == [method]
