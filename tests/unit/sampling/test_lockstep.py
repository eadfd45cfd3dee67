"""The comparison after a round, in one process; tests/distributed/ has several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Sequence

import pytest

from mapsage.distributed import Consensus, SerialChannel
from mapsage.distributed.channels.consensus import Facts, fact_slots
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
COUNTED: List[Dict[str, int]] = [
    dict(valid=4, judged=8, passed=4, not_finite=2, original=8),
    dict(valid=0, judged=3, passed=0, not_finite=0, original=3),
    dict(valid=7, judged=7, passed=6, not_finite=1, original=5),
]


@pytest.mark.parametrize('ranks', [ONE, THREE])
@pytest.mark.parametrize('status', [OK, ENDED])
def test_one_process_finds_its_own_facts(ranks: VirtualRanks, status: int) -> None:
    counts = COUNTED[: ranks.count]
    found: Any = compare_round(
        Consensus(round_fields(ranks)), ranks, None, counts, step=3, attempt=1, status=status
    )
    assert found.ended == (status == ENDED)
    for name in COUNTS:
        assert getattr(found, name) == [each[name] for each in counts]
    check_equal_settings(SerialChannel(), 'local_target=4')


def test_one_process_raises_its_own_exception() -> None:
    error = OSError('tile 17 cannot be read')
    with pytest.raises(OSError) as raised:
        compare_round(
            Consensus(round_fields(ONE)), ONE, error, COUNTED[:1], step=3, attempt=1, status=FAILED
        )
    assert raised.value is error


class CountedSlots(List[int]):
    """Numbers of a rank, which count how often one is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        CountedSlots.reads += 1
        return super().__getitem__(place)


class ManyRanks:
    """What a Consensus over many processes gives to each of them."""

    def __init__(self, fields: Sequence[str], ranks: VirtualRanks) -> None:
        self.channel = SimpleNamespace(ranks=range(ranks.processes))
        self.facts = Facts(
            fields,
            {
                process: CountedSlots(
                    fact_slots(
                        fields,
                        dict(
                            dict(step=3, attempt=0, status=OK),
                            **{
                                f'{name} {turn}': 1000 * place + number
                                for turn, number in enumerate(block)
                                for place, name in enumerate(COUNTS)
                            },
                        ),
                    )
                )
                for process, block in enumerate(ranks.blocks)
            },
        )

    def tick(self, **facts: int) -> Facts:
        return self.facts


@pytest.mark.parametrize('per_process', [1, 3])
def test_the_reads_of_a_round_grow_as_the_number_of_processes(per_process: int) -> None:
    reads = []
    for processes in (64, 128, 256):
        # One virtual rank more than in even blocks: the first process has a longer block.
        ranks = VirtualRanks(processes * per_process + (per_process > 1), processes)
        consensus: Any = ManyRanks(round_fields(ranks), ranks)
        CountedSlots.reads = 0
        compared = compare_round(consensus, ranks, None, COUNTED[:1], step=3, attempt=0, status=OK)
        reads.append(CountedSlots.reads)
        assert compared.valid == list(range(ranks.count))
        assert compared.original == [4000 + number for number in range(ranks.count)]
    assert all(more <= 2 * fewer for fewer, more in zip(reads, reads[1:])), reads
