"""Whatever breaks, wherever: the run ends by name, nothing stays, and the checkpoint is good.

MAPSAGE_FAULTS sets how many faults are tried (20), MAPSAGE_FAULT_SEED tries the one of that seed.
A fault says where it strikes and in which run; tests/fault_runs.py says what is drawn.
"""
from __future__ import annotations

import os
from typing import Dict

import pytest
from fault_runs import KINDS, SAMPLING, SOURCES, Outcome, draw, run_faults
from support import main_leg

pytestmark = main_leg

JOBS = 3  # at a time: most of them wait for a deadline
ALONE = os.environ.get('MAPSAGE_FAULT_SEED')
SEEDS = [int(ALONE)] if ALONE else list(range(int(os.environ.get('MAPSAGE_FAULTS', '20'))))


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory: pytest.TempPathFactory,
             pytestconfig: pytest.Config) -> Dict[int, Outcome]:
    reporter = pytestconfig.pluginmanager.getplugin('terminalreporter')
    tell = reporter.write_line if reporter else print

    def tell_lines(outcome: Outcome) -> None:
        for line in str(outcome).splitlines():
            tell(line)

    ended = run_faults(SEEDS, tmp_path_factory.mktemp('faults'), JOBS, tell_lines)
    return {outcome.fault.seed: outcome for outcome in ended}


@pytest.mark.parametrize('seed', SEEDS)
def test_a_run_with_a_fault_ends_as_it_must(seed: int, outcomes: Dict[int, Outcome]) -> None:
    outcome = outcomes[seed]
    assert not outcome.wrong, f'{outcome}\n{outcome.output[-6000:]}'


def test_the_draw_comes_to_all_kinds_and_places() -> None:
    faults = [draw(seed) for seed in range(200)]
    assert {fault.place for fault in faults} == {'encoder'}.union(*KINDS.values())
    assert {fault.kind for fault in faults} == {'stop', *KINDS}
    assert {fault.source for fault in faults} == set(SOURCES)
    assert {fault.sampling for fault in faults} == set(SAMPLING)
    assert {(fault.ranks, fault.rank) for fault in faults} == {
        (ranks, rank) for ranks in range(2, 6) for rank in range(ranks)}
