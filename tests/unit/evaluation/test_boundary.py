"""Boundary IoU against the paper's code."""

from __future__ import annotations

from typing import Tuple

import cv2
import numpy as np
import pytest
import torch

from mapsage.evaluation import (
    boundary_counts,
    boundary_iou,
    confusion_matrix,
    scores,
)
from mapsage.evaluation.boundary import boundary_distance, boundary_of


def cheng_boundary(mask: np.ndarray, distance: int) -> np.ndarray:
    """The paper's mask_to_boundary on one uint8 mask."""
    height, width = mask.shape
    padded = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    eroded = cv2.erode(padded, np.ones((3, 3), np.uint8), iterations=distance)
    return mask - eroded[1 : height + 1, 1 : width + 1]


def blobs(seed: int, shape: Tuple[int, int], num_classes: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, num_classes, (4, 5)).astype(np.uint8)
    coarse = cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_NEAREST)
    turned = np.roll(coarse, rng.integers(0, 9, 2), (0, 1))
    return torch.from_numpy(turned.astype(np.int64))


@pytest.mark.parametrize(
    'shape, ratio',
    [((90, 140), 0.02), ((61, 40), 0.05), ((20, 16), 0.3), ((7, 9), 1.0), ((1, 30), 0.02)],
)
def test_boundary_counts_equal_the_papers(shape: Tuple[int, int], ratio: float) -> None:
    prediction, truth = blobs(1, shape, 4), blobs(2, shape, 4)
    truth[:, 10:13] = 255
    distance = boundary_distance(*shape, ratio)
    ignored = truth.numpy() == 255
    expected = np.zeros((3, 4), np.int64)
    for label in range(4):
        masks = [
            ((labels.numpy() == label) & ~ignored).astype(np.uint8)
            for labels in (prediction, truth)
        ]
        edges = [cheng_boundary(mask, distance).astype(bool) for mask in masks]
        expected[:, label] = [(edges[0] & edges[1]).sum(), edges[0].sum(), edges[1].sum()]
    counts = boundary_counts(prediction, truth, 4, 255, ratio)
    assert counts.dtype == torch.int64
    np.testing.assert_array_equal(counts, expected)


def test_boundary_iou_of_right_far_and_absent_classes() -> None:
    assert boundary_distance(1024, 1024) == 29 and boundary_distance(3, 3) == 1
    truth = torch.zeros(50, 60).long()
    truth[:, 30:] = 1
    truth[:5] = 255
    perfect = truth.masked_fill(truth == 255, 1)
    np.testing.assert_array_equal(boundary_iou(boundary_counts(perfect, truth, 3)), [1, 1, np.nan])
    assert not boundary_of(truth, 2)[20, 20] and boundary_of(truth, 2)[20, 28]
    moved = torch.roll(perfect, 4, 1)
    values = boundary_iou(boundary_counts(moved, truth, 3))
    assert 0 < values[0] < scores(confusion_matrix(moved, truth, 3))['IoU'][0]
    with pytest.raises(ValueError, match=r'expected one \(H, W\)'):
        boundary_counts(truth[None], truth[None], 3)
