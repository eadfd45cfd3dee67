"""Losses for unequal classes against written-out formulas, and over several ranks."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from label_pairs import data_sample
from mmengine.registry import MODELS, DefaultScope
from torch.nn import functional

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers.batch_counts import BatchCounts
from mapsage.models import SegDiceLoss, SegFocalLoss

KINDS = {
    'SegDiceLoss': {},
    'SegFocalLoss': dict(gamma=2.0),
}
WEIGHTS = [0.2, 1.0, 3.0, 0.5]


def batch(
    seed: int, images: int = 2, shape: Tuple[int, int] = (9, 7), ignored: float = 0.3
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return logits of 4 classes and labels; class 3 is in no image of an odd seed."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3 if seed % 2 else 4, (images, *shape), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return torch.randn(images, 4, *shape, generator=generator), labels


def by_hand(kind: str, logits: torch.Tensor, labels: torch.Tensor, weights: Any) -> float:
    weights = weights or [1.0] * logits.shape[1]
    total, count = 0.0, 0.0
    for image, truth in zip(logits.double().softmax(1).numpy(), labels.numpy()):
        known = truth != 255
        if kind == 'SegFocalLoss':
            for pixel in np.argwhere(known):
                label = truth[tuple(pixel)]
                p = image[(label, *pixel)]
                total -= weights[label] * (1 - p) ** 2 * np.log(p)
                count += weights[label]
            continue
        for label in np.unique(truth[known]):
            p, t = image[label][known], truth[known] == label
            hits, false, missed = p[t].sum(), p[~t].sum(), (1 - p[t]).sum()
            value = 1 - 2 * hits / (2 * hits + false + missed)
            total, count = total + weights[label] * value, count + weights[label]
    return total / count


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('weights', [None, WEIGHTS])
def test_values_are_those_of_the_formulas(kind: str, weights: Any) -> None:
    loss = MODELS.build(dict(type=kind, class_weight=weights, loss_weight=0.4, **KINDS[kind]))
    for seed in (0, 1):
        logits, labels = batch(seed)
        assert float(loss(logits, labels)) == pytest.approx(
            0.4 * by_hand(kind, logits, labels, weights), rel=1e-5
        )
        half = loss(logits.half(), labels)  # under autocast
        assert half.dtype == torch.float32 and float(half) == pytest.approx(
            float(loss(logits, labels)), rel=1e-2
        )


@pytest.mark.parametrize('kind', KINDS)
def test_ignored_pixels_change_nothing(kind: str) -> None:
    loss = MODELS.build(dict(type=kind, **KINDS[kind]))
    _, labels = batch(0)
    known = labels.clamp(max=3)
    perfect = functional.one_hot(known, 4).permute(0, 3, 1, 2) * 100.0
    assert float(loss(perfect, labels)) == pytest.approx(0, abs=1e-6)
    logits = batch(0)[0].requires_grad_()
    value = loss(logits, labels)
    value.backward()
    assert not logits.grad.permute(0, 2, 3, 1)[labels == 255].any()
    assert logits.grad.permute(0, 2, 3, 1)[labels != 255].any()
    other = torch.where((labels == 255)[:, None], logits.detach() * -3, logits.detach())
    torch.testing.assert_close(loss(other, labels), value.detach())
    logits.grad = None
    loss(logits, torch.full_like(labels, 255)).backward()  # nothing is labeled
    assert not logits.grad.any()


@pytest.mark.parametrize('kind', KINDS)
def test_gradients_are_finite_where_the_model_is_certain(kind: str) -> None:
    loss = MODELS.build(dict(type=kind, **KINDS[kind]))
    _, labels = batch(0, ignored=0)
    for sign in (1, -1):
        logits = (functional.one_hot(labels, 4).permute(0, 3, 1, 2) * 200.0 * sign).requires_grad_()
        loss(logits, labels).backward()
        assert torch.isfinite(logits.grad).all()


def test_focal_without_gamma_is_cross_entropy() -> None:
    logits, labels = batch(2)
    for weights in (None, WEIGHTS):
        expected = functional.cross_entropy(
            logits, labels, None if weights is None else torch.tensor(weights), ignore_index=255
        )
        torch.testing.assert_close(SegFocalLoss(0, class_weight=weights)(logits, labels), expected)


@pytest.mark.parametrize('kind', KINDS)
def test_one_channel_is_two_classes(kind: str) -> None:
    loss = MODELS.build(dict(type=kind, **KINDS[kind]))
    logits, labels = batch(0)
    labels = torch.where(labels == 255, labels, labels.clamp(max=1))
    both = torch.cat([logits[:, :1] * 0, logits[:, :1]], 1)
    torch.testing.assert_close(loss(logits[:, :1], labels), loss(both, labels))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('weights', [None, WEIGHTS])
def test_mean_gradient_of_ranks_is_that_of_the_whole_batch(kind: str, weights: Any) -> None:
    """Ranks with other numbers of images, classes and ignored pixels; one has no label at all."""
    loss = MODELS.build(dict(type=kind, class_weight=weights, **KINDS[kind]))
    parts = [
        batch(0, 1, ignored=0.8),
        batch(1, 3),
        batch(2, 2, ignored=0),
        batch(3, 1, ignored=1.0),
    ]
    whole = torch.cat([logits for logits, _ in parts]).requires_grad_()
    value = loss(whole, torch.cat([labels for _, labels in parts]))
    value.backward()
    counts = BatchCounts(loss, VirtualRanks(len(parts), 1))
    samples: List[Dict[str, Any]] = [
        dict(data_samples=[data_sample(each, each) for each in labels]) for _, labels in parts
    ]
    counts.prepare(samples)
    total, gradients = 0.0, []
    for logits, labels in parts:
        logits.requires_grad_()
        mine = loss(logits, labels) / len(parts)
        mine.backward()
        total, gradients = total + float(mine.detach()), [*gradients, logits.grad]
    assert total == pytest.approx(float(value), rel=1e-5)
    torch.testing.assert_close(torch.cat(gradients), whole.grad)


def test_in_a_decode_head_of_mmseg() -> None:
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
                loss_decode=[dict(type=kind) for kind in KINDS],
            )
        )
    logits, labels = batch(0)
    losses = head.loss_by_feat(logits, [data_sample(each, each) for each in labels])
    assert sorted(losses) == ['acc_seg', 'loss_dice', 'loss_focal']


def test_mistakes_are_named() -> None:
    logits, labels = batch(0)
    with pytest.raises(ValueError, match='SegDiceLoss has ignore_index=255 and the decode head 0'):
        SegDiceLoss()(logits, labels, ignore_index=0)
    with pytest.raises(ValueError, match=r'class_weight=\[1, 2\] for 4 classes'):
        SegDiceLoss(class_weight=[1, 2])(logits, labels)
    with pytest.raises(ValueError, match='accepts no pixel weights'):
        SegFocalLoss()(logits, labels, weight=torch.ones_like(labels))
    with pytest.raises(ValueError, match='class_weight=.*not all 0'):
        SegFocalLoss(class_weight=[0, 0])
    with pytest.raises(ValueError, match='gamma=-1'):
        SegFocalLoss(gamma=-1)
