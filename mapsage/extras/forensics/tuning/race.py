"""Compares variants of a step in pairs, and chooses one only if its gain exceeds the spread.

The config as it is is visited at the beginning and at the end of every round. The difference of
these two visits is what the measurement makes of equal work: its noise.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence

from mapsage.distributed import error_text

from .bench import FAR_SLOWER, Visit
from .options import Variant

# Least noise of any measurement.
LEAST_NOISE = 0.02
_MOST_ROUNDS = 16
# Rounds before a variant that is behind leaves the race.
_ROUNDS_TO_LEAVE = 3


@dataclass(frozen=True)
class Speed:
    """Speed of a variant against the config as it is.

    Attributes:
        gain: Median of the paired ratios of the times; 1.2 is 1.2 times as fast.
        spread: Half of the range of the ratios without their lowest and highest quarter; infinite
            for a single ratio.
    """

    gain: float
    spread: float


@dataclass
class Standing:
    """What a race knows of one variant.

    Attributes:
        visits: Results of its visits.
        ratios: Time of the config as it is, divided by the variant's, for each round.
        failure: Reason why it left the race without a result; empty if it did not.
    """

    visits: List[Visit] = field(default_factory=list)
    ratios: List[float] = field(default_factory=list)
    failure: str = ''

    @property
    def speed(self) -> Speed:
        """Speed over all rounds."""
        return measure_speed(self.ratios)

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(visit.seconds for visit in self.visits)


def measure_speed(ratios: Sequence[float]) -> Speed:
    """Return median and spread of paired ratios. Pure.

    Example:
        >>> measure_speed([1.1, 1.2, 1.3, 1.2, 1.2])
        Speed(gain=1.2, spread=0.0)
    """
    if len(ratios) < 2:
        return Speed(ratios[0] if ratios else math.nan, math.inf)
    ordered = sorted(ratios)
    cut = len(ordered) // 4
    inner = ordered[cut : len(ordered) - cut]
    return Speed(statistics.median(ordered), (inner[-1] - inner[0]) / 2)


class Race:
    """Visits variants in turns with the config as it is.

    Args:
        visit: Function that carries out some steps of a variant.
        base: The config as it is.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        visit: Callable[[Variant], Visit],
        base: Variant,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._visit, self.base, self._clock = visit, base, clock
        self.standings: Dict[Variant, Standing] = {base: Standing()}
        self._controls: List[float] = []

    @property
    def noise(self) -> float:
        """Largest deviation from 1 that equal work shows: infinite before the second round."""
        control = measure_speed(self._controls)
        return (
            max(LEAST_NOISE, abs(control.gain - 1), control.spread) if self._controls else math.inf
        )

    def run(self, variants: Sequence[Variant], deadline: float, rounds: int = _MOST_ROUNDS) -> None:
        """Visit the variants round by round until the deadline.

        Args:
            variants: Variants in the order of the first round; those for which no time is left have
                no entry in :attr:`standings`.
            deadline: Time of the clock at which no visit begins.
            rounds: Largest number of rounds.
        """
        racing, taken = list(variants), 0.0
        for number in range(rounds):
            start = self._clock()
            if not racing or (number and start + taken > deadline):
                return
            self._run_round(racing[::-1] if number % 2 else racing, deadline, number == 0)
            taken = self._clock() - start
            racing = [variant for variant in variants if self._stays(variant)]

    def _run_round(self, variants: Sequence[Variant], deadline: float, is_first: bool) -> None:
        before = self._visit(self.base)
        visits: Dict[Variant, Visit] = {}
        longest = 0.0
        for variant in variants:
            start = self._clock()
            # The base is visited once more at the end, and takes about as long.
            if is_first and start + 2 * longest > deadline:
                break
            standing = self.standings.setdefault(variant, Standing())
            try:
                visits[variant] = self._visit(variant)
            # A user's model, torch and a vendor's kernels may raise anything. The row of the
            # variant says so, and the others are measured.
            except Exception as error:
                standing.failure = error_text(error).strip().split('\n')[0]
            longest = max(longest, self._clock() - start)
        after = self._visit(self.base)
        self.standings[self.base].visits += [before, after]
        self._controls.append(before.seconds / after.seconds)
        for variant, visit in visits.items():
            standing = self.standings[variant]
            standing.visits.append(visit)
            standing.ratios.append((before.seconds + after.seconds) / 2 / visit.seconds)

    def _stays(self, variant: Variant) -> bool:
        """Return whether a variant is visited in the next round."""
        standing = self.standings.get(variant)
        if standing is None or standing.failure or max(standing.ratios) < 1 / FAR_SLOWER:
            return False
        best = max(
            (other for other in self.standings.values() if other.ratios and not other.failure),
            key=lambda other: other.speed.gain,
        )
        return (
            len(standing.ratios) < _ROUNDS_TO_LEAVE
            or best is standing
            or max(standing.ratios) >= min(best.ratios)
        )

    def gains(self, variant: Variant) -> bool:
        """Return whether a variant's gain exceeds its spread and the noise."""
        standing = self.standings.get(variant)
        if standing is None or standing.failure or len(standing.ratios) < 2:
            return False
        return standing.speed.gain - 1 > max(self.noise, standing.speed.spread)

    def choose(self) -> Optional[Variant]:
        """Return the variant to use, or None to keep the config as it is.

        Among variants that are equally fast within the spread, the one with the fewest options
        and loader workers.
        """
        winners = [variant for variant in self.standings if self.gains(variant)]
        if not winners:
            return None
        best = max(winners, key=lambda variant: self.standings[variant].speed.gain)
        speed = self.standings[best].speed
        margin = max(self.noise, speed.spread / speed.gain)
        equal = [
            variant
            for variant in winners
            if self.standings[variant].speed.gain >= speed.gain * (1 - margin)
        ]
        return min(
            equal,
            key=lambda variant: (
                len(variant.options),
                variant.workers or 0,
                -self.standings[variant].speed.gain,
            ),
        )
