"""Whatever breaks, wherever: the culprit is named, nothing stays, the run resumes to the same bits.

MAPSAGE_FAULTS sets how many seeds are tried, from 0 on (else a sample of kinds is), and
MAPSAGE_FAULT_SEED tries the one of that seed. A fault says where it strikes and in which run;
tests/fault_kinds.py says what is drawn.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Dict, List

import pytest
from fault_kinds import KINDS, MAPPING, SAMPLING, SOURCES, draw
from fault_runs import Outcome, run_faults
from support import main_leg

JOBS = 3  # at a time: most of them wait for a deadline
# One of each of these kinds. The others meet them in a long run; tests/long/test_culprits.py has
# those that are stopped.
SAMPLE = [
    'killed',
    'aborted',
    'sys.exit(0)',
    'ends at import',
    'worker stopped',
    'broken sample',
    'batch shape',
    'backward',
    'metric',
    'save',
    'NaN loss',
    'changed weight',
    'hang in C',
    'closed connections',
    'no descriptors',
    'full disk',
    'slow rank',
    'asked to leave',
    'encoder ends',
    'validation raises',
    'shared memory refused',
    'flipped bit',
    'hostile values',
    'scene cut',
]


def seeds() -> List[int]:
    if 'MAPSAGE_FAULT_SEED' in os.environ:
        return [int(os.environ['MAPSAGE_FAULT_SEED'])]
    if 'MAPSAGE_FAULTS' in os.environ:
        return list(range(int(os.environ['MAPSAGE_FAULTS'])))
    return [list(KINDS).index(kind) for kind in SAMPLE]


# The first test waits for all of them.
pytestmark = [main_leg, pytest.mark.timeout(360 + 30 * len(seeds()))]


@pytest.fixture(scope='module')
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Dict[int, Outcome]:
    reporter = pytestconfig.pluginmanager.getplugin('terminalreporter')
    tell = reporter.write_line if reporter else print

    def tell_lines(outcome: Outcome) -> None:
        for line in str(outcome).splitlines():
            tell(line)

    ended = run_faults(
        [draw(seed) for seed in seeds()], tmp_path_factory.mktemp('faults'), JOBS, tell_lines
    )
    return {outcome.fault.seed: outcome for outcome in ended}


@pytest.mark.parametrize('seed', seeds())
def test_a_run_with_a_fault_ends_as_it_must(seed: int, outcomes: Dict[int, Outcome]) -> None:
    outcome = outcomes[seed]
    assert not outcome.wrong, f'{outcome}\n{outcome.output[-6000:]}'


@pytest.mark.parametrize('first', [0, 17, 1000])
def test_300_seeds_in_a_row_have_each_kind_five_times(first: int) -> None:
    faults = [draw(seed) for seed in range(first, first + 300)]
    assert len(KINDS) >= 58
    assert min(Counter(fault.kind for fault in faults).values()) >= 5
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.action for fault in faults} == {
        action for kind in KINDS.values() for action in kind.actions
    }
    assert {fault.source for fault in faults} == set(SOURCES)
    assert {fault.sampling for fault in faults} == set(SAMPLING)
    assert {(fault.ranks, fault.rank) for fault in faults} == {
        (ranks, rank) for ranks in range(1, 6) for rank in range(ranks)
    }


def test_a_fault_strikes_a_rank_of_its_role() -> None:
    for fault in map(draw, range(400)):
        kind = KINDS[fault.kind]
        assert fault.action in kind.actions and fault.place in kind.places
        assert fault.ranks > 1 or kind.when == MAPPING
        assert (fault.rank >= fault.heads) == (kind.role == 'encoder')
        assert kind.role != 'writer' or fault.rank == 0
        assert kind.workers in (None, fault.workers)
