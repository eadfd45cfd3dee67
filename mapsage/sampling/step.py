"""The state of a sampling step in progress, and the batch that results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Tuple

from .pool import Group
from .statistics import StepStatistics


class EndOfData(RuntimeError):
    """Every rank's loader had ended when the step began."""


@dataclass
class SampledBatch:
    """This rank's share of one step.

    Attributes:
        samples: The samples to train on.
        loss_weight: Factor by which the mean loss over the samples is multiplied.
        statistics: Counts and times of the step.
        weights: Factor by which the loss of each sample is multiplied, with a mean of 1 over all
            ranks; all 1 unless the sampler is ``unbiased`` or the outcome is ``'mask'``.
        ages: Number of steps since each sample was judged; 0 for the samples of this step.
        group_scores: With ``group_key``: scores of all members of each sample's group, wherever
            they are, from which the loss computes advantages; else empty.
    """

    samples: List[Any]
    loss_weight: float
    statistics: StepStatistics
    weights: Tuple[float, ...] = ()
    ages: Tuple[int, ...] = ()
    group_scores: Tuple[Tuple[float, ...], ...] = ()


@dataclass
class Findings:
    """What one virtual rank has drawn and judged in the current step.

    Attributes:
        rank: Number of the virtual rank.
        usable: Groups that it may train on: valid, or kept at random.
        original: The first groups drawn in the step, as many as the target needs, whether valid or
            not; all groups of the batch that the step began with.
        ended: Whether its loader has no more batches.
        judged: Number of samples judged in this round.
        passed: How many of these are valid.
        not_finite: How many of these are in a group with a score that is not finite.
        scores: Mean scores of the groups judged in this round, NaN where not finite.
    """

    rank: int
    usable: List[Group]
    original: List[Group] = field(default_factory=list)
    ended: bool = False
    judged: int = 0
    passed: int = 0
    not_finite: int = 0
    scores: List[float] = field(default_factory=list)

    def begin_round(self) -> None:
        """Set the counts of the round to zero."""
        self.judged = self.passed = self.not_finite = 0
        self.scores = []


@dataclass
class StepInProgress:
    """One step in progress, on this process.

    Attributes:
        stats: Statistics of the step so far.
        findings: Findings of every virtual rank of this process, in order.
        attempt: Number of the resample, 0 for the initial batch.
        unjudged: Number of samples drawn and not yet in ``usable``, ``original`` or a count.
    """

    stats: StepStatistics
    findings: List[Findings]
    attempt: int = 0
    unjudged: int = 0
