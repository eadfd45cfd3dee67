"""Targets, matching and loss of mask queries, against written-out formulas."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch
from mask_models import CLASSES, QUERIES, labels_of, samples_of
from mmengine.logging import MMLogger
from scipy.optimize import linear_sum_assignment
from torch.nn import functional

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers.batch_counts import BatchCounts
from mapsage.extras.mask_transformers import MaskClassLoss
from mapsage.extras.mask_transformers.loss import QueryPrediction
from mapsage.extras.mask_transformers.matching import match_costs, match_hungarian
from mapsage.extras.mask_transformers.targets import build_mask_targets


def bound(**options: Any) -> MaskClassLoss:
    loss = MaskClassLoss(**options)
    loss.bind(CLASSES, CLASSES if options.get('matching') == 'fixed' else QUERIES)
    return loss


def outputs_of(
    images: int, side: int = 16, seed: int = 0, outputs: int = 2, queries: int = QUERIES
) -> List[QueryPrediction]:
    generator = torch.Generator().manual_seed(seed)
    return [
        QueryPrediction(
            torch.randn(images, queries, side, side, generator=generator) * 3,
            torch.randn(images, queries, CLASSES + 1, generator=generator),
        )
        for _ in range(outputs)
    ]


def part_of(predictions: List[QueryPrediction], images: slice) -> List[QueryPrediction]:
    return [QueryPrediction(each.masks[images], each.classes[images]) for each in predictions]


def by_hand(predictions: List[QueryPrediction], labels: torch.Tensor, fixed: bool = False) -> Any:
    """The three terms with masks at full size: logits repeated to pixels, void pixels cut out."""
    bce = dice = entropy = weight = 0.0
    masks = sum(len(set(each[each != 255].tolist())) for each in labels)
    for output in predictions:
        factor = labels.shape[-1] // output.masks.shape[-1]
        for image, truth in enumerate(labels):
            known = truth != 255
            held = sorted(set(truth[known].tolist()))
            if not held:
                continue
            logits = (
                output.masks[image]
                .double()
                .repeat_interleave(factor, 1)
                .repeat_interleave(factor, 2)[:, known]
            )
            wanted = torch.stack([truth[known] == label for label in held]).double()
            pairs = functional.binary_cross_entropy_with_logits(
                logits[:, None].expand(-1, len(held), -1),
                wanted[None].expand(len(logits), -1, -1),
                reduction='none',
            ).mean(2)
            area = factor**2  # dice counts cells
            p = logits.sigmoid()
            overlap = 1 - (2 * p @ wanted.T / area + 1) / (
                p.sum(1, keepdim=True) / area + wanted.sum(1) / area + 1
            )
            shares = output.classes[image].double().softmax(-1)
            cost = 5 * pairs + 5 * overlap - 2 * shares[:, held]
            rows, columns = linear_sum_assignment(cost.numpy())
            if fixed:
                rows, columns = np.array(held), np.arange(len(held))
            bce, dice = bce + pairs[rows, columns].sum(), dice + overlap[rows, columns].sum()
            target = torch.full((len(logits),), CLASSES)
            target[rows] = torch.tensor(held)[columns]
            each = torch.where(target == CLASSES, 0.1, 1.0)
            entropy += (-shares.log()[torch.arange(len(logits)), target] * each).sum()
            weight += each.sum() / len(predictions)
    return 5 * bce / masks, 5 * dice / masks, 2 * entropy / weight


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize('void', [0.0, 0.4])
def test_terms_are_those_of_the_formulas(fixed: bool, void: float) -> None:
    """Blocks of 3 pixels, so that cells of 4 are mixed and partly void."""
    labels = labels_of(3, 48, block=3, void=void)
    labels[1] = torch.where(labels[1] == 2, torch.tensor(0), labels[1])  # class 2 is not there
    predictions = outputs_of(3, 12, queries=CLASSES if fixed else QUERIES)
    found = bound(matching='fixed' if fixed else 'hungarian')(predictions, labels)
    for name, value in zip(
        ('loss_mask', 'loss_dice', 'loss_cls'), by_hand(predictions, labels, fixed)
    ):
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name


def test_void_pixels_change_nothing() -> None:
    """Whatever is predicted where nothing is labeled, loss and gradients stay."""
    labels = labels_of(2, void=0.5, block=4)
    predictions = outputs_of(2, 16)
    void = (labels == 255)[:, ::4, ::4][:, None].expand(-1, QUERIES, -1, -1)
    other = [
        QueryPrediction(
            torch.where(void, torch.full_like(each.masks, 7.0), each.masks), each.classes
        )
        for each in predictions
    ]
    loss = bound()
    one, two = loss(predictions, labels), loss(other, labels)
    assert all(torch.allclose(one[name], two[name], rtol=1e-6) for name in one)
    masks = other[0].masks.requires_grad_()
    sum(loss([QueryPrediction(masks, other[0].classes)], labels).values()).backward()  # type: ignore
    assert masks.grad is not None and not masks.grad[void].any() and masks.grad.any()


def test_an_image_without_labels_is_left_out() -> None:
    labels = labels_of(3)
    labels[1] = 255
    predictions = outputs_of(3)
    loss, rest = bound(), [0, 2]
    whole = loss(predictions, labels)
    alone = loss(
        [QueryPrediction(each.masks[rest], each.classes[rest]) for each in predictions],
        labels[rest],
    )
    assert all(torch.allclose(whole[name], alone[name], rtol=1e-5) for name in whole)


@pytest.mark.parametrize('matching', ['hungarian', 'fixed'])
def test_a_batch_without_labels(matching: str) -> None:
    """It gives a loss of 0, and gradients of 0 to every parameter."""
    predictions = outputs_of(2, queries=CLASSES if matching == 'fixed' else QUERIES)
    leaves = [each.requires_grad_() for output in predictions for each in output]
    total = sum(bound(matching=matching)(predictions, torch.full((2, 64, 64), 255)).values())
    assert isinstance(total, torch.Tensor) and float(total) == 0
    total.backward()
    assert all(each.grad is not None and not each.grad.any() for each in leaves)


@pytest.mark.parametrize('ranks', [3, 5])
def test_ranks_add_up_to_one_process(ranks: int) -> None:
    """Ranks of one image each, with unequal numbers of masks; gradients are their mean."""
    labels = torch.cat(
        [labels_of(1, seed=rank, classes=1 + rank % CLASSES, void=0.2) for rank in range(ranks)]
    )
    labels[1] = 255
    predictions = outputs_of(ranks)
    leaves = [each.requires_grad_() for output in predictions for each in output]
    sum(bound()(predictions, labels).values()).backward()  # type: ignore[union-attr]
    whole = [each.grad.clone() for each in leaves]
    for each in leaves:
        each.grad = None
    loss = bound()
    # Virtual ranks take turns in one process.
    counts = BatchCounts(torch.nn.ModuleList([loss]), VirtualRanks(ranks, 1))
    counts.prepare([dict(data_samples=samples_of([label])) for label in labels])
    for rank in range(ranks):
        part = slice(rank, rank + 1)
        (sum(loss(part_of(predictions, part), labels[part]).values()) / ranks).backward()
    for each, expected in zip(leaves, whole):
        torch.testing.assert_allclose(each.grad, expected, rtol=1e-5, atol=1e-7)


def test_counts_are_those_of_the_labels() -> None:
    labels = labels_of(3, void=0.1)
    labels[2] = 255
    counts = bound().count_batch(samples_of(labels)).tolist()
    assert counts == [sum(len(set(each.flatten().tolist()) - {255}) for each in labels), 2, 1]


def test_matching_is_the_optimum_and_uses_each_query_once() -> None:
    generator = torch.Generator().manual_seed(0)
    costs = torch.randn(3, 40, QUERIES, CLASSES, generator=generator)
    present = torch.rand(40, CLASSES, generator=generator) < 0.6
    queries = match_hungarian(costs, present)
    assert queries.shape == (3, 40, CLASSES) and queries.dtype == torch.int64
    for output in range(3):
        for image in range(40):
            held = present[image]
            assert len(set(queries[output, image].tolist())) == CLASSES
            table = costs[output, image][:, held].numpy()
            rows, columns = linear_sum_assignment(table)
            own = costs[output, image].gather(0, queries[output, image][None])[0][held]
            assert float(own.sum()) == pytest.approx(table[rows, columns].sum(), abs=1e-5)


def test_costs_that_are_no_numbers_name_the_image(caplog: pytest.LogCaptureFixture) -> None:
    labels, predictions = labels_of(2), outputs_of(2, outputs=1)
    predictions[0].masks[1] = float('nan')
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        losses = bound()(predictions, labels, ['roof.png', 'field.png'])
    finally:
        logger.removeHandler(caplog.handler)
    assert 'not finite' in caplog.text and 'field.png' in caplog.text
    assert 'roof.png' not in caplog.text
    assert torch.isnan(losses['loss_mask'])  # NonFiniteLossHook ends the run


def test_half_precision_is_summed_in_float32() -> None:
    labels, predictions = labels_of(2, 256, block=32), outputs_of(2, 64, outputs=1)
    half = [QueryPrediction(each.masks.bfloat16(), each.classes.bfloat16()) for each in predictions]
    rounded = [QueryPrediction(each.masks.float(), each.classes.float()) for each in half]
    exact = bound()(rounded, labels)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        losses = bound()(half, labels)
        targets = build_mask_targets(labels, CLASSES, (64, 64))
        costs = match_costs(rounded[0].masks.flatten(2), rounded[0].classes, targets, (5, 5, 2))
    assert costs.dtype == torch.float32
    assert torch.equal(
        costs, match_costs(rounded[0].masks.flatten(2), rounded[0].classes, targets, (5, 5, 2))
    )
    for name, value in losses.items():
        assert value.dtype == torch.float32
        torch.testing.assert_allclose(value, exact[name])


@pytest.mark.parametrize('shape', [(60, 64), (64, 128), (8, 8)])
def test_labels_of_another_size_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match=r'a whole multiple.*multiple of 16'):
        bound()(outputs_of(1), torch.zeros(1, *shape, dtype=torch.long))


@pytest.mark.parametrize(
    'options, numbers, message',
    [
        (dict(), (5, 4), 'num_queries=4 for num_classes=5.*at least 5'),
        (dict(matching='fixed'), (5, 6), 'Set num_queries=5'),
        (dict(matching='fixed'), (21, 21), 'at most 20'),
    ],
)
def test_numbers_that_do_not_fit(options: Any, numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskClassLoss(**options).bind(*numbers)


@pytest.mark.parametrize('options', [dict(matching='greedy'), dict(dice_weight=-1)])
def test_other_settings_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match='expected'):
        MaskClassLoss(**options)
