"""The account of one process: what was drawn is trained on, in a pool, or dropped for a reason."""

from __future__ import annotations

import random
from typing import Any, List, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, DynamicSampler, ShortfallError, Validity

FAULTS = (
    'fetch',
    'score',
    'few scores',
    'part of a group',
    'observe',
    'interrupt',
    'StopIteration',
    'resume',
    'resume without',
)


class Faulty:
    """A loader, score and observer of which each call may fail. Keeps what they saw.

    Args:
        seed: Seed of all that is random.
        faults: Faults that may occur.
        ranks: Number of virtual ranks of the process.
    """

    def __init__(self, seed: int, faults: Sequence[str], ranks: int = 1) -> None:
        self.draw, self.faults = random.Random(seed), faults
        self.ranks = VirtualRanks(ranks, 1)
        self.drawn: List[int] = []
        self.settings: dict = dict(
            validity=Validity(low=0.5),
            local_target=4,
            group_size=2,
            max_resample_times=2,
            shortfall=self.draw.choice(['fallback', 'pad', 'shrink', 'raise']),
            max_age=self.draw.randint(0, 2),
            keep_fraction=self.draw.choice([0.0, 0.3]),
        )
        self.sampler = self.make()

    def make(self) -> BlockSampler:
        return BlockSampler(
            lambda rank, wanted: self.fetch(),
            lambda rank, samples: self.score(samples),
            ranks=self.ranks,
            observe=self.observe,
            **self.settings,
        )

    def strikes(self, fault: str) -> bool:
        return fault in self.faults and self.draw.random() < 0.1

    def fetch(self) -> List[dict]:
        if self.strikes('fetch'):
            raise OSError('tile 17')
        size = self.draw.choice([2, 4, 4, 8, 12]) + self.strikes('part of a group')
        new = [
            dict(id=len(self.drawn) + k, score=float(self.draw.random() < 0.6)) for k in range(size)
        ]
        self.drawn += [each['id'] for each in new]
        return new

    def score(self, samples: List[dict]) -> List[float]:
        if self.strikes('score'):
            raise ZeroDivisionError('no pixels')
        if self.strikes('StopIteration'):
            raise StopIteration
        return [each['score'] for each in samples][int(self.strikes('few scores')) :]

    def observe(self, group: Sequence[dict], reason: str) -> None:
        if self.strikes('observe'):
            raise ValueError('no picture')
        if self.strikes('interrupt'):
            raise KeyboardInterrupt

    def resume(self) -> None:
        """Continue as a new process would, maybe without a part of the pool."""
        state, totals = self.sampler.state_dict(), self.sampler.totals
        pool = state['pools'][-1]
        left_out = pool[:1] if self.strikes('resume without') else []
        state['pools'][-1] = pool[len(left_out) :]
        state['not_restored'] += sum(len(each['samples']) for each in left_out)
        self.sampler = self.make()
        self.sampler.load_state_dict(state)
        self.sampler.totals = totals


@pytest.mark.parametrize(
    'fault, ranks',
    [
        ((), 1),
        (('fetch',), 1),
        (('score', 'few scores'), 1),
        (('part of a group',), 1),
        (('observe', 'StopIteration'), 1),
        (('interrupt',), 1),
        (('resume',), 1),
        (('resume', 'resume without'), 1),
        (FAULTS, 1),
        (FAULTS, 3),
    ],
    ids=str,
)
@given(seed=st.integers(0, 10**6))
def test_no_fault_loses_a_sample(fault: Sequence[str], ranks: int, seed: int) -> None:
    run, used = Faulty(seed, fault, ranks), set()
    for _ in range(12):
        if run.strikes('resume'):
            run.resume()
        try:
            batches = run.sampler.sample_block()
        except (
            ShortfallError,
            OSError,
            ZeroDivisionError,
            ValueError,
            RuntimeError,
            KeyboardInterrupt,
        ):
            continue
        for batch in batches:
            used |= {each['id'] for each in batch.samples}
            assert len(batch.samples) == 4 or batch.statistics.outcome == 'shrink'
    state, totals = run.sampler.state_dict(), run.sampler.totals
    pool = [
        each['id'] for groups in state['pools'] for group in groups for each in group['samples']
    ]
    assert len(set(pool)) == len(pool) and not used & set(pool)
    assert totals.fetched == len(run.drawn)
    assert len(run.drawn) == (
        len(used) + len(pool) + sum(totals.dropped.values()) + state['not_restored']
    )
    assert totals.lost == 0


def test_the_account_finds_a_loss() -> None:
    run = Faulty(0, ())
    run.settings.update(shortfall='fallback', max_age=2)
    run.sampler = run.make()
    while not run.sampler.totals.surplus:
        run.sampler.sample_block()
    run.sampler._pools[0].take(0)
    run.sampler.sample_block()
    # the step that begins with an emptied pool says so itself, and the sum does not hold
    assert run.sampler.totals.lost > 0


def test_what_a_failed_step_found_is_used_by_the_next_attempt() -> None:
    calls = iter(range(100))

    def fetch(wanted: int) -> List[dict]:
        call = next(calls)
        if call == 1:
            raise OSError('tile 17')
        return [dict(id=4 * call + k, score=float(k < 3)) for k in range(4)]

    sampler = DynamicSampler(
        fetch, lambda samples: [s['score'] for s in samples], Validity(low=0), 4, max_age=0
    )
    with pytest.raises(OSError, match='tile 17'):
        sampler.sample()
    assert sampler.step == 0
    assert (sampler.totals.fetched, sampler.totals.dropped) == (4, {'too_low': 1})
    # also with max_age=0: it is the same step
    assert [s['id'] for s in sampler.sample().samples] == [0, 1, 2, 8]
    assert sampler.totals.dropped == {'too_low': 2, 'surplus': 2}


def test_a_score_that_raises_stop_iteration_does_not_end_the_data() -> None:
    def score(samples: Any) -> Any:
        return [next(iter([])) for _ in samples]

    sampler = DynamicSampler(lambda wanted: [1, 2], score, Validity(low=0), 2)
    with pytest.raises(RuntimeError, match='StopIteration'):
        sampler.sample()
    assert sampler.totals.dropped == {'failed': 2}


@pytest.mark.parametrize('policy', ['fallback', 'pad', 'shrink'])
def test_a_fallback_trains_on_the_target_of_a_larger_batch(policy: str) -> None:
    """Without a valid sample, every policy falls back."""
    sampler = DynamicSampler(
        lambda wanted: [dict(id=k) for k in range(24)],
        lambda samples: [0.0 for _ in samples],
        Validity(low=0),
        8,
        max_resample_times=0,
        shortfall=policy,
    )
    batch = sampler.sample()
    assert [each['id'] for each in batch.samples] == list(range(8))
    assert batch.statistics.dropped == {'too_low': 16}


def test_a_fallback_uses_what_refills_drew_when_the_batch_was_smaller() -> None:
    number = iter(range(100))
    sampler = DynamicSampler(
        lambda wanted: [dict(id=next(number)) for _ in range(3)],
        lambda samples: [float(each['id'] == 1) for each in samples],
        Validity(low=0.5),
        8,
        max_resample_times=2,
        max_refill_rounds=1,
    )
    batch = sampler.sample()
    assert [each['id'] for each in batch.samples] == list(range(8))
    assert batch.statistics.outcome == 'fallback'
    assert batch.statistics.dropped == {'too_low': 1}  # the ninth
