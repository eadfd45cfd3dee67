"""The reward's gradient against enumeration of all label maps, and with and without the filter."""

from __future__ import annotations

import itertools
from typing import Any, Tuple

import pytest
import torch

from mapsage.extras.labels.rewards import PolygonCount
from mapsage.extras.labels.rewards.group_reward import (
    draw,
    label_maps,
    leave_one_out,
    region_logits,
    surrogate,
)

SIX = (2, 3)


def every_map(
    logits: torch.Tensor, valid: torch.Tensor, region: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the classes of the regions of every possible label map, (K, h, w), and its reward."""
    classes = logits.shape[1]
    shape = region_logits(logits, valid, region).shape[2:]
    actions = torch.tensor(list(itertools.product(range(classes), repeat=shape.numel()))).reshape(
        -1, *shape
    )
    maps = label_maps(logits, actions[None], valid, region)[0]
    truth = torch.tensor([[0, 1, 1], [1, 0, 1]]).masked_fill(~valid[0], 255).numpy()
    pieces = PolygonCount()
    rewards = [
        pieces(each.numpy(), truth) + 0.1 * float((each[0, 0] * each[1, 2]) % 3) for each in maps
    ]  # no sum over pixels in either
    return actions, torch.tensor(rewards, dtype=torch.float64)


@pytest.mark.parametrize(
    ('region', 'classes', 'group', 'ignored'),
    [(1, 2, 2, 0), (2, 3, 3, 0), (2, 3, 2, 1), (1, 2, 2, 2)],
)
def test_the_gradient_is_unbiased(region: int, classes: int, group: int, ignored: int) -> None:
    """The mean over all groups of label maps of six pixels is the gradient of the mean reward."""
    generator = torch.Generator().manual_seed(region + classes)
    logits = torch.randn(1, classes, *SIX, generator=generator).double().requires_grad_()
    valid = torch.ones(1, *SIX, dtype=torch.bool)
    valid[0, 1, :ignored] = False
    actions, rewards = every_map(logits.detach(), valid, region)
    assert len(rewards.unique()) > 1

    def chances() -> torch.Tensor:
        steps = region_logits(logits, valid, region).log_softmax(1)[0]
        picked = torch.stack([steps.gather(0, each[None]).sum() for each in actions])
        return picked.exp()

    (-(chances() * rewards).sum()).backward()
    expected, logits.grad = logits.grad.clone(), None
    groups = torch.tensor(list(itertools.product(range(len(actions)), repeat=group)))
    chance = chances().detach()[groups].prod(1)
    assert float(chance.sum()) == pytest.approx(1)
    terms = surrogate(
        logits.expand(len(groups), -1, -1, -1),
        actions[groups],
        leave_one_out(rewards[groups]),
        valid.expand(len(groups), -1, -1),
        region,
    )
    (terms * chance).sum().backward()
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(logits.grad, expected, rtol=1e-4, atol=1e-7)


def test_the_filter_changes_nothing() -> None:
    """Tiles without spread have a gradient of exactly 0; the divisor is that of all tiles."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3, 4, 4, generator=generator).requires_grad_()
    valid = torch.ones(6, 4, 4, dtype=torch.bool)
    actions = draw(region_logits(logits.detach(), valid, 2), 5)
    rewards = torch.rand(6, 5, generator=generator)
    rewards[1], rewards[4] = 0.1, 0.7
    advantages = leave_one_out(rewards)

    def gradient(kept: Any, factor: float) -> torch.Tensor:
        logits.grad = None
        terms = surrogate(logits[kept], actions[kept], advantages[kept], valid[kept], 2)
        (terms.mean() * factor).backward()
        return logits.grad

    whole = gradient(list(range(6)), 1.0)
    assert not whole[[1, 4]].any() and whole[[0, 2, 3, 5]].flatten(1).any(1).all()
    torch.testing.assert_close(gradient([0, 2, 3, 5], 4 / 6), whole)


def test_groups_without_spread_have_exact_zeros() -> None:
    for value in torch.linspace(0, 1, 101).tolist():
        for size in (2, 3, 7, 8):
            assert not leave_one_out(torch.full((1, size), value).double() / 3).any(), (value, size)
    rewards = torch.tensor([[1.0, 2.0, 6.0], [1.0, float('nan'), 3.0], [1.0, float('inf'), 3.0]])
    found = leave_one_out(rewards)
    torch.testing.assert_close(found[0], torch.tensor([-3.0, -1.5, 4.5], dtype=torch.float64))
    assert not found[1:].any()


def test_draws_have_the_chances_of_the_softmax() -> None:
    means = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 3.0]]).T.reshape(1, 3, 1, 2)
    torch.manual_seed(5)
    drawn = draw(means, 20000)
    assert drawn.shape == (1, 20000, 1, 2)
    shares = torch.stack([(drawn == each).double().mean((0, 1)) for each in range(3)])
    torch.testing.assert_close(shares[None], means.double().softmax(1), rtol=0, atol=0.015)


def test_a_region_that_draws_its_likely_class_keeps_its_pixels() -> None:
    logits = torch.zeros(1, 3, 5, 4)
    logits[:, 1] = 1
    logits[0, 2, 0, 0] = 2  # one pixel of the region disagrees
    valid = torch.ones(1, 5, 4, dtype=torch.bool)
    valid[0, 4, 3] = False
    actions = torch.tensor([[[[1, 1], [0, 1], [1, 2]]]])
    assert label_maps(logits, actions, valid, 2)[0, 0].tolist() == [
        [2, 1, 1, 1],
        [1, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 1, 1],
        [1, 1, 2, 255],
    ]


def test_ignored_pixels_have_no_part_in_a_region() -> None:
    logits = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    valid = torch.ones(2, 5, 6, dtype=torch.bool)
    valid[0, :2, :3] = False
    valid[1, 0, 0] = False
    means = region_logits(logits, valid, 3)
    assert means.shape == (2, 3, 2, 2)
    torch.testing.assert_close(means[0, :, 0, 0], logits[0, :, 2, :3].mean(1))
    torch.testing.assert_close(means[1, :, 1, 1], logits[1, :, 3:, 3:].mean((1, 2)))
    assert not region_logits(logits, valid & False, 3).any()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match='2x2 regions were drawn for tiles that have 3x2 now'):
        surrogate(
            torch.zeros(1, 2, 6, 4),
            torch.zeros(1, 2, 2, 2),
            torch.zeros(1, 2),
            torch.ones(1, 6, 4, dtype=torch.bool),
            2,
        )
