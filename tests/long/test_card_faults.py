"""Trainings over simulated cards in which a rank breaks: eccl says nothing, and the rank is named.

Survivors hang in native code until eccl's watchdog would end them by SIGABRT. ``tests/fault_runs.py
--cards`` runs all of the list and compares the weights of the resumed runs, too.
"""

from __future__ import annotations

from typing import Dict, List

import pytest
from fault_kinds import CARD_FAULTS, Fault
from fault_runs import Outcome, run_faults
from support import no_simulated_cards

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

# At a time: most of them wait for a deadline.
JOBS = 5


def sample() -> List[Fault]:
    """Return the first fault of each kind that waits for a deadline or for the launcher."""
    kinds = ['killed', 'stopped', 'hang in C', 'alone in a collective', 'slow rank']
    return [next(fault for fault in CARD_FAULTS if fault.kind == kind) for kind in kinds]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Dict[int, Outcome]:
    ended = run_faults(
        sample(), tmp_path_factory.mktemp('faults'), JOBS, lambda outcome: None, resumes=False
    )
    return {outcome.fault.seed: outcome for outcome in ended}


@pytest.mark.parametrize('fault', sample(), ids=lambda fault: fault.kind)
def test_the_rank_is_named_before_the_watchdog_aborts(
    fault: Fault, outcomes: Dict[int, Outcome]
) -> None:
    outcome = outcomes[fault.seed]
    assert not outcome.wrong, f'{outcome}\n{outcome.output[-6000:]}'
    assert 'Watchdog caught' not in outcome.output
    assert outcome.culprits == (set() if fault.kind == 'slow rank' else {1}), outcome
    assert outcome.checkpoint
