"""Counts and times of dynamic sampling, of one step and summed over several.

:class:`CollapseWatch` warns, with the numbers, when dynamic sampling drops nearly everything that
it draws.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Deque, Dict, List, Optional, Sequence

import torch

from mapsage.distributed import Channel

from .exchange import Traffic
from .validity import NO_SPREAD, NOT_FINITE, TOO_HIGH, TOO_LOW, ScoreWindow, Validity

# More reasons than the validity has: FAILED is a sample that an error interrupted before it was
# judged, NOT_RESTORED a sample of a pool that a resumed run could not load.
EXPIRED, SURPLUS, FAILED, NOT_RESTORED = 'expired', 'surplus', 'failed', 'not_restored'
REASONS = (NOT_FINITE, NO_SPREAD, TOO_LOW, TOO_HIGH, EXPIRED, SURPLUS, FAILED, NOT_RESTORED)

# Figures of Totals that differ between ranks.
_LOCAL = (
    'carried',
    'fetched',
    'used',
    'replicated',
    'unfiltered',
    'surplus',
    'sent_bytes',
    'received_bytes',
)


@dataclass
class StepStatistics:
    """One step. Global figures are equal on all ranks; the others are of this rank.

    Attributes:
        step: Number of the step, from 1.
        goal: Number of samples that the ranks need together. Global.
        initial: Valid samples after the initial batch, surplus of former steps included. Global.
        attempts: Number of resamples. Global.
        wanted: Number of samples that they asked for. Global.
        judged: Number of samples judged. Global.
        passed: How many of these are valid. Global.
        first_judged: Number of samples of the initial batch that were judged. Global.
        first_passed: How many of these are valid. Global.
        not_finite: How many of these are in a group with a score that is not finite. Global.
        valid: Valid samples in the end, surplus of former steps included. Global.
        missing: Number of samples by which ``valid`` falls short of the goal. Global.
        outcome: ``'valid'``, or the shortfall policy that was applied. Global.
        moved_samples: Number of samples that changed their rank. Global.
        carried: Number of samples in the pool when the step began.
        fetched: Number of samples fetched.
        received: Number of samples that came from other ranks.
        sent: Number of samples that went to other ranks.
        used: Number of samples in the batch.
        replicated: How many of these are copies of others in the step.
        unfiltered: Number of samples kept by ``keep_fraction`` although they are not valid.
        surplus: Number of samples that stay in the pool for the next step.
        dropped: Number of samples dropped, by reason.
        traffic: Bytes sent and received.
        seconds: Time spent, including fetching and scoring.
    """

    step: int = 0
    goal: int = 0
    initial: int = 0
    attempts: int = 0
    wanted: int = 0
    judged: int = 0
    passed: int = 0
    first_judged: int = 0
    first_passed: int = 0
    not_finite: int = 0
    valid: int = 0
    missing: int = 0
    outcome: str = 'valid'
    moved_samples: int = 0
    carried: int = 0
    fetched: int = 0
    received: int = 0
    sent: int = 0
    used: int = 0
    replicated: int = 0
    unfiltered: int = 0
    surplus: int = 0
    dropped: Dict[str, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0

    @property
    def pass_rate(self) -> float:
        """Valid share of the samples judged; NaN when none was."""
        return self.passed / self.judged if self.judged else math.nan

    @property
    def first_pass_rate(self) -> float:
        """Valid share of the initial batch; NaN when it is empty.

        Its expectation is the share of valid samples. The expectation of :attr:`pass_rate` is
        larger, because a step ends as soon as enough samples have passed.
        """
        return self.first_passed / self.first_judged if self.first_judged else math.nan

    def drop(self, reason: str, samples: int) -> None:
        """Count dropped samples."""
        if samples:
            self.dropped[reason] = self.dropped.get(reason, 0) + samples


@dataclass
class Totals:
    """Sums over steps since :meth:`clear`, as in :class:`StepStatistics`.

    Over all ranks together they account for every sample: what the pool held and what was drawn was
    trained on, dropped for a reason, or is in the pool.

    Attributes:
        steps: Number of steps.
        carried: Samples in the pool before the first step.
        shortfalls: Number of steps that fell short, by the policy that was applied.
        surplus: Surplus samples after the last step.
    """

    steps: int = 0
    goal: int = 0
    attempts: int = 0
    wanted: int = 0
    judged: int = 0
    passed: int = 0
    not_finite: int = 0
    missing: int = 0
    moved_samples: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    carried: Optional[int] = None
    fetched: int = 0
    used: int = 0
    replicated: int = 0
    unfiltered: int = 0
    surplus: int = 0
    seconds: float = 0.0
    shortfalls: Dict[str, int] = field(default_factory=dict)
    dropped: Dict[str, int] = field(default_factory=dict)

    def add(self, step: StepStatistics) -> None:
        """Add the figures of one step."""
        self.steps += 1
        self.attempts += step.attempts
        self.wanted += step.wanted
        self.goal += step.goal
        self.judged += step.judged
        self.passed += step.passed
        self.not_finite += step.not_finite
        self.missing += step.missing
        self.moved_samples += step.moved_samples
        self.used += step.used
        self.replicated += step.replicated
        self.unfiltered += step.unfiltered
        self.seconds += step.seconds
        self.sent_bytes += step.traffic.sent_bytes
        self.received_bytes += step.traffic.received_bytes
        if step.missing:
            self.shortfalls[step.outcome] = self.shortfalls.get(step.outcome, 0) + 1
        self.add_unfinished(step)

    def add_unfinished(self, step: StepStatistics) -> None:
        """Add what a step drew and dropped before an error ended it."""
        if self.carried is None:
            self.carried = step.carried
        self.fetched += step.fetched
        self.surplus = step.surplus
        for reason, count in step.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def clear(self) -> None:
        """Set all sums to zero."""
        self.__init__()  # type: ignore[misc]

    def over_ranks(self, channel: Channel) -> Totals:
        """Return the sums over all ranks, with the seconds of the slowest. Collective.

        Args:
            channel: Channel to the ranks that sample together.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        figures = asdict(self)
        local = torch.tensor(
            [self.seconds]
            + [figures[name] or 0 for name in _LOCAL]
            + [self.dropped.get(reason, 0) for reason in REASONS],
            dtype=torch.float64,
        )
        rows = torch.stack(channel.gather(local))
        sums = [int(value) for value in rows[:, 1:].sum(0).tolist()]
        values: Dict[str, Any] = dict(zip(_LOCAL, sums), seconds=float(rows[:, 0].max()))
        together = replace(self, **values)
        together.shortfalls = dict(self.shortfalls)
        together.dropped = {
            reason: count for reason, count in zip(REASONS, sums[len(_LOCAL) :]) if count
        }
        return together

    @property
    def pass_rate(self) -> float:
        """Valid share of the samples judged; NaN when none was."""
        return self.passed / self.judged if self.judged else math.nan

    @property
    def lost(self) -> int:
        """Number of samples without a record. In the sums over all ranks it is always 0."""
        return (
            (self.carried or 0)
            + self.fetched
            - (self.used - self.replicated)
            - sum(self.dropped.values())
            - self.surplus
        )

    def summary(self) -> str:
        """Return one line for the log."""

        def listed(counts: Dict[str, int]) -> str:
            return ', '.join(f'{name} {counts[name]}' for name in sorted(counts)) or 'none'

        return (
            f'[DynSample] {self.steps} step(s): pass rate {self.pass_rate:.1%} of '
            f'{self.judged} samples, {self.attempts} resample(s) of {self.wanted} sample(s), '
            f'{self.moved_samples} sample(s) moved ({self.sent_bytes / 2**20:.1f} MiB), '
            f'surplus {self.surplus}, shortfalls: {listed(self.shortfalls)}, '
            f'dropped: {listed(self.dropped)}, {self.seconds:.1f} s'
        )


