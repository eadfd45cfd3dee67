"""The loop in which all ranks together fill the global batch with valid samples."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.accelerator import derived_seed
from mapsage.distributed import Consensus, Facts

from .exchange import PURPOSE, exchange
from .lockstep import ENDED, FAILED, FIELDS, OK, check_equal_settings, compare_round
from .pool import Group, SurplusPool
from .refill import PassRate, refill_rounds
from .shortfall import Decision, ShortfallError, check_policy, decide_shortfall
from .statistics import EXPIRED, SURPLUS, StepStatistics, Totals
from .validity import NOT_FINITE, Validity


class EndOfData(RuntimeError):
    """Every rank's loader had ended when the step began."""


@dataclass
class SampledBatch:
    """This rank's share of one step.

    Attributes:
        samples: The samples to train on.
        loss_weight: Factor by which the mean loss over the samples is multiplied.
        statistics: Counts and times of the step.
    """

    samples: List[Any]
    loss_weight: float
    statistics: StepStatistics


@dataclass
class _Step:
    """One step in progress, on this rank.

    Attributes:
        stats: Statistics of the step so far.
        held: Valid groups this rank has now.
        original: The batch that the step began with.
        rejected_original: Samples of ``original`` that are not valid, counted by reason.
        attempt: Number of the resample, 0 for the initial batch.
        ended: Whether this rank's loader has no more batches.
        judged: Samples judged in this round.
        passed: How many of these are valid.
        not_finite: How many of these are in a group with a score that is not finite.
    """

    stats: StepStatistics
    held: List[Group]
    original: List[Any] = field(default_factory=list)
    rejected_original: Dict[str, int] = field(default_factory=dict)
    attempt: int = 0
    ended: bool = False
    judged: int = 0
    passed: int = 0
    not_finite: int = 0


