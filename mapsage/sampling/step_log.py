"""Log lines about the steps of a sampler, with the words that users search for.

Steps in which samples were missing get INFO lines on the first rank, as long as the run is young;
everything else is logged at DEBUG.
"""

from __future__ import annotations

import logging
from typing import Any, Optional, Sequence, Tuple

from .step import StepInProgress

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
