"""The computed variance of a reward, compared with the variance over sampled label maps."""

from __future__ import annotations

import pytest
import torch

from mapsage.evaluation import reward_variance


def tile(seed: int, sure: float) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    labels = (
        torch.randint(0, 4, (6, 6), generator=generator)
        .repeat_interleave(8, 0)
        .repeat_interleave(8, 1)
    )
    logits = torch.randn(5, 48, 48, generator=generator)
    logits.scatter_add_(0, labels[None], torch.full((1, 48, 48), sure))
    labels[:5] = 255
    return logits.softmax(0), labels


def sampled(probabilities: torch.Tensor, labels: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the variance of the mean IoU over sampled label maps."""
    labeled = labels != 255
    truth = labels[labeled]
    torch.manual_seed(2)
    # (samples, P)
    maps = torch.multinomial(probabilities[:, labeled].T, samples, replacement=True).T
    ious = []
    for label in truth.unique():
        intersection = ((maps == label) & (truth == label)).sum(1).double()
        ious.append(intersection / ((maps == label) | (truth == label)).sum(1))
    return torch.stack(ious).mean(0).var()


@pytest.mark.parametrize('sure', [0.0, 1.5, 4.0])
def test_it_equals_the_variance_over_sampled_maps(sure: float) -> None:
    probabilities, labels = tile(1, sure)
    predicted = float(reward_variance(probabilities, labels)) ** 0.5
    assert predicted == pytest.approx(float(sampled(probabilities, labels, 3000)) ** 0.5, rel=0.06)
    assert 1e-3 < predicted < 2e-2


def test_it_is_zero_where_nothing_can_vary() -> None:
    probabilities, labels = tile(1, 2.0)
    assert reward_variance(probabilities, torch.full_like(labels, 255)) == 0
    certain = torch.nn.functional.one_hot(labels.clamp(max=4), 5).permute(2, 0, 1).double()
    assert reward_variance(certain, labels) == 0
    # A pixel in doubt has more influence on the IoU of a class with few pixels.
    rare = torch.zeros_like(labels)
    rare[20, 20] = 1
    doubt = torch.nn.functional.one_hot(rare, 5).permute(2, 0, 1).double()
    doubt[:2, 20, 20] = 0.5
    frequent = torch.nn.functional.one_hot(rare, 5).permute(2, 0, 1).double()
    frequent[[0, 2], 0, 0] = 0.5
    assert reward_variance(doubt, rare) > 1000 * reward_variance(frequent, rare) > 0
