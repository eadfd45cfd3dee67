"""The comparison after a round, in one process; tests/distributed/ has several ranks."""
from __future__ import annotations

from typing import Any

import pytest

from mapsage.distributed import Consensus, SerialChannel
from mapsage.sampling.lockstep import FAILED, FIELDS, OK, check_equal_settings, compare_round

FACTS: Any = dict(step=3, attempt=1, status=OK, valid=4, judged=8, passed=4, not_finite=2,
                  original=8)


def test_one_process_finds_its_own_facts() -> None:
    found = compare_round(Consensus(FIELDS), None, **FACTS)
    assert {field: found.by_rank(field) for field in FIELDS} == {
        field: {0: value} for field, value in FACTS.items()}
    check_equal_settings(SerialChannel(), 'local_target=4')


def test_one_process_raises_its_own_exception() -> None:
    error = OSError('tile 17 cannot be read')
    with pytest.raises(OSError) as raised:
        compare_round(Consensus(FIELDS), error, **{**FACTS, 'status': FAILED})
    assert raised.value is error
