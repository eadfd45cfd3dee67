"""Counts and times of dynamic sampling, of one step and summed over several."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Dict, Optional

import torch

from mapsage.distributed import Channel

from .exchange import Traffic
from .validity import NO_SPREAD, NOT_FINITE, TOO_HIGH, TOO_LOW

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
