"""Batches whose items are requested ahead of time, in the order in which the loop takes them."""

from __future__ import annotations

from typing import Any, Iterable, List, Tuple

import pytest
import torch

from mapsage.extras.streaming.source import Features, FeatureSource, Item
from mapsage.extras.streaming.steps import FeatureEpochs, FeatureSteps


class Asked(FeatureSource):
    """Keeps the numbers of the items that were requested."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.requested: List[int] = []

    def request(self, item: Item) -> None:
        self.requested.append(item.number)

    def features(self, item: Item) -> Features:
        raise AssertionError('steps do not fetch features')


def steps_of(
    batches: Iterable[Any], ahead: int, left: int = 10**6
) -> Tuple[FeatureSteps, Asked, List[int]]:
    """Return the steps of a loop that takes ``left`` batches, its source, and the items taken."""
    source, taken = Asked(ahead), []  # type: Tuple[Asked, List[int]]
    steps = FeatureSteps(
        batches,
        lambda batch: [Item(batch, (), torch.empty(0))],
        source,
        lambda items: taken.extend(each.number for each in items),
        lambda: left - len(taken) - 1,
    )
    return steps, source, taken


@pytest.mark.parametrize('ahead', [0, 1, 3, 9])
def test_each_batch_is_requested_once_and_ahead(ahead: int) -> None:
    steps, source, taken = steps_of(range(6), ahead)
    for number, batch in enumerate(steps):
        assert batch == number and taken == list(range(number + 1))
        assert source.requested == list(range(min(6, number + 1 + ahead)))
    assert taken == list(range(6))


@pytest.mark.parametrize('ahead, more', [(0, 0), (1, 3), (3, 3), (4, 6)])
def test_whole_steps_of_three_virtual_ranks_are_requested(ahead: int, more: int) -> None:
    source, taken = Asked(ahead), []  # type: Tuple[Asked, List[List[int]]]

    def three(first: int) -> List[Item]:
        return [Item(first + turn, (), torch.empty(0)) for turn in range(3)]

    steps = FeatureSteps(
        range(0, 15, 3),
        three,
        source,
        lambda items: taken.append([each.number for each in items]),
        lambda: 9,
    )
    assert [next(steps), next(steps)] == [0, 3]
    assert taken == [[0, 1, 2], [3, 4, 5]] and source.requested == list(range(6 + more))


def test_nothing_is_requested_that_the_loop_will_not_take() -> None:
    steps, source, _ = steps_of(range(9), ahead=3, left=5)
    assert [next(steps) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert source.requested == [0, 1, 2, 3, 4]


def test_batches_that_a_resumed_loop_skips_have_no_item() -> None:
    steps, source, taken = steps_of([None, None, 0, 1, 2], ahead=2)
    assert [next(steps), next(steps)] == [None, None] and source.requested == taken == []
    assert list(steps) == [0, 1, 2] == taken


def test_the_loader_is_not_iterated_before_the_first_batch_and_keeps_its_attributes() -> None:
    class Loader(list):
        started = 0
        batch_size = 4

        def __iter__(self) -> Any:
            self.started += 1
            return super().__iter__()

    loader = Loader(range(3))
    steps, _, _ = steps_of(loader, ahead=1)
    assert iter(steps) is steps and loader.started == 0 and steps.batch_size == 4
    with pytest.raises(AttributeError):
        steps.sampler  # noqa: B018
    epochs = FeatureEpochs(loader, lambda batches: steps_of(batches, ahead=1)[0])
    assert len(epochs) == 3 and epochs.batch_size == 4
    assert list(epochs) == list(epochs) == [0, 1, 2] and loader.started == 2
