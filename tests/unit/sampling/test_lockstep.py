"""The comparison after a round, in one process; tests/distributed/ has several ranks."""
from __future__ import annotations

from typing import Any, Dict, List

import pytest

from mapsage.distributed import Consensus, SerialChannel
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling.lockstep import (
    COUNTS,
    ENDED,
    FAILED,
    OK,
    check_equal_settings,
    compare_round,
    round_fields,
)

ONE, THREE = VirtualRanks(1, 1), VirtualRanks(3, 1)
COUNTED: List[Dict[str, int]] = [dict(valid=4, judged=8, passed=4, not_finite=2, original=8),
                                 dict(valid=0, judged=3, passed=0, not_finite=0, original=3),
                                 dict(valid=7, judged=7, passed=6, not_finite=1, original=5)]


@pytest.mark.parametrize('ranks', [ONE, THREE])
@pytest.mark.parametrize('status', [OK, ENDED])
def test_one_process_finds_its_own_facts(ranks: VirtualRanks, status: int) -> None:
    counts = COUNTED[:ranks.count]
    found: Any = compare_round(Consensus(round_fields(ranks)), ranks, None, counts, step=3,
                               attempt=1, status=status)
    assert found.ended == (status == ENDED)
    for name in COUNTS:
        assert getattr(found, name) == [each[name] for each in counts]
    check_equal_settings(SerialChannel(), 'local_target=4')


def test_one_process_raises_its_own_exception() -> None:
    error = OSError('tile 17 cannot be read')
    with pytest.raises(OSError) as raised:
        compare_round(Consensus(round_fields(ONE)), ONE, error, COUNTED[:1], step=3, attempt=1,
                      status=FAILED)
    assert raised.value is error
