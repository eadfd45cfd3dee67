#!/usr/bin/env python
"""How many samples dynamic sampling generates for each one that is trained on.

    python tools/benchmarks/sampling_refills.py

Groups of four pass with a fixed probability, and surplus is lost (max_age=0). The real sampler
runs, with all ranks as virtual ranks of this process. Beside it: the same sampler with a fetch that
returns a whole batch whatever is asked for. The ideal is one divided by the pass rate; what is over
it is the share of valid samples that nobody trains on, which depends less on the draws.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
from pathlib import Path
from typing import List, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mapsage.distributed.virtual_ranks import VirtualRanks  # noqa: E402
from mapsage.sampling import BlockSampler, Validity  # noqa: E402

GROUP = 4
# Steps that fall short are a column of the table.
QUIET = logging.Logger('quiet', logging.ERROR)


class Result(NamedTuple):
    """Means over the steps of a walk."""

    generated: float  # for each sample trained on
    surplus: float  # valid samples for each one trained on, less 1: what is over the ideal
    short: float  # share of steps that fell short
    resamples: float  # a step


def walk(
    ranks: int, groups: int, rate: float, resamples: int, whole: bool, steps: int, seed: int
) -> Result:
    draw = random.Random(seed)
    target = groups * GROUP

    def fetch(rank: int, wanted: int) -> List[float]:
        count = target if whole and wanted else wanted
        return [
            score
            for _ in range(count // GROUP)
            for score in ([0.0, 1.0, 0.0, 1.0] if draw.random() < rate else [1.0] * GROUP)
        ]

    sampler = BlockSampler(
        fetch,
        lambda rank, samples: samples,
        Validity(eps=1e-6),
        target,
        ranks=VirtualRanks(ranks, 1),
        group_size=GROUP,
        max_resample_times=resamples,
        shortfall='mask',
        logger=QUIET,
    )
    for _ in range(steps):
        sampler.sample_block()
    totals = sampler.totals
    trained = totals.used - totals.replicated
    return Result(
        totals.fetched / trained,
        totals.passed / trained - 1,
        sum(totals.shortfalls.values()) / steps,
        totals.attempts / steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--seeds', type=int, default=3)
    args = parser.parse_args()
    print(
        f'{args.steps} steps, mean of {args.seeds} seeds: generated for each sample trained on '
        f'(lowest to highest seed)\n'
    )
    print(
        '| ranks x groups | pass rate | ideal | resamples | fetch(wanted) | over the ideal '
        '| short | resamples made | whole batches | over the ideal |'
    )
    print('|---|---|---|---|---|---|---|---|---|---|')
    for ranks, groups in ((1, 8), (2, 8), (8, 2), (4, 8)):
        for rate in (0.8, 0.6, 0.4):
            for resamples in (3, 5):
                exact, whole = (
                    [
                        walk(ranks, groups, rate, resamples, batches, args.steps, seed)
                        for seed in range(args.seeds)
                    ]
                    for batches in (False, True)
                )
                ratios = [result.generated for result in exact]
                mean = statistics.mean(ratios)
                batches = statistics.mean(result.generated for result in whole)
                print(
                    f'| {ranks} x {groups} | {rate} | {1 / rate:.2f} | {resamples} | {mean:.2f} '
                    f'({min(ratios):.2f} to {max(ratios):.2f}) | '
                    f'{statistics.mean(result.surplus for result in exact):+.1%} | '
                    f'{statistics.mean(result.short for result in exact):.0%} | '
                    f'{statistics.mean(result.resamples for result in exact):.1f} | '
                    f'{batches:.2f} | '
                    f'{statistics.mean(result.surplus for result in whole):+.1%} |',
                    flush=True,
                )


if __name__ == '__main__':
    main()
