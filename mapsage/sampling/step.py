"""The state of a sampling step in progress, and the batch that results.

:class:`StepLog` writes lines about the steps, with the words that users search for. Steps in which
samples were missing get INFO lines on the first rank, as long as the run is young; everything else
is logged at DEBUG.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple

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


# Steps that log every line at INFO; later steps log summaries and warnings.
_SHOWN_STEPS = 100


class StepLog:
    """Writes the lines of the steps.

    Args:
        logger: Logger of all lines.
        names: Number of each virtual rank in the log.
        block: Virtual ranks of this process.
        global_target: Number of samples for all ranks together.
        group_size: Number of samples in a group.
    """

    def __init__(
        self,
        logger: logging.Logger,
        names: Sequence[int],
        block: range,
        global_target: int,
        group_size: int,
    ) -> None:
        self._logger, self._names, self._block = logger, names, block
        self._global_target, self._group_size = global_target, group_size

    @property
    def name(self) -> int:
        """Number of the first virtual rank of this process in the log."""
        return self._names[self._block.start]

    def format_progress(self, step: StepInProgress) -> str:
        """Return the number of valid samples and the number that is needed, as `30/32`."""
        return f'{min(step.stats.valid, self._global_target)}/{self._global_target}'

    def line(
        self, step: StepInProgress, line: str, *values: Any, rank: Optional[int] = None
    ) -> None:
        """Log a line about a step.

        Args:
            step: The step.
            line: Format of the line, as `logging` takes it.
            values: Values of the format.
            rank: Virtual rank that the line is about; default: the first one of this process.
        """
        work = step.attempt or step.stats.missing
        first = not (self._block.start if rank is None else rank)
        shown = work and first and step.stats.step <= _SHOWN_STEPS
        self._logger.log(logging.INFO if shown else logging.DEBUG, line, *values)

    def batch(
        self, step: StepInProgress, rank: int, count: int, pool_slice: Optional[Tuple[int, int]]
    ) -> None:
        """Log the batch that a virtual rank trains on.

        Args:
            step: The step, whose outcome is decided.
            rank: The virtual rank.
            count: Number of samples in its batch.
            pool_slice: Start and end of its share of all samples; None if it trains on its original
                batch.
        """
        name = self._names[rank]
        if pool_slice is None:
            self.line(
                step,
                '[DynSample] Rank %d: Using %d samples of the original batch after %d resample(s)',
                name,
                count,
                step.attempt,
                rank=rank,
            )
            return
        self.line(
            step,
            '[DynSample-FINAL] Rank %d: Slicing global pool [%d:%d], got %d samples',
            name,
            *pool_slice,
            count,
            rank=rank,
        )
        repeated = step.stats.outcome in ('pad', 'mask')
        self.line(
            step,
            '[DynSample] Rank %d: Using %d %ssamples (%d groups) from global pool%s '
            'after %d resample(s)',
            name,
            count,
            '' if repeated else 'valid ',
            count // self._group_size,
            ', in which valid ones repeat,' if repeated else '',
            step.attempt,
            rank=rank,
        )

    def shortfall(self, step: StepInProgress, repeats: int, invalid: int) -> None:
        """Warn on the first rank of what a short step trains on.

        Args:
            step: The step, whose outcome is decided.
            repeats: Number of samples that all ranks together supply a second time.
            invalid: Number of groups that are not valid and that all ranks together supply.
        """
        if not self._block.start:
            self._logger.warning(
                '[DynSample] Step %d fell short: %s valid samples after %d resample(s), '
                'shortfall=%s. Of the samples it trains on %d repeat others, and %d group(s) are '
                'not valid.',
                step.stats.step,
                self.format_progress(step),
                step.attempt,
                step.stats.outcome,
                repeats,
                invalid,
            )