# Steps over which the pass rate is judged.
_STEPS = 20
# Average number of samples judged in a step, beyond those that it needs, that counts as a collapse,
# as a multiple of the latter: four fifths of the loading is wasted.
_EXTRA = 4.0
# Scores that each rank contributes to the quantiles of a warning.
_SIZE = 256


class CollapseWatch:
    """Warns when steps draw many extra samples or fall short, after 20, 40, 80, ... steps.

    The decision to warn follows from counts that are equal on all ranks. So all ranks gather their
    scores together, and the first rank writes the warning.

    Args:
        validity: Criteria that the groups have to meet.
        shortfall: Name of the policy for steps that fall short.
        logger: Logger for the warning.
    """

    def __init__(self, validity: Validity, shortfall: str, logger: logging.Logger) -> None:
        self._validity, self._shortfall, self._logger = validity, shortfall, logger
        self._latest: Deque[StepStatistics] = deque(maxlen=_STEPS)
        self._scores = ScoreWindow(_SIZE)
        self._quiet, self._pause = _STEPS, _STEPS

    def add(self, scores: Sequence[float]) -> None:
        """Add the scores of groups that this rank judged."""
        self._scores.add(scores)

    def step(self, stats: StepStatistics, channel: Channel) -> None:
        """Add a step, and warn if the pass rate has collapsed. Collective if it warns.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        self._latest.append(stats)
        self._quiet -= 1
        if self._quiet > 0 or len(self._latest) < _STEPS:
            return
        sums = Totals()
        for latest_step in self._latest:
            sums.add(latest_step)
        short = sum(sums.shortfalls.values())
        if sums.judged < (1 + _EXTRA) * sums.goal and 2 * short < _STEPS:
            return
        self._pause *= 2
        self._quiet = self._pause
        scores = self._gather(channel)
        if channel.rank == channel.ranks[0]:
            self._logger.warning(self._warning(sums, short, scores))

    def _gather(self, channel: Channel) -> List[float]:
        """Return the latest scores of all ranks in ascending order."""
        latest = self._scores.latest()
        # Every rank sends the same number of scores; NaN fills the rest.
        padded = torch.full((_SIZE,), float('nan'), dtype=torch.float64)
        padded[: len(latest)] = torch.tensor(latest, dtype=torch.float64)
        gathered = torch.cat(channel.gather(padded))
        return sorted(gathered[torch.isfinite(gathered)].tolist())

    def _warning(self, sums: Totals, short: int, scores: Sequence[float]) -> str:
        text = (
            f'[DynSample] The pass rate has collapsed: {sums.pass_rate:.1%} of {sums.judged} '
            f'samples were valid in the last {_STEPS} steps ({self._validity.criteria()}). A '
            f'step drew {sums.judged / sums.goal:.1f} times as many samples as it needs, and '
            f'{short} of {_STEPS} steps fell short (shortfall={self._shortfall!r}). '
        )
        if scores:
            text += (
                'Latest scores of the groups: '
                + ', '.join(
                    f'{name} {scores[int(share * (len(scores) - 1))]:.4g}'
                    for name, share in (
                        ('lowest', 0),
                        ('10 %', 0.1),
                        ('median', 0.5),
                        ('90 %', 0.9),
                        ('highest', 1),
                    )
                )
                + '. '
            )
        return text + self._advice(sums, scores) + f' Next look in {self._pause} steps.'

    def _advice(self, sums: Totals, scores: Sequence[float]) -> str:
        low, high = self._validity.low, self._validity.high
        count, not_finite = max(1, len(scores)), sums.not_finite / max(1, sums.judged)
        too_low = 0.0 if low is None else sum(score <= low for score in scores) / count
        too_high = 0.0 if high is None else sum(score >= high for score in scores) / count
        worst = max(not_finite, too_low, too_high)
        if worst < 0.5:
            advice = (
                'No bound of the mean score explains that: look at the reasons for dropping '
                'in the summaries'
            )
            if self._validity.eps:
                return f'{advice}, and lower eps if it is no_spread.'
            if self._validity.eps is None:
                return f'{advice}.'
            return (
                f'{advice}. With eps=0, no_spread means that all scores of a group are equal: '
                f'larger groups, or a score with finer steps, have some.'
            )
        if worst == not_finite:
            return 'Most scores are NaN or infinite: look at the score.'
        median = scores[len(scores) // 2]
        if worst == too_high:
            return (
                f'{too_high:.0%} of the groups score {high:g} or more: half of them pass with '
                f'high={median:.4g}.'
            )
        return (
            f'{too_low:.0%} of the groups score {low:g} or less: half of them pass with '
            f'low={median:.4g}. Where the scores fall as the model learns, give '
            f'validity=dict(quantile=0.3) in place of low: it drops the lowest 30 % at any '
            f'time.'
        )
