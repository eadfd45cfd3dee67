"""How `--tune` tells a gain from noise: races of variants with known times."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, Iterator, List

import pytest

from mapsage.extras.forensics.tuning.bench import Visit
from mapsage.extras.forensics.tuning.command import thread_counts
from mapsage.extras.forensics.tuning.options import Option, Variant, combine
from mapsage.extras.forensics.tuning.race import Race, Speed, measure_speed
from mapsage.extras.forensics.tuning.workers import candidate_workers

HALF, LAST, FUSED = (Option(name, ((name, True),)) for name in ('half', 'last', 'fused'))
BASE = Variant()


class Machine:
    """Visits of known length on a clock of its own.

    Args:
        seconds: Time of a step by the name of the variant.
        disturbance: Function of the number of the visit; factor of its time.
    """

    def __init__(
        self, seconds: Dict[str, Any], disturbance: Callable[[int], float] = lambda number: 1.0
    ) -> None:
        self.seconds, self.disturbance = seconds, disturbance
        self.visited: List[str] = []
        self.time = 0.0

    def visit(self, variant: Variant) -> Visit:
        seconds = self.seconds[variant.name]
        if isinstance(seconds, Exception):
            raise seconds
        seconds *= self.disturbance(len(self.visited))
        self.visited.append(variant.name)
        self.time += seconds
        return Visit(seconds)

    def race(self, deadline: float = math.inf, **options: Any) -> Race:
        race = Race(self.visit, BASE, lambda: self.time)
        race.run(combine([HALF, LAST, FUSED], 1), deadline, **options)
        return race


def all_times(**factors: float) -> Dict[str, float]:
    """Return a time for every combination: the product of its options' factors."""
    times = {'as configured': 1.0}
    for variant in combine([HALF, LAST, FUSED], 1):
        times[variant.name] = math.prod(factors.get(option.name, 1.0) for option in variant.options)
    return times


def waves(number: int) -> float:
    """A machine that is up to 40 % slower, in waves of seven visits."""
    return 1.2 + 0.2 * math.sin(2 * math.pi * number / 7)


def test_the_fastest_with_the_fewest_options_is_chosen() -> None:
    race = Machine(all_times(half=0.5, last=0.99)).race()
    chosen = race.choose()
    # With `last` it is 1 % faster, which no measurement shows.
    assert chosen is not None and chosen.name == 'half'
    assert race.standings[chosen].speed == Speed(2.0, 0.0) and race.noise == 0.02


def test_options_that_help_only_together() -> None:
    times = all_times(half=1.1, last=1.1)
    times['half, last'] = 0.6
    chosen = Machine(times).race().choose()
    assert chosen is not None and chosen.changes == dict(half=True, last=True)


@pytest.mark.parametrize('factor, name', [(0.93, None), (0.4, 'half')])
def test_a_gain_within_the_noise_is_none(factor: float, name: Any) -> None:
    race = Machine(all_times(half=factor, last=1.3, fused=1.2), waves).race()
    chosen = race.choose()
    assert race.noise > 0.08
    assert (chosen and chosen.name) == name


def test_what_is_far_behind_leaves_the_race() -> None:
    machine = Machine(all_times(half=5.0, last=1.5))
    machine.race()
    count = {name: machine.visited.count(name) for name in machine.visited}
    assert count['half'] == count['half, fused'] == 1
    assert count['last'] == 3 and count['fused'] == 16 and count['as configured'] == 32


def test_a_failure_is_a_reason_and_the_others_go_on() -> None:
    times: Dict[str, Any] = all_times(last=0.5)
    times['half'] = RuntimeError('"some_kernel" not implemented\nmore lines')
    race = Machine(times).race()
    standing = race.standings[Variant((HALF,), 1)]
    assert standing.failure == 'RuntimeError: "some_kernel" not implemented'
    assert not standing.ratios and not race.gains(Variant((HALF,), 1))
    chosen = race.choose()
    assert chosen is not None and chosen.name == 'last'


def test_the_deadline_leaves_variants_out() -> None:
    machine = Machine(all_times(half=0.5))
    race = machine.race(deadline=3.6)
    measured = [variant.name for variant in race.standings]
    assert measured == ['as configured', 'half', 'last']
    # A single round says nothing of the noise.
    assert race.choose() is None and race.noise == math.inf
    assert machine.time <= 3.6


def test_rounds_end_before_the_deadline() -> None:
    machine = Machine(all_times())
    machine.race(deadline=20.0)
    # Nine visits of a second a round: the third would end too late.
    assert machine.time == 18.0


def test_the_order_alternates() -> None:
    machine = Machine(all_times())
    machine.race(rounds=2)
    first, second = machine.visited[:9], machine.visited[9:]
    assert first[0] == first[-1] == 'as configured' and second == first[::-1]


def test_speed_without_the_outer_quarters() -> None:
    assert measure_speed([1.2]) == Speed(1.2, math.inf)
    assert measure_speed([1.0, 1.5]) == Speed(1.25, 0.25)
    ratios: Iterator[float] = itertools.chain([0.1, 9.0], [1.1, 1.2, 1.3, 1.2, 1.2, 1.1])
    speed = measure_speed(list(ratios))
    assert speed.gain == pytest.approx(1.2) and speed.spread == pytest.approx(0.05)


def test_candidates() -> None:
    assert thread_counts(1, 1) == []
    assert thread_counts(2, 2) == [1]
    assert thread_counts(4, 6) == [6, 2, 1]
    assert thread_counts(3, 2) == [2, 1]
    assert candidate_workers(2, 0.3, 0.1, 8) == [0, 4, 8]
    assert candidate_workers(0, 0.01, 0.1, 1) == [1]
    assert [variant.name for variant in combine([HALF, Option('last', (), 'no'), FUSED], 2)] == [
        'half',
        'fused',
        'half, fused',
    ]
