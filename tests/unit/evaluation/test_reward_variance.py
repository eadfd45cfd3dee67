"""The variance of a reward without a draw against the spread of drawn label maps."""
from __future__ import annotations

import pytest
import torch

from mapsage.evaluation import reward_variance


def tile(seed: int, sure: float) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (6, 6), generator=generator).repeat_interleave(
        8, 0).repeat_interleave(8, 1)
    logits = torch.randn(5, 48, 48, generator=generator)
    logits.scatter_add_(0, labels[None], torch.full((1, 48, 48), sure))
    labels[:5] = 255
    return logits.softmax(0), labels


def sampled(chances: torch.Tensor, labels: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the variance of the mean IoU over drawn label maps."""
    known = labels != 255
    truth = labels[known]
    torch.manual_seed(2)
    maps = torch.multinomial(chances[:, known].T, draws, replacement=True).T  # (draws, P)
    ious = []
    for each in truth.unique():
        both = ((maps == each) & (truth == each)).sum(1).double()
        ious.append(both / ((maps == each) | (truth == each)).sum(1))
    return torch.stack(ious).mean(0).var()


@pytest.mark.parametrize('sure', [0., 1.5, 4.])
def test_it_predicts_the_spread_of_drawn_maps(sure: float) -> None:
    chances, labels = tile(1, sure)
    predicted = float(reward_variance(chances, labels)) ** .5
    assert predicted == pytest.approx(float(sampled(chances, labels, 3000)) ** .5, rel=.06)
    assert 1e-3 < predicted < 2e-2


def test_it_is_zero_where_nothing_can_vary() -> None:
    chances, labels = tile(1, 2.)
    assert reward_variance(chances, torch.full_like(labels, 255)) == 0
    certain = torch.nn.functional.one_hot(labels.clamp(max=4), 5).permute(2, 0, 1).double()
    assert reward_variance(certain, labels) == 0
    # A pixel that is no more certain matters more to a class of few pixels.
    rare = torch.zeros_like(labels)
    rare[20, 20] = 1
    doubt = torch.nn.functional.one_hot(rare, 5).permute(2, 0, 1).double()
    doubt[:2, 20, 20] = .5
    other = torch.nn.functional.one_hot(rare, 5).permute(2, 0, 1).double()
    other[[0, 2], 0, 0] = .5
    assert reward_variance(doubt, rare) > 1000 * reward_variance(other, rare) > 0
