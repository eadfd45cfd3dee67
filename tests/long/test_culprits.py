"""Launched trainings in which one rank breaks: the launcher's last words name that rank.

Each is a fault of tests/fault_kinds.py in a given run; what must hold then is judged by
tests/fault_runs.py.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List

import pytest
from fault_kinds import Fault
from fault_runs import Outcome, run_faults
from support import main_leg

pytestmark = main_leg
JOBS = 6  # at a time: most of them wait for a deadline


def worker(rank: int, ranks: int, place: str = 'transform', **settings: Any) -> Fault:
    """Return the death of a loader's worker of one rank, where that rank is waited for."""
    kind = 'worker killed' if place in ('transform', 'validation') else 'idle worker killed'
    action = 'SIGKILL' if place == 'transform' else 'kill worker'
    return Fault(0, kind, action, place, rank, ranks=ranks, **dict(dict(workers=1), **settings))


def stop(rank: int, ranks: int, action: str = 'SIGSTOP', **settings: Any) -> Fault:
    kind = 'stopped' if action == 'SIGSTOP' else 'stopped, continued late'
    return Fault(0, kind, action, 'before the step', rank, ranks=ranks, **settings)


LATE = 'SIGSTOP, continued late'
CASES: Dict[str, Fault] = {
    'worker of rank 1, sampling': worker(1, 2, sampling='plain', step=5),
    'worker of rank 0, sampling ahead': worker(0, 3, sampling='prefetch', persistent=True),
    'worker of rank 2 of 3, sampling ahead': worker(2, 3, sampling='prefetch', loop='epochs'),
    'idle worker of rank 1, sampling': worker(
        1, 2, 'after the step', sampling='plain', persistent=True, step=5
    ),
    'idle worker of rank 2 of 3': worker(2, 3, 'before the step', sampling='plain', step=5),
    'worker of rank 1, in validation': worker(
        1, 2, 'validation', sampling='plain', persistent=True
    ),
    'worker of rank 1, features ahead': worker(1, 3, source='Prefetched', persistent=True),
    'worker of rank 0, encoder': worker(0, 3, source='Streamed', encoders=1),
    'stopped rank 0, sampling': stop(0, 2, sampling='plain'),
    'stopped rank 1': stop(1, 3),
    'stopped rank 4 of 5, sampling': stop(4, 5, sampling='plain'),
    'late rank 0, sampling': stop(0, 2, LATE, sampling='plain'),
    'late rank 0': stop(0, 3, LATE),
    'late rank 4 of 5': stop(4, 5, LATE),
    'late rank 2 of 3, sampling ahead': stop(2, 3, LATE, sampling='prefetch', workers=1),
    'rank 0 hangs while it starts': Fault(0, 'never starts', 'hang', 'import', 0, ranks=3),
    'rank 2 is stopped while it starts': Fault(0, 'never starts', 'SIGSTOP', 'import', 2, ranks=3),
    'the only encoder fails': Fault(
        0,
        'encoder ends',
        'exception',
        'encoder',
        2,
        1,
        ranks=3,
        encoders=1,
        source='Streamed',
        fallback=False,
        again=True,
    ),
}


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Dict[int, Outcome]:
    faults: List[Fault] = list(CASES.values())
    for number, fault in enumerate(faults):
        fault.seed = number
    ended = run_faults(
        faults, tmp_path_factory.mktemp('culprits'), JOBS, lambda outcome: None, resumes=False
    )
    return {outcome.fault.seed: outcome for outcome in ended}


@pytest.mark.parametrize('case', CASES)
def test_the_rank_that_was_struck_is_named(case: str, outcomes: Dict[int, Outcome]) -> None:
    outcome = outcomes[list(CASES).index(case)]
    assert not outcome.wrong, f'{outcome}\n{outcome.output[-6000:]}'
    assert outcome.culprits == {CASES[case].rank}
    if outcome.fault.kind in ('worker killed', 'idle worker killed'):
        # A rank that waited may report it before the struck rank itself has.
        rank = CASES[case].rank
        assert re.match(
            rf'error: (rank {rank} failed first:\n|rank\(s\) \[{rank}\] was waited for in vain, '
            rf'rank \d+ reports:\nRankError: rank {rank} failed in [a-z ]+: )'
            rf'LoaderWorkerError: a loader worker of this rank has ended: ',
            outcome.cause,
        ), outcome.cause
