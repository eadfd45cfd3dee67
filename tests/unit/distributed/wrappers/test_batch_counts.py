"""Sums over the virtual ranks of one process, of counts of labels and of predictions."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import pytest
import torch
from torch import nn

from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.distributed.wrappers.batch_counts import BatchCounts, gives_counts, names_of_counters

RANKS = 3


class LabelLoss(nn.Module):
    """Counts its data samples, and 1 for the rank."""

    sum_over_ranks = staticmethod(lambda count: count)

    def count_batch(self, data_samples: Sequence[object]) -> torch.Tensor:
        return torch.tensor([len(data_samples), 1.0])


class PredictionLoss(nn.Module):
    """Sums its predictions."""

    counts_predictions = True
    sum_over_ranks = staticmethod(lambda count: count)

    def forward(self, predictions: torch.Tensor) -> torch.Tensor:
        return self.sum_over_ranks(predictions.sum(0))


def counts_of(*losses: nn.Module) -> BatchCounts:
    return BatchCounts(nn.ModuleList(losses), VirtualRanks(RANKS, 1))


def batches(*lengths: int) -> List[Dict[str, Any]]:
    return [dict(data_samples=[None] * length) for length in lengths]


def predictions() -> List[torch.Tensor]:
    return [torch.full((2, 4), float(rank), requires_grad=True) for rank in range(RANKS)]


def first_pass(counts: BatchCounts, loss: nn.Module) -> None:
    for values in predictions():
        with counts.collecting():
            assert torch.equal(loss(values), values.sum(0))
    counts.sum_collected()


def test_label_counts_are_summed_before_the_first_forward_pass() -> None:
    loss = LabelLoss()
    with counts_of(loss).step(batches(1, 2, 4)):
        local = loss.count_batch([None])
        assert loss.sum_over_ranks(local).tolist() == [7, RANKS]
        assert loss.sum_over_ranks(local.half()).dtype == torch.float16
        with pytest.raises(VirtualRanksError, match=r'shape \(1,\): expected .* \(2,\)'):
            loss.sum_over_ranks(local[:1])


@pytest.mark.parametrize(
    ('batch', 'count', 'message'),
    [
        (dict(inputs=[]), torch.ones(2), 'LabelLoss.count_batch .* no key data_samples'),
        ((1, 2), torch.ones(2), r'the batch \(tuple\) has no key data_samples'),
        (dict(data_samples=[1]), 3, 'LabelLoss.count_batch gives 3, expected a tensor'),
    ],
)
def test_counts_that_cannot_be_summed_are_refused(
    batch: Any, count: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LabelLoss, 'count_batch', lambda self, data_samples: count)
    with pytest.raises(VirtualRanksError, match=message):
        counts_of(LabelLoss()).prepare([batch] * RANKS)


def test_the_second_pass_reads_the_sums_of_the_first() -> None:
    loss = PredictionLoss()
    counts = counts_of(loss)
    assert counts.wants_first_pass
    with counts.step(batches(1, 1, 1)):
        first_pass(counts, loss)
        for values in predictions():
            total = loss(values)
            assert total.tolist() == [6.0] * 4 and not total.requires_grad
            counts.next_virtual_rank()
    # Outside of a training step it returns its argument.
    assert loss(predictions()[1]).tolist() == [2.0] * 4


def test_a_model_that_changes_between_the_passes_is_refused() -> None:
    loss = PredictionLoss()
    counts = counts_of(loss)
    with counts.step(batches(1, 1, 1)):
        first_pass(counts, loss)
        with pytest.raises(VirtualRanksError, match='counted something else .* by up to 2 of 0'):
            loss(predictions()[1])
        with pytest.raises(VirtualRanksError, match='called otherwise in the second pass'):
            loss(predictions()[0])
    with counts.step(batches(1, 1, 1)):
        with counts.collecting():
            loss(predictions()[0])
        with counts.collecting():
            pass
        with pytest.raises(VirtualRanksError, match='have called PredictionLoss with other counts'):
            counts.sum_collected()


def test_a_loss_outside_of_the_model_is_served_once() -> None:
    counts, loss = counts_of(LabelLoss()), LabelLoss()
    for _ in range(2):
        counts.watch(loss)
    with counts.step(batches(1, 1, 1)):
        assert loss.sum_over_ranks(torch.ones(2)).tolist() == [3, 3]
    assert len(counts._label_counters) == 2


def test_wrappers_and_counters_are_known_by_their_attributes() -> None:
    model = nn.Sequential(LabelLoss(), PredictionLoss(), nn.Linear(1, 1))
    assert names_of_counters(model) == ['LabelLoss', 'PredictionLoss']
    assert not gives_counts(model)
    model.counts = counts_of()  # type: ignore[assignment]
    assert gives_counts(model)
    model[1].counts_predictions = False
    assert names_of_counters(model) == ['LabelLoss']
