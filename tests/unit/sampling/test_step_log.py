"""The lines that a sampler logs about its steps, and when it logs them."""

from __future__ import annotations

import logging
from typing import Any, Callable, List, Sequence

import pytest

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, DynamicSampler, Validity


def loader(batches: Sequence[Sequence[float]]) -> Callable[[int], List[float]]:
    """Return a fetch of batches of samples that are their scores."""
    source = iter(batches)
    return lambda wanted: list(next(source))


def make(fetch: Callable[[int], List[float]], **settings: Any) -> DynamicSampler:
    return DynamicSampler(fetch, lambda samples: samples, Validity(low=0), 4, **settings)


def test_the_log_keeps_the_lines_users_know(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sampler = make(loader([[1] * 4, [1, 1, 1, 0], [0, 0, 1, 1]]))
    sampler.sample()
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    caplog.clear()
    sampler.sample()
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert [record.getMessage() for record in caplog.records] == [
        '[DynSample] Initial batch: collected 3/4 valid samples globally',
        '[DynSample] Resample #1/3: global_collected=3/4, need 1 more',
        '[DynSample-SYNC] Rank 0: Fetching new batch for resample #1',
        '[DynSample-SYNC] Rank 0: After resample #1, global_pool=4/4',
        '[DynSample-FINAL] Rank 0: Slicing global pool [0:4], got 4 samples',
        '[DynSample] Rank 0: Using 4 valid samples (4 groups) from global pool after 1 resample(s)',
    ]
    assert sampler.totals.summary().startswith(
        '[DynSample] 2 step(s): pass rate 75.0% of 12 samples, 1 resample(s) of 2 sample(s)'
    )


def test_the_words_that_users_search_for(caplog: pytest.LogCaptureFixture) -> None:
    """Letter by letter: four ranks of 16 samples in groups of 8, of which one is not valid."""
    caplog.set_level(logging.INFO)
    valid = iter([16, 8, 16, 16])

    def fetch(rank: int, wanted: int) -> List[float]:
        # After the first batches, every sample is valid.
        count = next(valid, wanted)
        return [1.0] * count + [0.0] * (wanted - count)

    sampler = BlockSampler(
        fetch,
        lambda rank, samples: samples,
        Validity(low=0.5),
        16,
        ranks=VirtualRanks(4, 1),
        group_size=8,
    )
    sampler.sample_block()
    assert [record.getMessage() for record in caplog.records] == [
        '[DynSample] Initial batch: collected 56/64 valid samples globally',
        '[DynSample] Resample #1/3: global_collected=56/64, need 8 more',
        '[DynSample-SYNC] Rank 0: Fetching new batch for resample #1',
        '[DynSample-SYNC] Rank 0: After resample #1, global_pool=64/64',
        '[DynSample-FINAL] Rank 0: Slicing global pool [0:16], got 16 samples',
        '[DynSample] Rank 0: Using 16 valid samples (2 groups) from global pool after 1 '
        'resample(s)',
    ]


@pytest.mark.parametrize(
    'shortfall, drawn, words',
    [
        (
            'pad',
            [[1, 0, 0, 0]] * 2,
            '2/4 valid samples after 1 resample(s), shortfall=pad. Of the '
            'samples it trains on 2 repeat others, and 0 group(s) are not '
            'valid.',
        ),
        (
            'pad',
            [[0, 0, 0, 1], [0] * 4],
            '1/4 valid samples after 1 resample(s), shortfall=pad. Of '
            'the samples it trains on 3 repeat others, and 0 group(s)',
        ),
        (
            'shrink',
            [[1, 0, 0, 0]] * 2,
            'shortfall=shrink. Of the samples it trains on 0 repeat '
            'others, and 0 group(s) are not valid.',
        ),
        (
            'fallback',
            [[1, 0, 0, 0], [1] * 2 + [0] * 2],
            '3/4 valid samples after 1 resample(s), shortfall=fallback. Of the samples it trains on 0 '
            'repeat others, and 3 group(s) are not valid.',
        ),
        (
            'pad',
            [[0] * 4] * 2,
            '0/4 valid samples after 1 resample(s), shortfall=fallback. Of the '
            'samples it trains on 0 repeat others, and 4 group(s) are not valid.',
        ),
        (
            'fallback',
            [[1, 0], [0, 0]],
            'shortfall=fallback. Of the samples it trains on 0 repeat '
            'others, and 3 group(s) are not valid.',
        ),
    ],
)
def test_a_short_step_is_one_warning(
    shortfall: str, drawn: List[List[int]], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(loader(drawn), shortfall=shortfall, max_resample_times=1, max_refill_rounds=1).sample()
    [warning] = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warning.startswith('[DynSample] Step 1 fell short: ') and words in warning


def test_padded_samples_are_not_called_valid(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make(loader([[1, 0, 0, 0]]), shortfall='pad', max_resample_times=0).sample()
    assert (
        '[DynSample] Rank 0: Using 4 samples (4 groups) from global pool, in which valid ones '
        'repeat, after 0 resample(s)'
    ) in caplog.text


def test_the_log_is_short_after_the_first_hundred_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sampler = make(lambda wanted: [0, 1, 1, 1], max_age=0)
    counts = []
    for _ in range(103):
        caplog.clear()
        sampler.sample()
        counts.append(len(caplog.records))
    assert min(counts[:100]) > 0 and counts[100:] == [0] * 3
