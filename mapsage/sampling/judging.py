"""Fetch a batch of one virtual rank, score it, and sort its groups into usable and dropped ones.

Nothing here communicates with other ranks: `sampler.py` calls it between two collectives. A group
that is not valid may be kept at random; the draw depends on seed, rank, step and resample only, so
a resumed run draws the same groups.
"""
from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch

from mapsage.random_state import derived_seed

from .pool import Group
from .step import Findings, StepInProgress
from .validity import NOT_FINITE, Scores, Validity


class Judge:
    """Fetches and judges batches for the virtual ranks of this process.

    Args:
        fetch: Function that takes the number of a virtual rank and a number of samples, and
            returns about as many of its next samples.
        score: Function that takes the number of a virtual rank and the samples of a batch.
        validity: Criteria for valid groups.
        local_target: Number of samples for each virtual rank.
        group_size: Number of consecutive samples that stay together.
        scores_per_sample: Number of scores per sample.
        keep_fraction: Probability with which a group that is not valid is kept at random.
        seed: Seed of the random keep.
        observe: Function called with the samples of each group and the reason why it is dropped.
    """

    def __init__(self, fetch: Callable[[int, int], Sequence[Any]],
                 score: Callable[[int, Sequence[Any]], Scores], validity: Validity, *,
                 local_target: int, group_size: int, scores_per_sample: int,
                 keep_fraction: float, seed: int,
                 observe: Optional[Callable[[Sequence[Any], str], None]]) -> None:
        self._fetch, self._score, self._validity = fetch, score, validity
        self._local_target, self._group_size = local_target, group_size
        self._scores_per_sample = scores_per_sample
        self._keep_fraction, self._seed, self._observe = keep_fraction, seed, observe

    def fetch_and_judge(self, step: StepInProgress, findings: Findings, wanted: int,
                        initial: Optional[Sequence[Any]], threshold: Optional[float]) -> None:
        """Add the groups of the next batch to the findings of a virtual rank.

        Args:
            step: The step in progress, whose counts change.
            findings: Findings of the virtual rank. Nothing is fetched if its loader has ended.
            wanted: Number of samples to ask for.
            initial: Batch to judge; fetched when None.
            threshold: Quantile of the latest scores, or None if the validity has no quantile.

        Raises:
            ValueError: If the batch does not consist of whole groups, or the scores do not fit.
            Exception: Whatever fetch, score or observe raise.
        """
        if findings.ended:
            return
        try:
            samples = list(self._fetch(findings.rank, wanted) if initial is None else initial)
        except StopIteration:
            findings.ended = True
            return
        if not samples:
            return
        size = self._group_size
        step.stats.fetched += len(samples)
        step.unjudged = len(samples)
        if len(samples) % size:
            raise ValueError(incomplete_groups(len(samples), size))
        scores = self._score(findings.rank, samples)
        verdict = self._validity.judge(scores, size * self._scores_per_sample, threshold)
        if len(verdict.reasons) * size != len(samples):
            raise ValueError(f'{len(verdict.reasons) * size} scores for {len(samples)} samples, '
                             f'expected one per sample.')
        findings.judged += len(samples)
        findings.scores += verdict.means.tolist()
        drawn = self._draw_random_keep(step, findings.rank, len(verdict.reasons))
        for index, reason in enumerate(verdict.reasons):
            findings.passed += 0 if reason else size
            findings.not_finite += size if reason == NOT_FINITE else 0
            at_random = bool(reason) and reason != NOT_FINITE and drawn[index]
            group = Group(samples[index * size:(index + 1) * size], step.stats.step,
                          '' if at_random else reason, at_random)
            if self._observe is not None:
                self._observe(group.samples, group.reason)
            self._add_group(step, findings, group)
            step.unjudged -= size

    def _add_group(self, step: StepInProgress, findings: Findings, group: Group) -> None:
        """Add a judged group to the findings, or count it as dropped."""
        # The fallback policy may use the first groups, whether valid or not.
        original = (not step.attempt
                    or len(findings.original) * self._group_size < self._local_target)
        if original:
            findings.original.append(group)
        if not group.reason:
            findings.usable.append(group)
            step.stats.unfiltered += self._group_size if group.at_random else 0
        elif not original:
            step.stats.drop(group.reason, self._group_size)

    def _draw_random_keep(self, step: StepInProgress, rank: int, groups: int) -> List[bool]:
        """Draw which groups are kept at random. A resumed run draws the same ones."""
        if not self._keep_fraction:
            return [False] * groups
        generator = torch.Generator().manual_seed(
            derived_seed(self._seed, rank, step.stats.step, step.attempt, 0))
        return (torch.rand(groups, generator=generator) < self._keep_fraction).tolist()


def incomplete_groups(samples: int, group_size: int) -> str:
    """Return the message about a batch that does not consist of whole groups."""
    return (f'a batch of {samples} samples does not make whole groups of group_size={group_size}. '
            f'Set a batch size that it divides, and drop_last.')
