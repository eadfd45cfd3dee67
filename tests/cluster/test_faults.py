"""Faults of elastic jobs on machines in network namespaces; docs/how-to/clusters.md has a table.

CI plays the core. ``MAPSAGE_CLUSTER_FAULTS=all`` plays every scenario, or a list of names
with commas between them.
"""

from __future__ import annotations

import os
from typing import Any, Dict

import fault_scenarios  # noqa: F401  (registers the scenarios)
import pytest
from faults import SCENARIOS, Outcome, play_all
from machines import why_not
from support import main_leg
from warm_python import warm_python

ASKED = os.environ.get('MAPSAGE_CLUSTER_FAULTS', '')
NAMES = (
    list(SCENARIOS)
    if ASKED == 'all'
    else ASKED.split(',')
    if ASKED
    else [name for name, each in SCENARIOS.items() if each.core]
)
NEEDS = [
    program
    for program, needed in (
        ('nft', any('nftables' in SCENARIOS[name].fault for name in NAMES)),
        ('faketime', 'clock_ahead' in NAMES),
    )
    if needed
]

pytestmark = [main_leg, pytest.mark.skipif(bool(why_not(*NEEDS)), reason=why_not(*NEEDS))]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory) -> Dict[str, Any]:
    warm_python()  # before there are threads
    return play_all(NAMES, tmp_path_factory.mktemp('faults'))


@pytest.mark.parametrize('name', NAMES)
def test_fault(name: str, outcomes: Dict[str, Any]) -> None:
    if isinstance(outcomes[name], Exception):
        raise outcomes[name]
    assert isinstance(outcomes[name], Outcome)
    print(outcomes[name].row(SCENARIOS[name].fault))  # pytest -rP shows it
