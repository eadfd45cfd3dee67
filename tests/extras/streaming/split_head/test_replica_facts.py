"""What the ranks of a head replica agree on, without ranks."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import pytest
import torch
from arriving_items import Item
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed import Facts
from mapsage.distributed.channels.consensus import fact_slots
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.split_head.replica_facts import (
    FIELDS,
    Agreed,
    facts_of,
    fault_of,
    read_agreed,
)
from mapsage.extras.streaming.wire.payload import DTYPES, Layout

sizes = st.integers(0, 9)
layouts = st.builds(
    Layout,
    st.lists(st.tuples(sizes, sizes, sizes, sizes), max_size=8).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
)


def tick(every: List[Dict[str, int]]) -> Facts:
    """Return what all ranks read when each tells its facts."""
    return Facts(FIELDS, {rank: fact_slots(FIELDS, facts) for rank, facts in enumerate(every)})


@given(
    layout=layouts,
    ranks=st.integers(1, 4),
    owner=st.integers(0, 3),
    state=st.sampled_from(list(State)[1:7]),
    part=st.floats(0, 1),
    attempt=st.integers(0, 3),
    failing=st.integers(0, 7),
)
def test_all_ranks_read_what_the_owner_tells(
    layout: Layout, ranks: int, owner: int, state: State, part: float, attempt: int, failing: int
) -> None:
    owner %= ranks
    arrived = layout.nbytes if state == State.READY else int(layout.nbytes * part)
    item = Item(7, attempt, state, layout.nbytes, arrived, layout=layout)
    every: List[Dict[str, int]] = [{} for _ in range(ranks)]
    every[owner] = facts_of(item, owner)
    if failing < ranks:
        every[failing]['state'] = int(State.FAILED)
        state = State.FAILED
    agreed = read_agreed(tick(every))
    assert agreed == Agreed(owner, 7, attempt, state, layout.nbytes, arrived, layout)
    assert failing < ranks or fault_of(agreed, Agreed(None)) is None


def test_silence_two_owners_and_an_unknown_total() -> None:
    assert read_agreed(tick([{}, {}])) == Agreed(None)
    both = read_agreed(tick([facts_of(Item(3), 0), facts_of(Item(3), 1)]))
    assert both.has_many_owners and both.owner == 1
    early = read_agreed(tick([{}, facts_of(Item(3, state=State.NEW), 1)]))
    assert early == Agreed(1, 3, 0, State.NEW) and fault_of(early, Agreed(None)) is None


four = Layout(((1, 1, 2, 2),), torch.uint8, torch.uint8)
half = Agreed(0, 1, 1, State.PARTIAL, 4, 2, four)


@pytest.mark.parametrize(
    'change, words',
    [
        (dict(owner=None), 'no rank of the replica holds an item'),
        (dict(total=None, layout=None), '2 bytes arrived before a header'),
        (
            dict(total=None, layout=None, arrived=0, state=State.READY),
            'before a header, state READY',
        ),
        (dict(arrived=5), '5 bytes arrived of 4'),
        (dict(state=State.READY), 'it is READY and 2 bytes of 4 arrived'),
        (dict(arrived=1), 'attempt 1 had 2 bytes of 4, and then attempt 1 had 1 of 4'),
        (dict(attempt=0, arrived=3), 'and then attempt 0 had 3 of 4'),
        (dict(total=9), 'and then attempt 1 had 2 of 9'),
        (
            dict(layout=Layout(((1, 1, 1, 3),), torch.uint8, torch.uint8)),
            'it has 4 bytes, and they',
        ),
        (dict(layout=Layout(((1, 1, 1, 1),), torch.float32, torch.uint8)), None),
        (dict(), None),
        (dict(arrived=3), None),
        (dict(attempt=2, arrived=0), None),
        (dict(state=State.READY, arrived=4), None),
    ],
)
def test_what_cannot_be_is_told(change: Dict[str, Any], words: Optional[str]) -> None:
    fault = fault_of(half._replace(**change), half)
    assert fault is None if words is None else words in str(fault)


class Torn(Item):
    """An item whose next attempt begins while it is being asked."""

    @property
    def arrived(self) -> int:  # type: ignore[override]
        if not self.attempt:
            self.attempt = 1
            return 4
        return 0

    @arrived.setter
    def arrived(self, value: int) -> None:
        pass


def test_bytes_of_one_attempt_are_not_told_with_another() -> None:
    facts = facts_of(Torn(total=4, layout=four, state=State.NEW), 0)
    assert (facts['attempt'], facts['arrived']) == (1, 0)


@pytest.mark.parametrize(
    'layout, words',
    [
        (
            Layout(((1, 2),), torch.uint8, torch.uint8),
            r'\(1, 2\).*expected at most 8 levels of \(n',
        ),
        (Layout(((1, 1, 1, 1),) * 9, torch.uint8, torch.uint8), 'expected at most 8 levels'),
        (
            Layout(((1, 1, 1, 1),), torch.int16, torch.uint8),
            'torch.int16, expected one of torch.floa',
        ),
    ],
)
def test_a_layout_that_cannot_be_told(layout: Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        facts_of(Item(total=2, layout=layout), 0)
