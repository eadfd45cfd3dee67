"""The soft Jaccard index against written-out sums, of a batch and of the band along contours."""

from __future__ import annotations

from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
from label_pairs import data_sample
from mmengine.registry import MODELS, DefaultScope
from torch.nn import functional

from mapsage.models.losses import JaccardLoss, contour_band

WEIGHTS = [0.2, 1.0, 3.0, 0.5]
BAND = dict(band_weight=0.5, dilation_ratio=0.1)  # 1 pixel of 9 x 7


def batch(
    seed: int, images: int = 2, shape: Tuple[int, int] = (9, 7), ignored: float = 0.3
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return logits of 4 classes and labels; class 3 is in no image of an odd seed."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 3 if seed % 2 else 4, (images, 3, 3), generator=generator)
    labels = (
        coarse.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, : shape[0], : shape[1]].clone()
    )
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return torch.randn(images, 4, *shape, generator=generator), labels


def band_by_hand(labels: np.ndarray, distance: int) -> np.ndarray:
    found = np.zeros(labels.shape, bool)
    for image, row, column in np.argwhere(labels != 255):
        near = labels[
            image,
            max(0, row - distance) : row + distance + 1,
            max(0, column - distance) : column + distance + 1,
        ]
        found[image, row, column] = len(set(near[near != 255].tolist())) > 1
    return found


def index_by_hand(
    probabilities: np.ndarray, labels: np.ndarray, where: np.ndarray, weights: List[float]
) -> float:
    """Return the weighted mean index over the classes in the labels at ``where``."""
    total, count = 0.0, 0.0
    for number, weight in enumerate(weights):
        truth = (labels == number) & where
        if truth.any():
            guess = probabilities[:, number]
            both = guess[truth].sum()
            total += weight * both / (guess[where].sum() + truth.sum() - both)
            count += weight
    return total / count


@pytest.mark.parametrize('weights', [None, WEIGHTS])
@pytest.mark.parametrize('more', [{}, BAND])
def test_values_are_those_of_the_formulas(weights: Any, more: Any) -> None:
    loss = MODELS.build(dict(type='JaccardLoss', class_weight=weights, loss_weight=0.4, **more))
    for seed in (0, 1):
        logits, labels = batch(seed)
        truth, chances = labels.numpy(), logits.double().softmax(1).numpy()
        each = weights or [1.0] * 4
        expected = index_by_hand(chances, truth, truth != 255, each)
        if more:
            band = band_by_hand(truth, 1)
            assert 0 < band.sum() < (truth != 255).sum()
            expected = (expected + index_by_hand(chances, truth, band, each)) / 2
        assert float(loss(logits, labels)) == pytest.approx(0.4 * (1 - expected), rel=1e-5)
        half = loss(logits.bfloat16(), labels)  # under autocast
        assert half.dtype == torch.float32 and float(half) == pytest.approx(
            float(loss(logits, labels)), rel=3e-2
        )


@pytest.mark.parametrize('distance', [1, 2, 5])
def test_the_band_is_that_of_a_search_around_each_pixel(distance: int) -> None:
    labels = batch(4, images=3, shape=(8, 9), ignored=0.4)[1]
    labels[2] = 2  # one class and no contour, not even at the border
    found = contour_band(labels, distance)
    assert (found.numpy() == band_by_hand(labels.numpy(), distance)).all()
    assert found[0].any() and not found[2].any()


@pytest.mark.parametrize('more', [{}, BAND])
def test_ignored_pixels_and_absent_classes_change_nothing(more: Any) -> None:
    loss = JaccardLoss(**more)
    _, labels = batch(1)
    perfect = functional.one_hot(labels.clamp(max=3), 4).permute(0, 3, 1, 2) * 100.0
    assert float(loss(perfect, labels)) == pytest.approx(0, abs=1e-6)
    logits = batch(1)[0].requires_grad_()
    value = loss(logits, labels)
    value.backward()
    gradient = logits.grad.permute(0, 2, 3, 1)
    assert not gradient[labels == 255].any() and gradient[labels != 255].any()
    other = torch.where((labels == 255)[:, None], logits.detach() * -3, logits.detach())
    torch.testing.assert_close(loss(other, labels), value.detach())
    logits.grad = None
    nothing = loss(logits, torch.full_like(labels, 255))
    nothing.backward()
    assert float(nothing) == 0 and not logits.grad.any()


def test_gradients_are_finite_where_the_model_is_certain() -> None:
    _, labels = batch(0, ignored=0)
    for sign in (1, -1):
        logits = (functional.one_hot(labels, 4).permute(0, 3, 1, 2) * 200.0 * sign).requires_grad_()
        JaccardLoss(**BAND)(logits, labels).backward()
        assert torch.isfinite(logits.grad).all()


def test_certain_predictions_have_the_loss_of_their_iou() -> None:
    _, truth = batch(0)
    guess = torch.randint(0, 4, truth.shape, generator=torch.Generator().manual_seed(5))
    known = truth != 255
    ious = [
        ((guess == c) & (truth == c)).sum() / (((guess == c) | (truth == c)) & known).sum()
        for c in range(4)
    ]
    value = JaccardLoss()(functional.one_hot(guess, 4).permute(0, 3, 1, 2) * 200.0, truth)
    assert float(value) == pytest.approx(1 - float(sum(ious)) / 4, rel=1e-5)


def test_one_channel_is_two_classes() -> None:
    logits, labels = batch(0)
    labels = torch.where(labels == 255, labels, labels.clamp(max=1))
    both = torch.cat([logits[:, :1] * 0, logits[:, :1]], 1)
    loss = JaccardLoss(**BAND)
    torch.testing.assert_close(loss(logits[:, :1], labels), loss(both, labels))


def test_in_a_decode_head_of_mmseg_beside_cross_entropy() -> None:
    with DefaultScope.overwrite_default_scope('mmseg'):
        from mmseg.registry import MODELS as SEGMENTORS

        head = SEGMENTORS.build(
            dict(
                type='FCNHead',
                in_channels=4,
                channels=4,
                num_classes=4,
                num_convs=0,
                concat_input=False,
                loss_decode=[
                    dict(type='CrossEntropyLoss', loss_weight=0.25, avg_non_ignore=True),
                    dict(type='JaccardLoss', loss_weight=0.75, **BAND),
                ],
            )
        )
    logits, labels = batch(0)
    losses = head.loss_by_feat(logits, [data_sample(each, each) for each in labels])
    assert sorted(losses) == ['acc_seg', 'loss_ce', 'loss_jaccard']
    torch.testing.assert_close(losses['loss_jaccard'], 0.75 * JaccardLoss(**BAND)(logits, labels))


def test_mistakes_are_named() -> None:
    logits, labels = batch(0)
    for wrong in (dict(band_weight=1.5), dict(dilation_ratio=0)):
        with pytest.raises(ValueError, match='band_weight=.*dilation_ratio='):
            JaccardLoss(**wrong)
    with pytest.raises(ValueError, match='JaccardLoss has ignore_index=255 and the decode head 0'):
        JaccardLoss()(logits, labels, ignore_index=0)
    with pytest.raises(ValueError, match=r'class_weight=\[1, 2\] for 4 classes'):
        JaccardLoss(class_weight=[1, 2])(logits, labels)
    with pytest.raises(ValueError, match='accepts no pixel weights'):
        JaccardLoss()(logits, labels, weight=torch.ones_like(labels))
