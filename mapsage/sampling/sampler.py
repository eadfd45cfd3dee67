"""The loop in which all ranks together fill the global batch with valid samples.

A step is a number of rounds: every rank fetches, scores and judges batches, and one collective
(`lockstep.py`) tells all ranks the counts of all. From these counts every rank takes the same
decisions: whether to draw more (`refill.py`), what to do without enough (`shortfall.py`) and which
samples move (`plan.py`, `exchange.py`). What a rank does by itself in a round is in `judging.py`.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from mapsage.base.errors import UserError
from mapsage.distributed import Channel, Consensus
from mapsage.distributed.virtual_ranks import VirtualRanks

from .default_channel import default_channel
from .exchange import exchange_blocks, exchange_weights, gather_rows, make_distinct
from .judging import Judge, judge_across_ranks, key_number
from .lockstep import (
    ENDED,
    FAILED,
    OK,
    Round,
    check_equal_settings,
    compare_round,
    round_fields,
)
from .pool import DatedSample, Group, SurplusPool
from .settings import SamplingSettings
from .shortfall import (
    FALLBACK,
    Decision,
    PassRate,
    ShortfallError,
    decide_shortfall,
    divide_groups,
    refill_size,
)
from .statistics import EXPIRED, NOT_RESTORED, SURPLUS, CollapseWatch, StepStatistics, Totals
from .statistics import FAILED as OVERTAKEN
from .step import (
    EndOfData,
    Findings,
    SampledBatch,
    StepInProgress,
    StepLog,
)
from .validity import ScoreWindow, Validity


class OtherRankError(UserError, ValueError):
    """A state is loaded on a rank that did not save it."""


class BlockSampler:
    """A :class:`DynamicSampler` for a process that runs several virtual ranks.

    Targets, pools, random draws and the order of scores belong to virtual ranks. So a step does not
    depend on the number of processes.

    Args:
        fetch: Function that takes the number of a virtual rank and a number of samples, and returns
            its next samples.
        score: Function that takes the number of a virtual rank and the samples of a batch.
        validity: Criteria for valid groups.
        local_target: Number of samples for each virtual rank.
        ranks: Virtual ranks, and the process of the group that runs each; one per process when
            None.
        seed: Seed of the random keep, which also depends on rank, step and resample.
        initial_size: Number of samples that a virtual rank asks for at the start of a step;
            ``local_target`` when None.
        channel: Channel to the ranks that sample together, used for nothing else; when None, a
            :func:`default_channel`.
        group: Process group for the default channel; all ranks when None.
        timeout: Seconds a rank may be late on the default channel; half an hour when None.
        place: Function that returns a sample from another rank on the device where this rank
            needs it.
        observe: Function called with the samples of each group and the reason why it is dropped,
            ``''`` if it is kept.
        logger: Logger for a warning on the first rank about each step that falls short, for INFO
            lines there about the first 100 steps with missing samples, and for DEBUG lines
            otherwise.
        **settings: The other fields of :class:`SamplingSettings`.

    Attributes:
        settings: Settings of the sampling.
        totals: Sums over the steps since the caller last cleared them.

    Raises:
        ValueError: For a setting out of range.
        LockstepError: On every rank, if a rank has different settings.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Sequence[Any]],
        score: Callable[[int, Sequence[Any]], Any],
        validity: Validity,
        local_target: int,
        ranks: Optional[VirtualRanks] = None,
        *,
        seed: int = 0,
        initial_size: Optional[int] = None,
        channel: Optional[Channel] = None,
        group: Optional[Any] = None,
        timeout: Optional[float] = None,
        place: Optional[Callable[[Any], Any]] = None,
        observe: Optional[Callable[[Sequence[Any], str], None]] = None,
        logger: Optional[logging.Logger] = None,
        **settings: Any,
    ) -> None:
        channel = channel or default_channel(group, timeout)
        self._initial_size = initial_size or local_target
        try:
            self.settings = SamplingSettings(validity, local_target, **settings)
        except ValueError as error:
            # The ranks compare their settings first, so that a difference is an error on each.
            check_equal_settings(channel, str(error))
            raise
        compared = dict(
            vars(self.settings),
            initial_size=self._initial_size,
            group_key=self.settings.group_key is not None,
        )
        del compared['validity']
        text = ', '.join(f'{name}={value!r}' for name, value in compared.items())
        check_equal_settings(channel, f'{text}, {validity}')
        self._place = place
        processes = len(channel.ranks)
        self._ranks = ranks or VirtualRanks(processes, processes)
        self._block = self._ranks.block(channel.ranks.index(channel.rank))
        self._consensus = Consensus(round_fields(self._ranks), channel=channel)
        self._world = self._ranks.count
        self._judge = Judge(fetch, score, self.settings, seed, observe)
        logger = logger or logging.getLogger(__name__)
        # Numbers in the log: global ranks where every process runs one virtual rank.
        names = channel.ranks if self._ranks.one_each else range(self._world)
        self._log = StepLog(
            logger, names, self._block, self.global_target, self.settings.group_size
        )
        self._pools = [SurplusPool(self.settings.max_age or 0) for _ in self._block]
        self._rate = PassRate()
        # With a quantile: scores of all ranks, equal on every rank.
        self._scores = ScoreWindow()
        self._watch = CollapseWatch(validity, self.settings.shortfall, logger)
        self._step = self._not_restored = 0
        self.totals = Totals()
        if self.settings.keep_fraction and not self._block.start:
            logger.info(self.settings.describe_random_keep())

    @property
    def global_target(self) -> int:
        """Number of samples for all ranks together."""
        return self.settings.local_target * self._world

    @property
    def step(self) -> int:
        """Number of the step in progress or of the last one; the first is 1."""
        return self._step

    def sample_block(self, initial: Optional[Sequence[Sequence[Any]]] = None) -> List[SampledBatch]:
        """Return the next step's batch of every virtual rank of this process. Collective.

        Args:
            initial: Batch with which each virtual rank begins; fetched when None.

        Raises:
            EndOfData: On every rank, if no loader gave an initial batch. The pool is as before.
            ShortfallError: On every rank, as the policy says.
            RankError: If another rank failed to fetch or score; that rank raises its own exception.
            LockstepError: On every rank, if they are in different steps.
            RankLostError: Naming the ranks that did not come.
        """
        started = time.perf_counter()
        self._step += 1
        self._rate.age()
        carried = self._surplus() + self._not_restored
        usable, expired = zip(*[pool.take(self._step) for pool in self._pools])
        stats = StepStatistics(step=self._step, goal=self.global_target, carried=carried)
        step = StepInProgress(
            stats, [Findings(rank, groups) for rank, groups in zip(self._block, usable)]
        )
        try:
            decision = self._collect(step, initial)
            batches = self._hand_out(step, decision)
        except ShortfallError:
            # The samples of the step are in the pool already.
            self._close(step, expired)
            self.totals.add(stats)
            raise
        # Also for KeyboardInterrupt, because a checkpoint may be written before the process ends.
        except BaseException:
            self._take_back(step, expired)
            raise
        self._close(step, expired)
        stats.used = sum(len(batch.samples) for batch in batches)
        stats.seconds = time.perf_counter() - started
        self.totals.add(stats)
        self._watch.step(stats, self._consensus.channel)
        return batches

    def _surplus(self) -> int:
        """Return the number of samples in the pools of this process."""
        return sum(len(pool) for pool in self._pools) * self.settings.group_size

    def _close(self, step: StepInProgress, expired: Sequence[Sequence[Group]]) -> None:
        """Count the expired samples of a finished step, and its surplus."""
        step.stats.drop(EXPIRED, sum(map(len, expired)) * self.settings.group_size)
        step.stats.drop(NOT_RESTORED, self._not_restored)
        self._not_restored = 0
        step.stats.surplus = self._surplus()

    def _take_back(self, step: StepInProgress, expired: Sequence[Sequence[Group]]) -> None:
        """Undo a step that an error ended, and store its groups for the next attempt."""
        self._step -= 1
        for pool, old, findings in zip(self._pools, expired, step.findings):
            pool.restore([*old, *findings.usable])
            for group in findings.original:
                if group.reason:
                    step.stats.drop(group.reason, self.settings.group_size)
        step.stats.drop(OVERTAKEN, step.unjudged)
        step.stats.surplus = self._surplus() + self._not_restored
        self.totals.add_unfinished(step.stats)

    def _collect(
        self, step: StepInProgress, initial: Optional[Sequence[Sequence[Any]]]
    ) -> Decision:
        """Fetch and judge until there are enough samples or no attempts are left. Collective."""
        result = self._round(step, [self._initial_size] * self._world, initial)
        if result.ended:
            raise EndOfData(
                f'step {step.stats.step}: the loaders of all {self._world} rank(s) have ended.'
            )
        step.stats.initial = step.stats.valid
        step.stats.first_judged, step.stats.first_passed = step.stats.judged, step.stats.passed
        self._log.line(
            step,
            '[DynSample] Initial batch: collected %s valid samples globally',
            self._log.format_progress(step),
        )
        while self._wants_more(step, result):
            result = self._resample(step)
        return self._decide(step, result)

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this process: step, pass rate, latest scores, pools.

        The pools and ``not_restored`` (samples that could not be restored into a pool and are not
        counted yet) belong to this process; the rest is equal on all processes. ``ranks`` are the
        first virtual rank of this process, the one after its last, and the number of all.
        """
        return dict(
            step=self._step,
            rate=self._rate.state_dict(),
            ranks=[self._block.start, self._block.stop, self._world],
            pools=[pool.state_dict() for pool in self._pools],
            scores=self._scores.state_dict(),
            not_restored=self._not_restored,
        )

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with samples left out of its pools as not_restored.

        Raises:
            OtherRankError: If other virtual ranks saved it. A state without ``ranks`` is not
                checked.
        """
        ranks = [self._block.start, self._block.stop, self._world]
        if state.get('ranks', ranks) != ranks:
            raise OtherRankError(
                f'the state is of {_describe_ranks(*state["ranks"])}, and this is '
                f'{_describe_ranks(*ranks)}: its pool would be trained on twice, and another one '
                f"not at all. Save the state of every rank, in a file with the rank's number in "
                f"its name (accelerate's register_for_checkpointing saves that of rank 0 only). To "
                f"continue without the pools, set state['pool'] = [] and delete state['ranks']."
            )
        self._step, self._not_restored = state['step'], state.get('not_restored', 0)
        self._rate.load_state_dict(state['rate'])
        for pool, groups in zip(self._pools, state['pools']):
            pool.load_state_dict(groups)
        self._scores.load_state_dict(state.get('scores', ()))

    def _wants_more(self, step: StepInProgress, result: Round) -> bool:
        return (
            step.stats.missing > 0
            and step.attempt < self.settings.max_resample_times
            and not result.ended
        )

    def _resample(self, step: StepInProgress) -> Round:
        step.attempt += 1
        rate = self._rate.value
        groups = refill_size(
            step.stats.missing // self.settings.group_size,
            rate + (1 - rate) * self.settings.keep_fraction,
            self.settings.max_refill_rounds
            * max(1, self._initial_size // self.settings.group_size)
            * self._world,
            self._deviations(step),
        )
        if self.settings.group_key is not None:
            # A group may need a part of every rank.
            groups = math.ceil(groups / self._world) * self._world
        wanted = [
            count * self.settings.group_size
            for count in divide_groups(groups, self._world, step.stats.step % self._world)
        ]
        self._log.line(
            step,
            '[DynSample] Resample #%d/%d: global_collected=%s, need %d more',
            step.attempt,
            self.settings.max_resample_times,
            self._log.format_progress(step),
            step.stats.missing,
        )
        self._log.line(
            step,
            '[DynSample-SYNC] Rank %d: Fetching new batch for resample #%d',
            self._log.name,
            step.attempt,
        )
        result = self._round(step, wanted, None)
        step.stats.attempts, step.stats.wanted = step.attempt, step.stats.wanted + sum(wanted)
        self._log.line(
            step,
            '[DynSample-SYNC] Rank %d: After resample #%d, global_pool=%s',
            self._log.name,
            step.attempt,
            self._log.format_progress(step),
        )
        return result

    def _deviations(self, step: StepInProgress) -> float:
        """Return by how many standard deviations a resample asks for less than the deficit."""
        last = step.attempt == self.settings.max_resample_times
        if self.settings.max_age:
            # Surplus is used in the next step.
            return -2.0 if last else 0.0
        return 0.0 if last else 1.0

    def _round(
        self,
        step: StepInProgress,
        wanted: Sequence[int],
        initial: Optional[Sequence[Sequence[Any]]],
    ) -> Round:
        """Fetch and judge on this process, and return the counts of all ranks. Collective.

        Args:
            step: The step, whose statistics change.
            wanted: Number of samples that each virtual rank asks for.
            initial: Batch of each virtual rank of this process; fetched when None.
        """
        for findings in step.findings:
            findings.begin_round()
        failure: Optional[Exception] = None
        quantile = self.settings.validity.quantile
        threshold = None if quantile is None else self._scores.quantile(quantile)
        try:
            if self.settings.group_key is None:
                for position, findings in enumerate(step.findings):
                    self._judge.fetch_and_judge(
                        step,
                        findings,
                        wanted[findings.rank],
                        None if initial is None else initial[position],
                        threshold,
                    )
            else:
                self._draw_keyed(step, wanted, initial, threshold)
        # From a score, a loop would take it for the end of the data.
        except StopIteration as error:
            failure = RuntimeError(
                f'the score or its observer raised {error!r}: '
                f'look for a next() in it without a default.'
            )
        except Exception as error:
            # All ranks learn of it and raise.
            failure = error
        ended = all(findings.ended for findings in step.findings)
        result = compare_round(
            self._consensus,
            self._ranks,
            failure,
            [
                dict(
                    valid=len(findings.usable) * self.settings.group_size,
                    judged=findings.judged,
                    passed=findings.passed,
                    not_finite=findings.not_finite,
                    original=len(findings.original) * self.settings.group_size,
                )
                for findings in step.findings
            ],
            step=self._step,
            attempt=step.attempt,
            status=FAILED if failure else ENDED if ended else OK,
        )
        stats = step.stats
        judged, passed = sum(result.judged), sum(result.passed)
        self._rate.add(judged, passed, sum(result.not_finite))
        self._share_scores(step, result)
        stats.judged, stats.passed = stats.judged + judged, stats.passed + passed
        stats.not_finite += sum(result.not_finite)
        stats.valid = sum(result.valid)
        stats.missing = max(0, self.global_target - stats.valid)
        return result

    def _draw_keyed(
        self,
        step: StepInProgress,
        wanted: Sequence[int],
        initial: Optional[Sequence[Sequence[Any]]],
        threshold: Optional[float],
    ) -> None:
        """Fetch on this process, and judge the groups of all ranks by their keys. Collective.

        Raises:
            RankError: If another rank failed to fetch or score; that rank raises its own exception.
            Exception: Whatever the observer raises, after the collectives.
        """
        assert self.settings.group_key is not None
        samples: List[List[Any]] = [[] for _ in step.findings]
        keys: List[List[int]] = [[] for _ in step.findings]
        tables = [torch.empty(0, 1, dtype=torch.float64) for _ in step.findings]
        failure: Optional[Exception] = None
        try:
            for position, findings in enumerate(step.findings):
                samples[position], scores = self._judge.fetch(
                    step,
                    findings,
                    wanted[findings.rank],
                    None if initial is None else initial[position],
                )
                keys[position] = [
                    key_number(self.settings.group_key(sample)) for sample in samples[position]
                ]
                if samples[position]:
                    tables[position] = scores.view(len(samples[position]), -1)
        # All ranks learn of it and raise.
        except Exception as error:
            failure = error
        # Whoever has failed has no scores to share.
        drawn = compare_round(
            self._consensus,
            self._ranks,
            failure,
            [
                dict(valid=0, judged=len(rank_samples), passed=0, not_finite=0, original=0)
                for rank_samples in samples
            ],
            step=self._step,
            attempt=step.attempt,
            status=FAILED if failure else OK,
        ).judged
        if not max(drawn):
            return
        verdicts = judge_across_ranks(
            self._consensus.channel,
            self._ranks,
            self.settings.validity,
            keys,
            tables,
            drawn,
            threshold,
        )
        for findings, rank_samples, rank_keys in zip(step.findings, samples, keys):
            self._judge.add_keyed(step, findings, rank_samples, rank_keys, verdicts)

    def _share_scores(self, step: StepInProgress, result: Round) -> None:
        """Add the round's scores to the windows. Collective with a quantile: of all ranks then."""
        local_scores = [findings.scores for findings in step.findings]
        for scores in local_scores:
            self._watch.add(scores)
        # The longest list sets the shape on every rank.
        most = max(result.judged) // self.settings.group_size
        if self.settings.validity.quantile is not None and most:
            rows = gather_rows(self._consensus.channel, self._ranks, local_scores, most, math.nan)
            self._scores.add([score for row in rows for score in row])

    def _decide(self, step: StepInProgress, result: Round) -> Decision:
        if step.stats.missing:
            self._log.line(
                step,
                '[DynSample] Shortage: %d/%d samples missing',
                step.stats.missing,
                self.global_target,
            )
        try:
            decision = decide_shortfall(
                self.settings.shortfall,
                result.valid,
                result.original,
                self.settings.local_target,
                self.settings.group_size,
            )
        except ShortfallError:
            step.stats.outcome = self.settings.shortfall
            # Store the groups, so that none is lost if the caller continues.
            self._store_unused(step, set())
            raise
        step.stats.outcome = decision.outcome
        return decision

    def _hand_out(self, step: StepInProgress, decision: Decision) -> List[SampledBatch]:
        """Return the batch of each virtual rank of this process. Collective."""
        stats, size, plan = step.stats, self.settings.group_size, decision.plan
        fallen_back = decision.outcome == FALLBACK
        supplied: List[List[DatedSample]] = []
        repeats = invalid = 0
        groups: List[List[Group]] = []
        used: Set[int] = set()
        for findings in step.findings:
            source = findings.original if fallen_back else findings.usable
            supply = decision.supplies[findings.rank]
            samples = [
                DatedSample(sample, group.found_at, group.scores)
                for group in source
                for sample in group.samples
            ]
            supplied.append([samples[index] for index in supply])
            groups.append([source[index // size] for index in supply])
            stats.replicated += len(supply) - len(samples)
            # Groups are left over only where none is replicated.
            left = len(plan.leftover(findings.rank)) // size
            used.update(id(group) for group in source[: len(source) - left])
            repeats += len(supply) - len(set(supply))
            invalid += sum(bool(group.reason) for group in source[: len(source) - left])
        if stats.missing:
            local_counts = torch.tensor([repeats, invalid])
            counts = torch.stack(self._consensus.channel.gather(local_counts)).sum(0).tolist()
            self._log.shortfall(step, *counts)
        dated = exchange_blocks(
            supplied, plan, self._ranks, self._consensus.channel, self._place_dated, stats.traffic
        )
        weights = self._weights(groups, decision)
        samples_by_rank = [[sample.sample for sample in batch] for batch in dated]
        make_distinct(samples_by_rank)
        stats.moved_samples = len(plan.moves)
        for rank, batch in zip(self._block, dated):
            stats.sent += plan.given[rank]
            stats.received += len(batch) - plan.kept(rank)
            self._log.batch(step, rank, len(batch), None if fallen_back else plan.slice_of(rank))
        self._store_unused(step, used)
        return [
            SampledBatch(
                rank_samples,
                decision.loss_weights[rank],
                stats,
                rank_weights,
                tuple(stats.step - sample.found_at for sample in batch),
                tuple(sample.group_scores for sample in batch) if self.settings.group_key else (),
            )
            for rank, rank_samples, rank_weights, batch in zip(
                self._block, samples_by_rank, weights, dated
            )
        ]

    def _place_dated(self, dated: DatedSample) -> DatedSample:
        return dated if self._place is None else dated._replace(sample=self._place(dated.sample))

    def _weights(
        self, supplied: Sequence[Sequence[Group]], decision: Decision
    ) -> List[Tuple[float, ...]]:
        """Return the weight of each sample in the batches. Collective where they may differ.

        A group that was kept with probability k weighs 1/k, times the mean of k over all groups, so
        that the mean weight is 1 and the learning rate keeps its meaning. The original batch was
        not filtered.

        Args:
            supplied: The group of each sample that the virtual ranks of this process supply.
            decision: Decision of the step.
        """
        unbiased = self.settings.unbiased and decision.outcome != FALLBACK
        if not unbiased and not decision.sample_weights:
            return [(1.0,) * decision.plan.targets[rank] for rank in self._block]
        local_weights = [[1.0] * len(groups) for groups in supplied]
        if unbiased:
            share = self._rate.kept(self.settings.keep_fraction)
            local_weights = [
                [
                    share / self.settings.keep_fraction if group.at_random else share
                    for group in groups
                ]
                for groups in supplied
            ]
        if decision.sample_weights:
            local_weights = [
                [weight * factor for weight, factor in zip(weights, decision.sample_weights[rank])]
                for rank, weights in zip(self._block, local_weights)
            ]
        return [
            tuple(weights)
            for weights in exchange_weights(
                self._consensus.channel, decision.plan, local_weights, self._ranks
            )
        ]

    def _store_unused(self, step: StepInProgress, used: Set[int]) -> None:
        """Store the unused groups in the pools, and count the ones that the pools refuse."""
        for pool, findings in zip(self._pools, step.findings):
            for group in findings.original:
                if group.reason and id(group) not in used:
                    step.stats.drop(group.reason, self.settings.group_size)
            rest = [group for group in findings.usable if id(group) not in used]
            step.stats.drop(SURPLUS, len(pool.put(rest)) * self.settings.group_size)


def _describe_ranks(start: int, stop: int, count: int) -> str:
    """Return the virtual ranks of a process in words."""
    return (
        f'rank {start} of {count}'
        if stop == start + 1
        else f'ranks {start} to {stop - 1} of {count}'
    )
