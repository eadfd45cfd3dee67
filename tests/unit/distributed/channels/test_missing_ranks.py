"""Errors about missing ranks name them, what is known about them, and the next step."""

from __future__ import annotations

from typing import Dict, List, Optional

import pytest

from mapsage.distributed.channels.main_thread import Activity, Position
from mapsage.distributed.channels.missing_ranks import (
    Missing,
    describe_missing,
    describe_position,
)


@pytest.mark.parametrize(
    'missing, ranks, description, advice',
    [
        (
            None,
            [0],
            'the rendezvous store does not answer',
            'look at the first error in their log.',
        ),
        (
            Missing([1], False, {1: 'rank 1 did not run'}),
            [1],
            'the others have waited for it, rank 1, in vain',
            'Rank 1 did not run. The others have given up: ',
        ),
        (Missing([], False, {}), [], 'every rank came to it', 'Another one has ended'),
        (
            Missing([2, 1, 3], True, {2: 'rank 2 on host a: it ended'}),
            [2, 3],
            'rank(s) [2, 3] did not come to it',
            'Rank 2 on host a: it ended. They died',
        ),
        (Missing([0], False, {}), [0], 'rank(s) [0] did not come to it', 'They are slow'),
    ],
)
def test_an_error_on_rank_1(
    missing: Optional[Missing], ranks: List[int], description: str, advice: str
) -> None:
    texts, named = describe_missing(missing, 1)
    assert named == ranks
    assert description in texts[0] and advice in texts[1]


def test_a_position_without_a_line_says_nothing() -> None:
    texts: Dict[Activity, str] = {
        activity: describe_position(Position(activity, 'engine/runner.py:3 in train'))
        for activity in Activity
    }
    assert describe_position(Position(Activity.RUNS, '')) == ''
    assert texts[Activity.RUNS] == ', and its main thread is at engine/runner.py:3 in train'
    assert 'waits in a collective' in texts[Activity.IN_COLLECTIVE]
