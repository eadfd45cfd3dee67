"""Warn, with the numbers, when dynamic sampling drops nearly everything that it draws."""

from __future__ import annotations

import logging
from collections import deque
from typing import Deque, List, Sequence

import torch

from mapsage.distributed import Channel

from .statistics import StepStatistics, Totals
from .validity import ScoreWindow, Validity

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
