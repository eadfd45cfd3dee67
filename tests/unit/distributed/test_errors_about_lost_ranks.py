"""Who is lost by the reports of the ranks; errors name them, what is known of them, and a next step."""

from __future__ import annotations

from typing import Dict, List, Optional

import pytest

from mapsage.distributed.lost_ranks import (
    Activity,
    Finding,
    Position,
    Report,
    describe_missing,
    describe_position,
    find_culprit,
    find_missing,
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
            Finding([1], {1: 'rank 1 did not run'}),
            [1],
            'the others have waited for it, rank 1, in vain',
            'Rank 1 did not run. The others have given up: ',
        ),
        (Finding([], {}), [], 'every rank came to it', 'Another one has ended'),
        (
            Finding([2, 1, 3], {2: 'rank 2 on host a: it ended'}, silent=True),
            [2, 3],
            'rank(s) [2, 3] did not come to it',
            'Rank 2 on host a: it ended. They died',
        ),
        (Finding([0], {}), [0], 'rank(s) [0] did not come to it', 'They are slow'),
    ],
)
def test_an_error_on_rank_1(
    missing: Optional[Finding], ranks: List[int], description: str, advice: str
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


RUNS, WAITS = Activity.RUNS, Activity.IN_COLLECTIVE


@pytest.mark.parametrize(
    'reports, options, ranks, reason',
    [
        # Rank 2 has filed nothing.
        ({0: Report(7), 1: Report(7)}, {}, [2], 'rank 2 on host h does not answer'),
        # Two ranks wait in the third collective; rank 1 runs and has entered two.
        (
            {0: Report(7), 1: Report(4, RUNS, 'tiles.py:8 in read'), 2: Report(7)},
            {},
            [1],
            'rank 1 on host h answers, and its main thread is at tiles.py:8 in read',
        ),
        # Rank 2 is one behind, but inside a broadcast that has ended on the others.
        ({0: Report(7), 1: Report(4), 2: Report(5)}, {}, [1], 'rank 1 on host h answers'),
        # A pause of half the timeout comes before what the ranks have entered.
        ({0: Report(7, paused=9), 1: Report(4), 2: Report(7)}, {}, [0], 'did not run for 9 s'),
        # The rank with the most broken connections counts only if one had broken.
        (
            {rank: Report(7, unconnected=[2] if rank < 2 else [0]) for rank in range(3)},
            dict(has_lost=True),
            [2],
            '2 rank(s) have lost the connection with it',
        ),
        # Every rank has started the collective of a card; one is alone at its line.
        (
            {rank: Report(6, WAITS, 'a:1' if rank == 1 else 'b:2') for rank in range(3)},
            dict(stuck_together=True),
            [1],
            '',
        ),
    ],
)
def test_who_is_missing(
    reports: Dict[int, Report], options: Dict[str, bool], ranks: List[int], reason: str
) -> None:
    finding = find_missing(reports, range(3), {}, lambda rank: f'rank {rank} on host h', **options)
    assert finding.ranks == ranks and finding.silent == (2 not in reports)
    assert reason in finding.reasons.get(ranks[0], '')


@pytest.mark.parametrize(
    'reports, ended, answers, ranks, failed',
    [
        (
            {0: Report(), 2: Report(error='ValueError: x')},
            {1: 'dead'},
            {},
            [],
            (2, 'ValueError: x'),
        ),
        ({0: Report(), 2: Report()}, {1: 'dead'}, {}, [1], None),
        ({0: Report()}, {}, {}, [1, 2], None),
        ({0: Report()}, {}, {1: Report(0, RUNS, 'a'), 2: Report(0, WAITS, 'b')}, [1], None),
        # Rank 2 has failed after the reports were read.
        ({0: Report()}, {}, {2: Report(error='OSError: x')}, [], (2, 'OSError: x')),
        ({rank: Report(paused=5 * (rank == 1)) for rank in range(3)}, {}, {}, [1], None),
        # All wait; rank 2 alone is in another collective.
        (
            {0: Report(0, WAITS, 'a'), 1: Report(0, WAITS, 'a')},
            {},
            {2: Report(0, WAITS, 'b')},
            [2],
            None,
        ),
        ({rank: Report(0, WAITS, 'a') for rank in range(3)}, {}, {}, [], None),
    ],
)
def test_who_broke_a_collective(
    reports: Dict[int, Report],
    ended: Dict[int, str],
    answers: Dict[int, Report],
    ranks: List[int],
    failed: object,
) -> None:
    finding = find_culprit(reports, range(3), lambda _: ended, lambda _: answers)
    assert (finding.ranks, finding.failed) == (ranks, failed)
