"""The centerline Dice loss against SciPy's morphology, and what it is for: gaps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from scipy import ndimage

from mapsage.models.losses import CenterlineDiceLoss
from mapsage.models.losses.centerline_dice import soft_centerline

_CROSS = ndimage.generate_binary_structure(2, 1)


def _skeleton_by_scipy(mask: np.ndarray, iterations: int) -> np.ndarray:
    def opened(values: np.ndarray) -> np.ndarray:
        eroded = ndimage.grey_erosion(values, footprint=_CROSS, mode='nearest')
        return ndimage.grey_dilation(eroded, size=(3, 3), mode='nearest')

    skeleton = np.maximum(mask - opened(mask), 0)
    for _ in range(iterations):
        mask = ndimage.grey_erosion(mask, footprint=_CROSS, mode='nearest')
        thinner = np.maximum(mask - opened(mask), 0)
        skeleton = skeleton + np.maximum(thinner - skeleton * thinner, 0)
    return skeleton


def _roads(side: int = 24) -> torch.Tensor:
    labels = torch.zeros(2, side, side, dtype=torch.long)
    labels[0, 8:12] = 1
    labels[1, :, 5:8] = 1
    return labels


def _logits(labels: torch.Tensor, certainty: float = 6.0) -> torch.Tensor:
    truth = torch.nn.functional.one_hot(labels.clamp(max=1), 2).permute(0, 3, 1, 2).float()
    return certainty * truth


def test_the_soft_centerline_is_scipys() -> None:
    mask = torch.rand(2, 3, 15, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    skeleton = soft_centerline(mask, 4)
    for image in range(2):
        for channel in range(3):
            np.testing.assert_allclose(
                skeleton[image, channel].numpy(),
                _skeleton_by_scipy(mask[image, channel].numpy(), 4),
                atol=1e-12,
            )


def test_the_value_is_that_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = _roads()
    labels[0, :3, :3] = 255
    logits = torch.randn(2, 2, 24, 24, generator=generator)
    loss = MODELS.build(dict(type='CenterlineDiceLoss', classes=[1], iterations=3, loss_weight=0.5))
    valid = (labels != 255).numpy()
    chances = logits.double().softmax(1)[:, 1].numpy() * valid
    truth = (labels == 1).double().numpy()
    lines = [
        np.stack([_skeleton_by_scipy(image, 3) for image in masks]) for masks in (chances, truth)
    ]
    precision = ((lines[0] * truth).sum() + 1) / (lines[0].sum() + 1)
    sensitivity = ((lines[1] * chances).sum() + 1) / (lines[1].sum() + 1)
    expected = 0.5 * (1 - 2 * precision * sensitivity / (precision + sensitivity))
    assert float(loss(logits, labels)) == pytest.approx(expected, rel=1e-4)


def test_a_gap_costs_more_than_a_thinner_road() -> None:
    labels = _roads()
    gap, thin = labels.clone(), labels.clone()
    gap[0, 8:12, 10:16] = 0
    thin[0, 8] = 0
    assert int((gap != labels).sum()) == int((thin != labels).sum())
    loss = CenterlineDiceLoss(classes=[1])
    whole, broken, thinner = (
        float(loss(_logits(road, 20), labels)) for road in (labels, gap, thin)
    )
    assert whole < 1e-3 and broken > 0.08 and thinner < broken / 4


def test_the_gradient_fills_a_gap() -> None:
    labels = _roads()
    gap = labels.clone()
    gap[0, 8:12, 10:14] = 0
    logits = _logits(gap, 2.0).requires_grad_()
    CenterlineDiceLoss(classes=[1])(logits, labels).backward()
    assert logits.grad is not None
    assert float(logits.grad[0, 1, 9:11, 10:14].mean()) < 0


@pytest.mark.parametrize('label', [0, 255])
def test_a_batch_without_a_line_costs_nothing(label: int) -> None:
    logits = torch.randn(1, 2, 9, 9, requires_grad=True)
    loss = CenterlineDiceLoss(classes=[1])(logits, torch.full((1, 9, 9), label))
    loss.backward()
    assert float(loss) == 0 and not logits.grad.any()


@pytest.mark.parametrize(
    'arguments, message', [(dict(iterations=0), 'iterations=0'), (dict(smooth=0), 'smooth=0')]
)
def test_arguments_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CenterlineDiceLoss(**arguments)


def test_a_class_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r'classes=\[2\] and the logits 2 classes'):
        CenterlineDiceLoss(classes=[2])(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4).long())
