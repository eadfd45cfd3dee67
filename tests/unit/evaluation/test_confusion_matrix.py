"""Confusion matrices against hand-written NumPy, MMSeg's IoUMetric and scikit-learn."""

from __future__ import annotations

from typing import List, Optional

import numpy as np
import pytest
import torch
from label_pairs import label_maps
from mmseg.evaluation import IoUMetric
from support import no_simulated_cards

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.evaluation import (
    confusion_matrix,
    count_pixels,
    scores,
)


def by_hand(
    prediction: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int
) -> np.ndarray:
    matrix = np.zeros((num_classes, num_classes), np.int64)
    for t, p in zip(truth.reshape(-1).tolist(), prediction.reshape(-1).tolist()):
        if t != ignore_index:
            matrix[int(t), int(p)] += 1
    return matrix


@pytest.mark.parametrize(
    'num_classes, ignore_index',
    [
        (1, 255),
        (2, 255),
        (7, 255),
        (150, 255),
        (255, 255),
        (7, -1),
        (7, -100),
        (7, 7),
        (7, 3),
        (3, 65535),
        (256, 256),
    ],
)
def test_counts_are_those_of_a_loop(num_classes: int, ignore_index: int) -> None:
    prediction, truth = label_maps(num_classes, num_classes, (2, 30, 40), ignore_index)
    matrix = confusion_matrix(prediction, truth, num_classes, ignore_index)
    assert matrix.dtype == torch.int64 and matrix.sum() > 1800
    np.testing.assert_array_equal(matrix, by_hand(prediction, truth, num_classes, ignore_index))


def test_counts_of_a_large_image_and_of_none() -> None:
    prediction, truth = label_maps(0, 7, (500, 601))  # a host counts 2**17 pixels at once
    expected, known = np.zeros((7, 7), np.int64), truth.numpy() != 255
    np.add.at(expected, (truth.numpy()[known], prediction.numpy()[known]), 1)
    np.testing.assert_array_equal(confusion_matrix(prediction, truth, 7), expected)
    assert not confusion_matrix(prediction[:0], truth[:0], 7).any()
    strided = prediction.t().contiguous().t(), truth.t().contiguous().t()
    np.testing.assert_array_equal(confusion_matrix(*strided, 7), expected)


def test_a_gcu_counts_on_the_card(monkeypatch: pytest.MonkeyPatch, own_environment: None) -> None:
    """Its software would take bincount to the host and back, in every batch."""
    reason = no_simulated_cards()
    if reason is not None:
        pytest.skip(reason)
    prediction, truth = label_maps(3, 7)
    expected = count_pixels(prediction, truth, 7)
    set_current_accelerator(resolve_accelerator('sim'))
    monkeypatch.delattr(torch, 'bincount')
    counts = count_pixels(prediction.to('gcu:1'), truth.to('gcu:1'), 7)
    assert counts.matrix.device == torch.device('gcu:1')
    assert torch.equal(counts.matrix.cpu(), expected.matrix)
    assert torch.equal(counts.outside.cpu(), expected.outside)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32, torch.float32])
def test_any_dtype_and_no_change_to_the_labels(dtype: torch.dtype) -> None:
    prediction, truth = label_maps(1, 7)
    expected = confusion_matrix(prediction, truth, 7)
    given = [prediction.clone(), truth.clone(), prediction.to(dtype)]
    stored = truth.to(dtype) if dtype != torch.int16 else truth.to(torch.uint8)
    assert torch.equal(confusion_matrix(given[2], stored, 7), expected)
    confusion_matrix(given[0], given[1], 7)
    assert torch.equal(given[0], prediction) and torch.equal(given[1], truth)


def test_labels_outside_the_classes_are_counted_apart() -> None:
    truth = torch.tensor([0, 1, 7, 254, -1, 2**40, 255, 255, 2, 2, 2])
    prediction = torch.tensor([0, 1, 0, 0, 0, 0, 0, 99, 7, -3, 6])
    counts = count_pixels(prediction, truth, 7)
    assert counts.outside.tolist() == [4, 2]
    assert counts.matrix.sum() == 3 and counts.matrix[2, 6] == 1
    with pytest.raises(ValueError, match=r'4 truth pixel\(s\) and 2 predicted .* 0 to 6, or 255'):
        confusion_matrix(prediction, truth, 7)
    with pytest.raises(ValueError, match='expected equal shapes'):
        count_pixels(prediction, truth[1:], 7)
    with pytest.raises(ValueError, match='ignore_index=100000'):
        count_pixels(prediction, truth, 7, 100000)


