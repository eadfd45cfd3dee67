"""The profiles of the simulated cards: every quirk has its evidence."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support import ROOT

from mapsage.extras.simulator.profiles import DEFAULT, PROFILES, GcuProfile, Wire64

QUIRKS = {
    quirk.name: quirk.metadata
    for quirk in dataclasses.fields(GcuProfile)
    if quirk.name not in ('name', 'software')
}


@pytest.mark.parametrize('name', QUIRKS)
def test_a_quirk_has_a_row_of_the_table_and_evidence(name: str) -> None:
    assert 1 <= QUIRKS[name]['row'] <= 33 and len(QUIRKS[name]['evidence']) > 10


def test_the_64_bit_regimes_of_the_versions() -> None:
    regimes = {
        name: (profile.int64_wraps, profile.int64_arithmetic, profile.wire_64)
        for name, profile in PROFILES.items()
    }
    assert regimes == {
        '2.10': (True, True, Wire64.NARROWED),
        '2.10-int64': (False, False, Wire64.FIRST_HALF),
        '2.11': (True, True, Wire64.REDUCTIONS_REFUSED),
    }
    assert PROFILES[DEFAULT].name == DEFAULT == '2.10'


def test_the_table_of_the_docs_has_every_quirk() -> None:
    text = (ROOT / 'docs' / 'reference' / 'simulator.md').read_text()
    rows = {
        int(line.split(' | ')[0].strip('| ')): line.split(' | ')[2]
        for line in re.findall(r'^\| \d+ \|.*$', text, re.MULTILINE)
    }
    assert sorted(rows) == list(range(1, 34))
    for name, facts in QUIRKS.items():
        assert f'`{name}`' in rows[facts['row']], name
