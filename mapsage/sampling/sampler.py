"""The loop that all ranks walk in step until the global batch is full of valid samples."""
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
        loss_weight: What the mean loss over them is multiplied by.
        statistics: How it came about.
    """

    samples: List[Any]
    loss_weight: float
    statistics: StepStatistics


@dataclass
class _Step:
    """One step in progress, on this rank."""

    stats: StepStatistics
    held: List[Group]
    original: List[Any] = field(default_factory=list)
    rejected_original: Dict[str, int] = field(default_factory=dict)
    attempt: int = 0
    ended: bool = False
    judged: int = 0  # in this round, as the next two
    passed: int = 0
    not_finite: int = 0


class DynamicSampler:
    """Fetch, score and judge on all ranks in lockstep until every rank has its share.

    Making one is collective, and so is every :meth:`sample`. A step in which every rank's batch is
    valid costs one collective of 64 bytes a rank.

    Args:
        fetch: Returns the next batch of this rank's loader as a sequence of samples, possibly
            empty; raises StopIteration when there is none.
        score: Returns one number a sample of a batch, on any device.
        validity: Decides about groups by their scores.
        local_target: Samples a rank shall have.
        group_size: Samples that stay together, consecutive in a batch; divides ``local_target``.
        max_resample_times: Resamples a step may make. Each is judged.
        shortfall: What happens when they do not suffice, see :func:`decide_shortfall`.
        max_age: Steps a surplus group may wait for its use.
        max_refill_rounds: Batches of each rank that one resample may fetch.
        keep_fraction: Probability with which a group that is not valid is kept all the same.
        seed: Of that choice; it also depends on rank, step and resample.
        group: The ranks that sample together; all when None, over a gloo group of its own.
        timeout: Seconds a rank may be late; the group's own time-out when None.
        place: Puts a sample that arrives from another rank where this rank wants it.
        observe: Called with the samples of each group and why it is dropped, ``''`` if it is kept.
        logger: Gets INFO lines on the first rank for steps with work, DEBUG lines otherwise.

    Attributes:
        totals: Sums over the steps; clear it at will.

    Raises:
        ValueError: For a setting out of range.
        LockstepError: On every rank, if a rank has other settings.
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
        """Samples that all ranks together shall have."""
        return self.local_target * self._world

    @property
    def step(self) -> int:
        """The step in progress, or the last one: 1 for the first."""
        return self._step

    def sample(self, initial: Optional[Sequence[Any]] = None) -> SampledBatch:
        """Return this rank's share of the next step. Collective.

        Args:
            initial: The batch to begin with; fetched when None.

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
        now = _Step(StepStatistics(step=self._step, goal=self.global_target), list(held))
        now.stats.drop(EXPIRED, len(expired) * self.group_size)
        try:
            decision = self._collect(now, initial)
        except ShortfallError:
            raise  # it has kept what it found
        except Exception:
            self._step -= 1
            self._pool.put(expired + held)  # a checkpoint on the way down holds them
            raise
        batch = self._hand_out(now, decision)
        now.stats.used = len(batch)
        now.stats.seconds = time.perf_counter() - started
        self.totals.add(now.stats)
        return SampledBatch(batch, decision.loss_weights[self._rank], now.stats)

    def _collect(self, now: _Step, initial: Optional[Sequence[Any]]) -> Decision:
        """Fetch and judge until there is enough, or the attempts are spent. Collective."""
        found = self._round(now, 1, initial)
        if found.min('status') == ENDED:
            raise EndOfData(f'step {now.stats.step}: the loaders of all {self._world} rank(s) have '
                            f'ended.')
        now.stats.initial = now.stats.valid
        self._log(now, '[DynSample] Initial batch: collected %s valid samples globally',
                  self._of_goal(now))
        while self._wants_more(now, found):
            found = self._resample(now, found)
        return self._decide(now, found)

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this rank: step, pass rate and pool."""
        return dict(step=self._step, rate=self._rate.state_dict(), pool=self._pool.state_dict())

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._step = state['step']
        self._rate.load_state_dict(state['rate'])
        self._pool.load_state_dict(state['pool'])

    def _wants_more(self, now: _Step, found: Facts) -> bool:
        return (now.stats.missing > 0 and now.attempt < self.max_resample_times
                and found.min('status') != ENDED)

    def _resample(self, now: _Step, found: Facts) -> Facts:
        now.attempt += 1
        in_a_round = found.sum('original') or self.global_target
        rate = self._rate.value
        rounds = refill_rounds(now.stats.missing, rate + (1 - rate) * self.keep_fraction,
                               in_a_round, self.max_refill_rounds)
        self._log(now, '[DynSample] Resample #%d/%d: global_collected=%s, need %d more',
                  now.attempt, self.max_resample_times, self._of_goal(now), now.stats.missing)
        self._log(now, '[DynSample-SYNC] Rank %d: Fetching new batch for resample #%d%s',
                  self._global_rank, now.attempt, f' ({rounds} rounds)' if rounds > 1 else '')
        found = self._round(now, rounds, None)
        now.stats.attempts, now.stats.rounds = now.attempt, now.stats.rounds + rounds
        self._log(now, '[DynSample-SYNC] Rank %d: After resample #%d, global_pool=%s',
                  self._global_rank, now.attempt, self._of_goal(now))
        return found

    def _round(self, now: _Step, rounds: int, initial: Optional[Sequence[Any]]) -> Facts:
        """Fetch and judge on this rank, and learn what all ranks now have. Collective."""
        now.judged = now.passed = now.not_finite = 0
        failure = None
        try:
            for number in range(rounds):
                self._fetch_and_judge(now, number, initial)
        except Exception as error:  # travels to all ranks and is raised again there
            failure = error
        status = FAILED if failure else ENDED if now.ended else OK
        found = compare_round(
            self._consensus, failure, step=self._step, attempt=now.attempt, status=status,
            valid=len(now.held) * self.group_size, judged=now.judged, passed=now.passed,
            not_finite=now.not_finite, original=len(now.original))
        stats = now.stats
        judged, passed = found.sum('judged'), found.sum('passed')
        self._rate.add(judged, passed)
        stats.judged, stats.passed = stats.judged + judged, stats.passed + passed
        stats.not_finite += found.sum('not_finite')
        stats.valid = found.sum('valid')
        stats.missing = max(0, self.global_target - stats.valid)
        return found

    def _fetch_and_judge(self, now: _Step, number: int,
                         initial: Optional[Sequence[Any]]) -> None:
        if now.ended:
            return
        try:
            samples = list(self._fetch() if initial is None else initial)
        except StopIteration:
            now.ended = True
            return
        first = not now.attempt
        if first:
            now.original = samples
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
        now.stats.fetched += len(samples)
        now.judged += len(samples)
        lucky = self._lucky(len(verdict.reasons), now.attempt, number)
        for index, reason in enumerate(verdict.reasons):
            now.passed += 0 if reason else size
            now.not_finite += size if reason == NOT_FINITE else 0
            if reason and reason != NOT_FINITE and lucky[index]:
                now.stats.unfiltered += size
                reason = ''
            group = samples[index * size:(index + 1) * size]
            if self._observe is not None:
                self._observe(group, reason)
            if not reason:
                now.held.append(Group(group, self._step, first))
            elif first:  # it may yet be used, by fallback
                now.rejected_original[reason] = now.rejected_original.get(reason, 0) + size
            else:
                now.stats.drop(reason, size)

    def _lucky(self, groups: int, attempt: int, number: int) -> List[bool]:
        """Return which groups are kept whatever their scores; reproducible after a resume."""
        if not self.keep_fraction:
            return [False] * groups
        generator = torch.Generator().manual_seed(
            derived_seed(self.seed, self._rank, self._step, attempt, number))
        return (torch.rand(groups, generator=generator) < self.keep_fraction).tolist()

    def _decide(self, now: _Step, found: Facts) -> Decision:
        if now.stats.missing:
            self._log(now, '[DynSample] Shortage: %d/%d samples missing', now.stats.missing,
                      self.global_target)
        try:
            decision = decide_shortfall(
                self.shortfall, list(found.by_rank('valid').values()),
                list(found.by_rank('original').values()), self.local_target, self.group_size)
        except ShortfallError:
            now.stats.outcome = self.shortfall
            self._leave(now, now.held)  # not lost, should the caller go on
            self.totals.add(now.stats)
            raise
        now.stats.outcome = decision.outcome
        return decision

    def _hand_out(self, now: _Step, decision: Decision) -> List[Any]:
        stats, size = now.stats, self.group_size
        if decision.plan is None:
            rest = [group for group in now.held if not group.original]
            now.rejected_original.clear()
            batch = now.original
            self._log(now, '[DynSample] Rank %d: Using %d samples of the original batch after %d '
                      'resample(s)', self._global_rank, len(batch), now.attempt)
        else:
            plan, supply = decision.plan, decision.supplies[self._rank]
            samples = [sample for group in now.held for sample in group.samples]
            batch = exchange([samples[index] for index in supply], plan, traffic=stats.traffic,
                             **self._exchange)
            begin, end = plan.slice_of(self._rank)
            # only where nothing is replicated does anything stay behind
            rest = now.held[len(now.held) - len(plan.leftover(self._rank)) // size:]
            stats.moved_samples = len(plan.moves)
            stats.sent = plan.given[self._rank]
            stats.received = len(batch) - plan.kept(self._rank)
            stats.replicated = len(supply) - len(samples)
            self._log(now, '[DynSample-FINAL] Rank %d: Slicing global pool [%d:%d], got %d samples',
                      self._global_rank, begin, end, len(batch))
            self._log(now, '[DynSample] Rank %d: Using %d valid samples (%d groups) from global '
                      'pool after %d resample(s)', self._global_rank, len(batch),
                      len(batch) // size, now.attempt)
        self._leave(now, rest)
        return batch

    def _leave(self, now: _Step, rest: Sequence[Group]) -> None:
        """Keep what was not used, and count what cannot be kept."""
        for reason, count in now.rejected_original.items():
            now.stats.drop(reason, count)
        now.stats.drop(SURPLUS, len(self._pool.put(rest)) * self.group_size)
        now.stats.surplus = len(self._pool) * self.group_size

    def _of_goal(self, now: _Step) -> str:
        return f'{min(now.stats.valid, self.global_target)}/{self.global_target}'

    def _log(self, now: _Step, line: str, *values: Any) -> None:
        work = now.attempt or now.stats.missing
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
