"""A warning, with the numbers, where nearly everything that is drawn is dropped."""
from __future__ import annotations

import logging
from collections import deque
from typing import Deque, List, Sequence

import torch

from mapsage.distributed import Channel

from .quantile import ScoreWindow
from .statistics import StepStatistics, Totals
from .validity import Validity

_STEPS = 20  # over which is judged whether the pass rate has collapsed
_EXTRA_BATCHES = 4.0  # a step, on average: four fifths of what is loaded is for nothing
_SIZE = 256  # scores that each rank contributes to the quantiles of a warning


class CollapseWatch:
    """Warns where steps draw many extra batches or fall short, after 20, 40, 80, ... steps.

    When it warns follows from counts that are equal on all ranks, so all of them gather the scores
    then, and the first one writes.

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
        """Add scores of groups that this rank has judged."""
        self._scores.add(scores)

    def step(self, stats: StepStatistics, channel: Channel) -> None:
        """Add a step, and warn where the pass rate has collapsed. Collective then.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        self._latest.append(stats)
        self._quiet -= 1
        if self._quiet > 0 or len(self._latest) < _STEPS:
            return
        sums = Totals()
        for each in self._latest:
            sums.add(each)
        short = sum(sums.shortfalls.values())
        if sums.rounds < _EXTRA_BATCHES * _STEPS and 2 * short < _STEPS:
            return
        self._pause *= 2
        self._quiet = self._pause
        scores = self._gather(channel)
        if channel.rank == channel.ranks[0]:
            self._logger.warning(self._warning(sums, short, scores))

    def _gather(self, channel: Channel) -> List[float]:
        """Return the latest scores of all ranks in ascending order."""
        mine = torch.full((_SIZE,), float('nan'), dtype=torch.float64)
        latest = self._scores.latest()
        mine[:len(latest)] = torch.tensor(latest, dtype=torch.float64)
        every = torch.cat(channel.gather(mine))
        return sorted(every[torch.isfinite(every)].tolist())

    def _warning(self, sums: Totals, short: int, scores: Sequence[float]) -> str:
        told = (f'[DynSample] The pass rate has collapsed: {sums.pass_rate:.1%} of {sums.judged} '
                f'samples were valid in the last {_STEPS} steps ({self._validity.criteria()}). A '
                f'step drew {sums.rounds / _STEPS:.1f} extra batches on each rank, and {short} of '
                f'{_STEPS} steps fell short (shortfall={self._shortfall!r}). ')
        if scores:
            told += 'Latest scores of the groups: ' + ', '.join(
                f'{name} {scores[int(share * (len(scores) - 1))]:.4g}' for name, share in
                (('lowest', 0), ('10 %', 0.1), ('median', 0.5), ('90 %', 0.9), ('highest', 1))
            ) + '. '
        return told + self._advice(sums, scores) + f' Next look in {self._pause} steps.'

    def _advice(self, sums: Totals, scores: Sequence[float]) -> str:
        low, high = self._validity.low, self._validity.high
        count, not_finite = max(1, len(scores)), sums.not_finite / max(1, sums.judged)
        too_low = 0.0 if low is None else sum(score <= low for score in scores) / count
        too_high = 0.0 if high is None else sum(score >= high for score in scores) / count
        worst = max(not_finite, too_low, too_high)
        if worst < 0.5:
            advice = ('No bound of the mean score explains that: look at the reasons for dropping '
                      'in the summaries')
            if self._validity.eps:
                return f'{advice}, and lower eps if it is no_spread.'
            if self._validity.eps is None:
                return f'{advice}.'
            return (f'{advice}. With eps=0, no_spread means that all scores of a group are equal: '
                    f'larger groups, or a score with finer steps, have some.')
        if worst == not_finite:
            return 'Most scores are NaN or infinite: look at the score.'
        median = scores[len(scores) // 2]
        if worst == too_high:
            return (f'{too_high:.0%} of the groups score {high:g} or more: half of them pass with '
                    f'high={median:.4g}.')
        return (f'{too_low:.0%} of the groups score {low:g} or less: half of them pass with '
                f'low={median:.4g}. Where the scores fall as the model learns, give '
                f'validity=dict(quantile=0.3) in place of low: it drops the lowest 30 % at any '
                f'time.')
