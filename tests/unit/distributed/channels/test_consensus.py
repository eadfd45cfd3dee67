"""The arithmetic of agreement, without processes, against plain Python."""

from __future__ import annotations

from typing import Dict, List, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed import Consensus, DisagreementError, Facts
from mapsage.distributed.channels.consensus import fact_slots

FIELDS = ('one', 'two')
LIMIT = 2**63 - 1
VALUES = st.one_of(
    st.none(),
    st.integers(-2, 2),
    st.integers(-LIMIT, LIMIT),
    st.sampled_from([LIMIT, -LIMIT]),
    st.booleans(),
)
WORLDS = st.lists(st.fixed_dictionaries(dict.fromkeys(FIELDS, VALUES)), min_size=1, max_size=8)


def gathered(world: List[Dict[str, Optional[int]]]) -> Facts:
    """Return what every rank reads once the numbers of all are gathered."""
    slots = [fact_slots(FIELDS, {k: v for k, v in rank.items() if v is not None}) for rank in world]
    assert all(-(2**63) <= number < 2**63 for numbers in slots for number in numbers)
    assert {len(numbers) for numbers in slots} == {len(FIELDS)}
    return Facts(FIELDS, dict(enumerate(slots)))


@given(WORLDS)
def test_answers_are_those_of_plain_python(world: List[Dict[str, Optional[int]]]) -> None:
    facts = gathered(world)
    for field in FIELDS:
        values = [rank[field] for rank in world if rank[field] is not None]
        assert facts.complete(field) == (len(values) == len(world))
        assert facts.sum(field) == sum(values)
        assert facts.by_rank(field) == {
            number: rank[field] for number, rank in enumerate(world) if rank[field] is not None
        }
        if not values:
            assert [
                getattr(facts, name)(field) for name in ('max', 'min', 'any', 'all', 'agree')
            ] == [None] * 5
            continue
        assert facts.max(field) == max(values)
        assert facts.min(field) == min(values)
        assert facts.any(field) == any(values)
        assert facts.all(field) == all(values)
        assert facts.agree(field) == (len(set(values)) == 1)


@given(WORLDS, st.randoms(use_true_random=False))
def test_the_order_of_ranks_changes_nothing(world: list, random: object) -> None:
    shuffled = list(world)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for field in FIELDS:
        for name in ('max', 'min', 'sum', 'any', 'all', 'agree', 'complete'):
            assert getattr(gathered(world), name)(field) == getattr(gathered(shuffled), name)(field)


@pytest.mark.parametrize('value', [2**63, -(2**63), 2**64, -(2**63) - 1])
def test_a_number_that_cannot_travel_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf'fact one={value} is outside'):
        fact_slots(FIELDS, {'one': value})


@pytest.mark.parametrize('value', [1.0, '1', [1]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f'is a {type(value).__name__}, expected int or bool'):
        fact_slots(FIELDS, {'one': value})  # type: ignore[dict-item]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    message = r"unknown field 'tow': expected one, two. Did you mean 'two'\?"
    with pytest.raises(ValueError, match=message):
        fact_slots(FIELDS, {'tow': 1})
    with pytest.raises(ValueError, match=message):
        gathered([{'one': 1, 'two': 2}]).max('tow')
    with pytest.raises(ValueError, match=message):
        Consensus(FIELDS, must_agree=['tow'])


@pytest.mark.parametrize('fields', [(), 'step', ('step', 'step')])
def test_fields_must_be_different_names(fields: object) -> None:
    with pytest.raises(ValueError, match='expected one or more different names'):
        Consensus(fields)  # type: ignore[arg-type]


def test_one_process_needs_no_group() -> None:
    consensus = Consensus(FIELDS, must_agree=['one'])
    facts = consensus.tick(one=-3)
    assert (facts.max('one'), facts.min('one'), facts.complete('one')) == (-3, -3, True)
    assert facts.max('two') is None and not facts.complete('two')
    assert facts.by_rank('one') == {0: -3} and facts.by_rank('two') == {}


def test_disagreement_names_ranks_and_values() -> None:
    error = DisagreementError('step', {0: 10, 1: 11, 3: 10})
    assert "ranks disagree on 'step': 10 on rank(s) [0, 3], 11 on rank(s) [1]." in str(error)
    assert error.values == {0: 10, 1: 11, 3: 10}