class DynamicSampler:
    """Fetch, score and judge on all ranks in lockstep until every rank has its share.

    Creating one is collective, and so is every :meth:`sample`. A step in which every
    rank's batch is valid costs one collective of 64 bytes from each rank.

    Args:
        fetch: Function that returns the next batch of this rank's loader as a sequence of
            samples, possibly empty, and raises StopIteration when there is none.
        score: Function that returns one number for each sample of a batch, on any device.
        validity: Criteria that decide by its scores whether a group is valid.
        local_target: Number of samples for each rank.
        group_size: Number of consecutive samples that stay together; divides ``local_target``.
        max_resample_times: Number of resamples a step may make. The samples of each are judged.
        shortfall: Policy for when the resamples do not suffice, see :func:`decide_shortfall`.
        max_age: Number of steps that a surplus group may wait for its use.
        max_refill_rounds: Number of batches that one resample may fetch on each rank.
        keep_fraction: Probability with which a group that is not valid is kept nevertheless.
        seed: Seed of that choice, which also depends on rank, step and resample.
        group: Process group of the ranks that sample together; with None all ranks, over a gloo
            group of its own.
        timeout: Seconds a rank may be late; the group's own timeout when None.
        place: Function that returns a sample from another rank on the device where this rank
            needs it.
        observe: Function called with the samples of each group and the reason why it is dropped,
            ``''`` if it is kept.
        logger: Logger for INFO lines on the first rank about steps with missing samples, and for
            DEBUG lines otherwise.

    Attributes:
        totals: Sums over the steps since the caller last cleared them.

    Raises:
        ValueError: For a setting out of range.
        LockstepError: On every rank, if a rank has different settings.
    """

    def __init__(self, fetch: Callable[[], Sequence[Any]], score: Callable[[Sequence[Any]], Any],
                 validity: Validity, local_target: int, group_size: int = 1,
                 max_resample_times: int = 3, shortfall: str = 'fallback', max_age: int = 1,
                 max_refill_rounds: int = 4, keep_fraction: float = 0.0, seed: int = 0,
                 group: Optional[dist.ProcessGroup] = None, timeout: Optional[float] = None,
                 place: Optional[Callable[[Any], Any]] = None,
                 observe: Optional[Callable[[Sequence[Any], str], None]] = None,
                 logger: Optional[logging.Logger] = None) -> None:
        self._fetch, self._score, self._validity = fetch, score, validity
        self.local_target, self.group_size = local_target, group_size
        self.max_resample_times, self.max_refill_rounds = max_resample_times, max_refill_rounds
        self.shortfall, self.keep_fraction, self.seed = shortfall, keep_fraction, seed
        self._exchange: Dict[str, Any] = dict(group=group, place=place, timeout=timeout)
        self._consensus = Consensus(FIELDS, group, timeout, purpose=PURPOSE)
        channel = self._consensus.channel
        check_equal_settings(channel, (
            f'local_target={local_target}, group_size={group_size}, '
            f'max_resample_times={max_resample_times}, shortfall={shortfall!r}, '
            f'max_age={max_age}, max_refill_rounds={max_refill_rounds}, '
            f'keep_fraction={keep_fraction}, {validity}'))
        _check(local_target, group_size, max_resample_times, max_refill_rounds, keep_fraction)
        check_policy(shortfall)
        validity.check_group_size(group_size)
        self._world, self._rank = len(channel.ranks), channel.ranks.index(channel.rank)
        self._global_rank = channel.rank
        self._observe = observe
        self._logger = logger or logging.getLogger(__name__)
        self._pool = SurplusPool(max_age)
        self._rate = PassRate()
        self._step = 0
        self.totals = Totals()

    @property
    def global_target(self) -> int:
        """Number of samples for all ranks together."""
        return self.local_target * self._world

    @property
    def step(self) -> int:
        """Number of the step in progress or of the last one; the first is 1."""
        return self._step

    def sample(self, initial: Optional[Sequence[Any]] = None) -> SampledBatch:
        """Return this rank's share of the next step. Collective.

        Args:
            initial: Batch to begin with; fetched when None.

        Raises:
            EndOfData: On every rank, if no loader gave an initial batch. The pool is as before.
            ShortfallError: On every rank, as the policy says.
            RankError: If another rank failed to fetch or score; that one raises its own exception.
            LockstepError: On every rank, if they are in different steps.
            RankLostError: Naming the ranks that did not come.
        """
        started = time.perf_counter()
        self._step += 1
        self._rate.age()
        held, expired = self._pool.take(self._step)
        step = _Step(StepStatistics(step=self._step, goal=self.global_target), list(held))
        step.stats.drop(EXPIRED, len(expired) * self.group_size)
        try:
            decision = self._collect(step, initial)
        except ShortfallError:
            raise  # the samples found are in the pool already
        except Exception:
            self._step -= 1
            self._pool.put(expired + held)  # a checkpoint may be written before the run ends
            raise
        batch = self._hand_out(step, decision)
        step.stats.used = len(batch)
        step.stats.seconds = time.perf_counter() - started
        self.totals.add(step.stats)
        return SampledBatch(batch, decision.loss_weights[self._rank], step.stats)

    def _collect(self, step: _Step, initial: Optional[Sequence[Any]]) -> Decision:
        """Fetch and judge until there are enough samples or no attempts are left. Collective."""
        found = self._round(step, 1, initial)
        if found.min('status') == ENDED:
            raise EndOfData(f'step {step.stats.step}: the loaders of all {self._world} rank(s) '
                            f'have ended.')
        step.stats.initial = step.stats.valid
        self._log(step, '[DynSample] Initial batch: collected %s valid samples globally',
                  self._of_goal(step))
        while self._wants_more(step, found):
            found = self._resample(step, found)
        return self._decide(step, found)

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this rank: step, pass rate and pool."""
        return dict(step=self._step, rate=self._rate.state_dict(), pool=self._pool.state_dict())

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._step = state['step']
        self._rate.load_state_dict(state['rate'])
        self._pool.load_state_dict(state['pool'])

    def _wants_more(self, step: _Step, found: Facts) -> bool:
        return (step.stats.missing > 0 and step.attempt < self.max_resample_times
                and found.min('status') != ENDED)

    def _resample(self, step: _Step, found: Facts) -> Facts:
        step.attempt += 1
        in_a_round = found.sum('original') or self.global_target
        rate = self._rate.value
        rounds = refill_rounds(step.stats.missing, rate + (1 - rate) * self.keep_fraction,
                               in_a_round, self.max_refill_rounds)
        self._log(step, '[DynSample] Resample #%d/%d: global_collected=%s, need %d more',
                  step.attempt, self.max_resample_times, self._of_goal(step), step.stats.missing)
        self._log(step, '[DynSample-SYNC] Rank %d: Fetching new batch for resample #%d%s',
                  self._global_rank, step.attempt, f' ({rounds} rounds)' if rounds > 1 else '')
        found = self._round(step, rounds, None)
        step.stats.attempts, step.stats.rounds = step.attempt, step.stats.rounds + rounds
        self._log(step, '[DynSample-SYNC] Rank %d: After resample #%d, global_pool=%s',
                  self._global_rank, step.attempt, self._of_goal(step))
        return found

    def _round(self, step: _Step, rounds: int, initial: Optional[Sequence[Any]]) -> Facts:
        """Fetch and judge on this rank, and return what all ranks have found. Collective."""
        step.judged = step.passed = step.not_finite = 0
        failure = None
        try:
            for number in range(rounds):
                self._fetch_and_judge(step, number, initial)
        except Exception as error:  # sent to all ranks and raised there
            failure = error
        status = FAILED if failure else ENDED if step.ended else OK
        found = compare_round(
            self._consensus, failure, step=self._step, attempt=step.attempt, status=status,
            valid=len(step.held) * self.group_size, judged=step.judged, passed=step.passed,
            not_finite=step.not_finite, original=len(step.original))
        stats = step.stats
        judged, passed = found.sum('judged'), found.sum('passed')
        self._rate.add(judged, passed)
        stats.judged, stats.passed = stats.judged + judged, stats.passed + passed
        stats.not_finite += found.sum('not_finite')
        stats.valid = found.sum('valid')
        stats.missing = max(0, self.global_target - stats.valid)
        return found

    def _fetch_and_judge(self, step: _Step, number: int,
                         initial: Optional[Sequence[Any]]) -> None:
        if step.ended:
            return
        try:
            samples = list(self._fetch() if initial is None else initial)
        except StopIteration:
            step.ended = True
            return
        first = not step.attempt
        if first:
            step.original = samples
        size = self.group_size
        if len(samples) % size:
            raise ValueError(f'a batch of {len(samples)} samples does not make whole groups of '
                             f'group_size={size}. Set a batch size that it divides, and drop_last.')
        if not samples:
            return
        scores = self._score(samples)
        verdict = self._validity.judge(scores, size)
        if len(verdict.reasons) * size != len(samples):
            raise ValueError(f'{len(verdict.reasons) * size} scores for {len(samples)} samples, '
                             f'expected one a sample.')
        step.stats.fetched += len(samples)
        step.judged += len(samples)
        kept_at_random = self._keep_at_random(len(verdict.reasons), step.attempt, number)
        for index, reason in enumerate(verdict.reasons):
            step.passed += 0 if reason else size
            step.not_finite += size if reason == NOT_FINITE else 0
            if reason and reason != NOT_FINITE and kept_at_random[index]:
                step.stats.unfiltered += size
                reason = ''
            group = samples[index * size:(index + 1) * size]
            if self._observe is not None:
                self._observe(group, reason)
            if not reason:
                step.held.append(Group(group, self._step, first))
            elif first:  # the fallback policy may still use it
                step.rejected_original[reason] = step.rejected_original.get(reason, 0) + size
            else:
                step.stats.drop(reason, size)

    def _keep_at_random(self, groups: int, attempt: int, number: int) -> List[bool]:
        """Return which groups are kept whatever their scores; the same after a resume."""
        if not self.keep_fraction:
            return [False] * groups
        generator = torch.Generator().manual_seed(
            derived_seed(self.seed, self._rank, self._step, attempt, number))
        return (torch.rand(groups, generator=generator) < self.keep_fraction).tolist()

    def _decide(self, step: _Step, found: Facts) -> Decision:
        if step.stats.missing:
            self._log(step, '[DynSample] Shortage: %d/%d samples missing', step.stats.missing,
                      self.global_target)
        try:
            decision = decide_shortfall(
                self.shortfall, list(found.by_rank('valid').values()),
                list(found.by_rank('original').values()), self.local_target, self.group_size)
        except ShortfallError:
            step.stats.outcome = self.shortfall
            self._leave(step, step.held)  # so that they are not lost if the caller goes on
            self.totals.add(step.stats)
            raise
        step.stats.outcome = decision.outcome
        return decision

    def _hand_out(self, step: _Step, decision: Decision) -> List[Any]:
        stats, size = step.stats, self.group_size
        if decision.plan is None:
            rest = [group for group in step.held if not group.original]
            step.rejected_original.clear()
            batch = step.original
            self._log(step, '[DynSample] Rank %d: Using %d samples of the original batch after %d '
                      'resample(s)', self._global_rank, len(batch), step.attempt)
        else:
            plan, supply = decision.plan, decision.supplies[self._rank]
            samples = [sample for group in step.held for sample in group.samples]
            batch = exchange([samples[index] for index in supply], plan, traffic=stats.traffic,
                             **self._exchange)
            begin, end = plan.slice_of(self._rank)
            # groups are left over only where none is replicated
            rest = step.held[len(step.held) - len(plan.leftover(self._rank)) // size:]
            stats.moved_samples = len(plan.moves)
            stats.sent = plan.given[self._rank]
            stats.received = len(batch) - plan.kept(self._rank)
            stats.replicated = len(supply) - len(samples)
            self._log(step, '[DynSample-FINAL] Rank %d: Slicing global pool [%d:%d], got %d '
                      'samples', self._global_rank, begin, end, len(batch))
            self._log(step, '[DynSample] Rank %d: Using %d valid samples (%d groups) from global '
                      'pool after %d resample(s)', self._global_rank, len(batch),
                      len(batch) // size, step.attempt)
        self._leave(step, rest)
        return batch

    def _leave(self, step: _Step, rest: Sequence[Group]) -> None:
        """Keep the groups that were not used, and count those that cannot be kept."""
        for reason, count in step.rejected_original.items():
            step.stats.drop(reason, count)
        step.stats.drop(SURPLUS, len(self._pool.put(rest)) * self.group_size)
        step.stats.surplus = len(self._pool) * self.group_size

    def _of_goal(self, step: _Step) -> str:
        return f'{min(step.stats.valid, self.global_target)}/{self.global_target}'

    def _log(self, step: _Step, line: str, *values: Any) -> None:
        work = step.attempt or step.stats.missing
        self._logger.log(logging.INFO if work and not self._rank else logging.DEBUG, line, *values)


def _check(local_target: int, group_size: int, max_resample_times: int, max_refill_rounds: int,
           keep_fraction: float) -> None:
    if group_size < 1 or local_target < 1 or local_target % group_size:
        size = max(1, group_size)
        raise ValueError(f'local_target={local_target}, group_size={group_size}: expected a whole '
                         f'number of groups on each rank, for example local_target='
                         f'{max(1, local_target // size) * size}, group_size={size}.')
    if max_resample_times < 0:
        raise ValueError(f'max_resample_times={max_resample_times}, expected 0 or more.')
    if max_refill_rounds < 1:
        raise ValueError(f'max_refill_rounds={max_refill_rounds}, expected 1 or more.')
    if not 0 <= keep_fraction <= 1:
        raise ValueError(f'keep_fraction={keep_fraction}, expected a share from 0 to 1.')