def mmseg_areas(matrix: np.ndarray) -> List[torch.Tensor]:
    intersection, truth, predicted = (
        torch.from_numpy(areas.astype(np.float64))
        for areas in (matrix.diagonal(), matrix.sum(1), matrix.sum(0))
    )
    return [intersection, truth + predicted - intersection, predicted, truth]


@pytest.mark.parametrize('beta, nan_to_num', [(1, None), (2, None), (1, 0)])
def test_scores_equal_mmsegs_and_the_same_are_undefined(
    beta: int, nan_to_num: Optional[int]
) -> None:
    matrix = confusion_matrix(*label_maps(3, 7), 7).numpy()
    # Class 4 neither occurs nor is predicted, 2 does not occur, 3 is never predicted, and 6 has no
    # correct pixel.
    matrix[4], matrix[:, 4] = 0, 0
    matrix[2], matrix[:, 3] = 0, 0
    matrix[6, 6] = 0
    expected = IoUMetric.total_area_to_metrics(
        *mmseg_areas(matrix), ['mIoU', 'mDice', 'mFscore'], nan_to_num, beta
    )
    result = scores(matrix, beta, nan_to_num)
    assert np.isnan(result['Fscore'][6]) == (nan_to_num is None) and result['Dice'][6] == 0
    for name, values in expected.items():
        np.testing.assert_allclose(result[name], values, rtol=1e-14, err_msg=name)
        if name != 'aAcc':
            assert result[f'm{name}'] == pytest.approx(np.nanmean(values), rel=1e-14)


def test_scores_equal_scikit_learns() -> None:
    metrics = pytest.importorskip('sklearn.metrics', reason='scikit-learn is not installed')
    for num_classes in (2, 7, 150):
        prediction, truth = label_maps(num_classes, num_classes, (200, 300))
        known = truth != 255
        matrix = confusion_matrix(prediction, truth, num_classes)
        pair = truth[known].numpy(), prediction[known].numpy()
        result = scores(matrix, beta=2)
        np.testing.assert_array_equal(matrix, metrics.confusion_matrix(*pair))
        for name, function in (
            ('IoU', metrics.jaccard_score),
            ('Dice', metrics.f1_score),
            ('Precision', metrics.precision_score),
            ('Recall', metrics.recall_score),
        ):
            np.testing.assert_array_equal(result[name], function(*pair, average=None), err_msg=name)
            assert result[f'm{name}'] == pytest.approx(function(*pair, average='macro'), rel=1e-15)
        np.testing.assert_allclose(
            result['Fscore'], metrics.fbeta_score(*pair, beta=2, average=None), rtol=1e-15
        )
        # Class 1 has no correct pixel.
        rare = np.where(pair[1] == 1, 0, pair[1])
        assert scores(by_hand(torch.from_numpy(rare), truth[known], num_classes, 255), beta=2)[
            'mFbeta'
        ] == pytest.approx(metrics.fbeta_score(pair[0], rare, beta=2, average='macro'))
        assert result['aAcc'] == metrics.accuracy_score(*pair)
        assert result['kappa'] == pytest.approx(metrics.cohen_kappa_score(*pair), rel=1e-14)


def test_kappa_by_hand_and_what_is_undefined() -> None:
    # Cohen's by hand: agreement 0.7, by chance 0.5 * 0.6 + 0.5 * 0.4
    assert scores(np.array([[20, 5], [10, 15]]))['kappa'] == pytest.approx((0.7 - 0.5) / 0.5)
    assert scores(np.array([[5, 5], [5, 5]]))['kappa'] == 0
    assert np.isnan(scores(np.array([[9, 0], [0, 0]]))['kappa'])
    nothing = scores(np.zeros((3, 3), int))
    assert all(np.isnan(value).all() for value in nothing.values())
    assert scores(np.zeros((3, 3), int), nan_to_num=0)['mIoU'] == 0
    with pytest.raises(ValueError, match=r'\(2, 3\), expected \(C, C\)'):
        scores(np.zeros((2, 3)))


# Which image is a repeat.


# The picture.
