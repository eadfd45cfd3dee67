"""Fetch a batch of one virtual rank, score it, and sort its groups into usable and dropped ones.

A :class:`Judge` does not communicate with other ranks: `sampler.py` calls it between two
collectives. A group that is not valid may be kept at random; the draw depends on seed, rank, step
and resample only, so a resumed run draws the same groups.

Groups of samples that share a key have any size, and their parts may lie on several ranks. Every
rank tells the others the key and the scores of the samples that it drew in a round. So all ranks
judge the same groups, and each rank knows all scores of the groups of its samples.
"""

from __future__ import annotations

import hashlib
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch

from mapsage.base.random_state import derived_seed
from mapsage.distributed import Channel
from mapsage.distributed.virtual_ranks import VirtualRanks

from .pool import Group
from .settings import SamplingSettings
from .step import Findings, StepInProgress
from .validity import NOT_FINITE, Scores, Validity, to_float64


class Judge:
    """Fetches and judges batches for the virtual ranks of this process.

    Args:
        fetch: Function that takes the number of a virtual rank and a number of samples, and
            returns about as many of its next samples.
        score: Function that takes the number of a virtual rank and the samples of a batch.
        settings: Settings of the sampling.
        seed: Seed of the random keep.
        observe: Function called with the samples of each group and the reason why it is dropped.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Sequence[Any]],
        score: Callable[[int, Sequence[Any]], Scores],
        settings: SamplingSettings,
        seed: int = 0,
        observe: Optional[Callable[[Sequence[Any], str], None]] = None,
    ) -> None:
        self._fetch, self._score, self._settings = fetch, score, settings
        self._seed, self._observe = seed, observe

    def fetch_and_judge(
        self,
        step: StepInProgress,
        findings: Findings,
        wanted: int,
        initial: Optional[Sequence[Any]],
        threshold: Optional[float],
    ) -> None:
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
        samples, scores = self.fetch(step, findings, wanted, initial)
        if not samples:
            return
        size = self._settings.group_size
        verdict = self._settings.validity.judge(
            scores, size * self._settings.scores_per_sample, threshold
        )
        findings.scores += verdict.means.tolist()
        drawn = self._draw_random_keep(step, findings.rank, len(verdict.reasons))
        for index, reason in enumerate(verdict.reasons):
            at_random = bool(reason) and reason != NOT_FINITE and drawn[index]
            self._add_group(
                step,
                findings,
                Group(
                    samples[index * size : (index + 1) * size],
                    step.stats.step,
                    '' if at_random else reason,
                    at_random,
                ),
                reason,
            )

    def fetch(
        self,
        step: StepInProgress,
        findings: Findings,
        wanted: int,
        initial: Optional[Sequence[Any]],
    ) -> Tuple[List[Any], torch.Tensor]:
        """Return the next samples of a virtual rank and their scores, float64, flat.

        Arguments and errors are as in :meth:`fetch_and_judge`.
        """
        nothing = torch.empty(0, dtype=torch.float64)
        if findings.ended:
            return [], nothing
        try:
            samples = list(self._fetch(findings.rank, wanted) if initial is None else initial)
        except StopIteration:
            findings.ended = True
            return [], nothing
        if not samples:
            return [], nothing
        step.stats.fetched += len(samples)
        step.unjudged += len(samples)
        if len(samples) % self._settings.group_size:
            raise ValueError(incomplete_groups(len(samples), self._settings.group_size))
        scores = to_float64(self._score(findings.rank, samples))
        if len(scores) != len(samples) * self._settings.scores_per_sample:
            raise ValueError(
                f'{len(scores) // self._settings.scores_per_sample} scores for {len(samples)} '
                f'samples, expected one per sample.'
            )
        return samples, scores

    def add_keyed(
        self,
        step: StepInProgress,
        findings: Findings,
        samples: Sequence[Any],
        keys: Sequence[int],
        verdicts: Mapping[int, KeyedVerdict],
    ) -> None:
        """Add the samples of a virtual rank, each by the verdict about its group.

        Args:
            step: The step in progress, whose counts change.
            findings: Findings of the virtual rank.
            samples: Samples that it drew.
            keys: Number of the key of each sample.
            verdicts: Verdicts of the round, by number of the key.

        Raises:
            Exception: Whatever observe raises.
        """
        findings.scores += [verdicts[key].mean for key in dict.fromkeys(keys)]
        for sample, key in zip(samples, keys):
            verdict = verdicts[key]
            self._add_group(
                step,
                findings,
                Group([sample], step.stats.step, verdict.reason, scores=verdict.scores),
                verdict.reason,
            )

    def _add_group(
        self, step: StepInProgress, findings: Findings, group: Group, verdict: str
    ) -> None:
        """Add a judged group to the findings, or count it as dropped.

        Args:
            step: The step in progress, whose counts change.
            findings: Findings of the virtual rank.
            group: The group, whose reason is empty if it is kept at random.
            verdict: Reason why it is not valid.
        """
        size = self._settings.group_size
        findings.judged += size
        findings.passed += 0 if verdict else size
        findings.not_finite += size if verdict == NOT_FINITE else 0
        if self._observe is not None:
            self._observe(group.samples, group.reason)
        # The fallback policy may use the first groups, whether valid or not.
        original = (
            not step.attempt
            or len(findings.original) * self._settings.group_size < self._settings.local_target
        )
        if original:
            findings.original.append(group)
        if not group.reason:
            findings.usable.append(group)
            step.stats.unfiltered += self._settings.group_size if group.at_random else 0
        elif not original:
            step.stats.drop(group.reason, self._settings.group_size)
        step.unjudged -= size

    def _draw_random_keep(self, step: StepInProgress, rank: int, groups: int) -> List[bool]:
        """Draw which groups are kept at random. A resumed run draws the same ones."""
        if not self._settings.keep_fraction:
            return [False] * groups
        generator = torch.Generator().manual_seed(
            derived_seed(self._seed, rank, step.stats.step, step.attempt, 0)
        )
        return (torch.rand(groups, generator=generator) < self._settings.keep_fraction).tolist()


def incomplete_groups(samples: int, group_size: int) -> str:
    """Return the message about a batch that does not consist of whole groups."""
    return (
        f'a batch of {samples} samples does not make whole groups of group_size={group_size}. '
        f'Set a batch size that it divides, and drop_last.'
    )


class KeyedVerdict(NamedTuple):
    """The decision about a group.

    Attributes:
        reason: Why it is dropped; ``''`` for a valid group.
        mean: Its mean score, NaN where a score is not finite.
        scores: Scores of all its members, by rank and position.
    """

    reason: str
    mean: float
    scores: Tuple[float, ...]


def key_number(key: Hashable) -> int:
    """Return a number of 63 bits for a key, the same in every process.

    Python's own hash of a text differs between processes.

    Raises:
        TypeError: If the key is an object without a text of its own, which has its address.
    """
    if type(key).__repr__ is object.__repr__:
        raise TypeError(
            f'group_key returned {key!r}, whose text differs between processes; '
            f'expected a number, a text, or a tuple of these.'
        )
    digest = hashlib.sha256(repr(key).encode('utf-8', 'backslashreplace')).digest()
    return int.from_bytes(digest[:8], 'little') >> 1


def judge_across_ranks(
    channel: Channel,
    ranks: VirtualRanks,
    validity: Validity,
    keys: Sequence[Sequence[int]],
    scores: Sequence[torch.Tensor],
    drawn: Sequence[int],
    threshold: Optional[float],
) -> Dict[int, KeyedVerdict]:
    """Return the verdict about every group of a round, by key. Collective.

    Args:
        channel: Channel to the processes, in order.
        ranks: Virtual ranks, and the process that runs each.
        validity: Criteria for valid groups.
        keys: Number of the key of each sample, for every virtual rank of this process.
        scores: Scores of the samples, float64 ``(samples, scores per sample)``, for every virtual
            rank of this process.
        drawn: Number of samples that each virtual rank of all processes drew.
        threshold: Quantile of the latest scores, or None.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    longest, width = max(drawn), next((table.shape[1] for table in scores if len(table)), 1)
    widest = torch.tensor([width])
    channel.max(widest)
    width = int(widest)
    # The bits of the scores travel as integers, beside the keys.
    rows = torch.zeros((len(ranks.block(0)), longest, 1 + width), dtype=torch.int64)
    for row, rank_keys, table in zip(rows, keys, scores):
        if len(table):
            row[: len(table), 0] = torch.tensor(list(rank_keys))
            row[: len(table), 1:] = table.contiguous().view(torch.int64)
    members: Dict[int, List[float]] = {}
    rank = 0
    for gathered, block in zip(channel.gather(rows), ranks.blocks):
        for row in gathered[: len(block)]:
            table = row[: drawn[rank], 1:].contiguous().view(torch.float64).tolist()
            for key, sample_scores in zip(row[: drawn[rank], 0].tolist(), table):
                members.setdefault(key, []).extend(sample_scores)
            rank += 1
    verdicts = {}
    for key, group in members.items():
        verdict = validity.judge(group, len(group), threshold)
        verdicts[key] = KeyedVerdict(verdict.reasons[0], float(verdict.means[0]), tuple(group))
    return verdicts
