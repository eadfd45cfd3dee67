"""Each batch has so many samples of either kind, on any number of ranks the same ones."""

from __future__ import annotations

from itertools import islice
from typing import Any, List

import pytest

from mapsage.extras.labels.unlabeled import LabeledUnlabeledSampler
from mapsage.extras.labels.unlabeled import sampler as module


class Sized:
    sizes = (5, 13)


def drawn(
    monkeypatch: Any,
    rank: int,
    ranks: int,
    labeled: int,
    unlabeled: int,
    count: int,
    **settings: Any,
) -> List[List[int]]:
    monkeypatch.setattr(module, 'get_dist_info', lambda: (rank, ranks))
    stream = iter(LabeledUnlabeledSampler(Sized(), labeled, unlabeled, seed=3, **settings))
    size = labeled + unlabeled
    return [list(islice(stream, size)) for _ in range(count)]


def test_three_ranks_show_what_one_shows(monkeypatch: Any) -> None:
    one = drawn(monkeypatch, 0, 1, 3, 6, 8)
    three = [drawn(monkeypatch, rank, 3, 1, 2, 8) for rank in range(3)]
    for step, batch in enumerate(one):
        together = sorted(index for each in three for index in each[step])
        assert together == sorted(batch)
        for each in (batch[:3], *[each[step][:1] for each in three]):
            assert all(index < 5 for index in each)
        for each in (batch[3:], *[each[step][1:] for each in three]):
            assert all(5 <= index < 18 for index in each)


def test_each_kind_is_shown_once_before_it_comes_again(monkeypatch: Any) -> None:
    flat = [index for batch in drawn(monkeypatch, 0, 1, 2, 3, 20) for index in batch]
    for kind in ([each for each in flat if each < 5], [each for each in flat if each >= 5]):
        size = len(set(kind))
        turns = [kind[at : at + size] for at in range(0, len(kind) - size + 1, size)]
        assert all(len(set(turn)) == size for turn in turns) and turns[0] != turns[1]


def test_an_epoch_shows_the_kind_that_lasts_longer_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, 'get_dist_info', lambda: (1, 2))
    sampler = LabeledUnlabeledSampler(Sized(), 1, 2, infinite=False, seed=0)
    # 13 unlabeled ones, four of them in a step of both ranks; 5 labeled ones, two in a step
    assert sampler.batches == 4 and len(sampler) == 12
    first = list(sampler)
    assert len(first) == 12
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert LabeledUnlabeledSampler(Sized(), 1, 9, seed=0).batches == 3  # the labeled ones last


@pytest.mark.parametrize('labeled, unlabeled', [(0, 2), (2, 0), (1.5, 2), (True, 2)])
def test_a_batch_without_a_kind_is_refused(labeled: Any, unlabeled: Any) -> None:
    with pytest.raises(ValueError, match='expected a number of samples in each batch, at least 1'):
        LabeledUnlabeledSampler(Sized(), labeled, unlabeled)


def test_another_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match='list, expected a SemiSupervisedDataset'):
        LabeledUnlabeledSampler([1, 2], 1, 1)
