"""Scorers, and what users may pass in their place."""

from __future__ import annotations

import pickle
from typing import Any, Sequence

import pytest

from mapsage.sampling import Scorer, as_scorer


class OfSamples(Scorer):
    def score(self, sample: Any) -> float:
        return 2.0 * sample


class OfBatches(Scorer):
    uses_model = True

    def __call__(self, samples: Sequence[Any]) -> Any:
        return [sample + len(samples) for sample in samples]


class Users:
    """A user's object with some of a Scorer's members."""

    history = dict(recheck=3)
    scores_per_sample = 4

    def score(self, sample: Any) -> float:
        return 3.0 * sample

    def begin_batch(self, slot: int, first: bool) -> None:
        self.begun = slot, first

    def describe(self) -> str:
        return 'users'


def double(samples: Sequence[Any]) -> Any:
    return [2 * sample for sample in samples]


def test_a_scorer_scores_in_workers_if_it_has_score() -> None:
    assert OfSamples().scores_in_workers and not OfBatches().scores_in_workers
    assert OfSamples()([1, 2]) == [2.0, 4.0]
    assert as_scorer(OfBatches()).uses_model and not as_scorer(OfBatches()).follows_step
    with pytest.raises(NotImplementedError, match='Scorer overrides neither'):
        Scorer()([1])


def test_a_users_object_has_its_members_and_defaults_for_the_others() -> None:
    users = Users()
    scorer = pickle.loads(pickle.dumps(as_scorer(users)))
    assert scorer.scores_in_workers and scorer([1, 2]) == [3.0, 6.0] and scorer.score(5) == 15
    assert scorer.name == 'Users' and scorer.describe() == 'users'
    assert scorer.history == dict(recheck=3) and scorer.scores_per_sample == 4
    assert not (scorer.uses_model or scorer.weighs_loss or scorer.follows_step)
    as_scorer(users).begin_batch(2, True)
    as_scorer(users).bind(None, list)
    assert users.begun == (2, True)


def test_a_function_gets_the_samples_of_a_batch() -> None:
    scorer = as_scorer(double)
    assert scorer([1, 2]) == [2, 4] and not scorer.scores_in_workers
    assert scorer.name == 'double' and scorer.describe() == '' and scorer.history is None
    assert as_scorer(scorer) is scorer


def test_what_is_no_scorer_is_refused() -> None:
    with pytest.raises(ValueError, match='score=3, expected a config'):
        as_scorer(3)
