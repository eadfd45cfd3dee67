"""The loop in which all ranks together fill the global batch with valid samples."""
from __future__ import annotations

import logging
import math
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from mapsage.accelerator import derived_seed
from mapsage.distributed import Consensus, check_descriptors, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks

from .collapse import CollapseWatch
from .exchange import PURPOSE, exchange_blocks
from .lockstep import (
    ENDED,
    FAILED,
    OK,
    Round,
    check_equal_settings,
    compare_round,
    round_fields,
)
from .pool import Group, SurplusPool
from .quantile import ScoreWindow
from .refill import PassRate, refill_rounds
from .shortfall import FALLBACK, Decision, ShortfallError, check_policy, decide_shortfall
from .statistics import EXPIRED, NOT_RESTORED, SURPLUS, StepStatistics, Totals
from .statistics import FAILED as OVERTAKEN
from .step import (
    EndOfData,
    Findings,
    SampledBatch,
    StepInProgress,
    check_settings,
    describe_keeping,
)
from .validity import NOT_FINITE, Validity
from .weights import exchange_weights, gather_rows

# Steps whose every line is in the log; later ones have their summaries and warnings.
_SHOWN_STEPS = 100


class BlockSampler:
    """A :class:`DynamicSampler` of a process that carries out several virtual ranks.

    Everything that decides anything counts by virtual ranks: targets, pools, what is drawn and
    kept at random, the order of the scores. So a step does not depend on the number of processes.

    Args:
        fetch: Function that returns the next batch of a virtual rank, by its number.
        score: Function that is called with the number of a virtual rank and samples of a batch.
        ranks: Virtual ranks and the processes of the group that carry them out; one in each process
            when None.
        **others: As for :class:`DynamicSampler`.
    """

    def __init__(self, fetch: Callable[[int], Sequence[Any]],
                 score: Callable[[int, Sequence[Any]], Any], validity: Validity, local_target: int,
                 ranks: Optional[VirtualRanks] = None, group_size: int = 1,
                 max_resample_times: int = 3, shortfall: str = 'fallback', max_age: int = 1,
                 max_refill_rounds: int = 4, keep_fraction: float = 0.0, unbiased: bool = False,
                 scores_per_sample: int = 1, seed: int = 0, group: Optional[Any] = None,
                 timeout: Optional[float] = None, place: Optional[Callable[[Any], Any]] = None,
                 observe: Optional[Callable[[Sequence[Any], str], None]] = None,
                 logger: Optional[logging.Logger] = None) -> None:
        self._fetch, self._score, self._validity = fetch, score, validity
        self.local_target, self.group_size = local_target, group_size
        self._scores_per_sample = scores_per_sample
        self.max_resample_times, self.max_refill_rounds = max_resample_times, max_refill_rounds
        self.shortfall, self.seed = shortfall, seed
        self.keep_fraction, self.unbiased = keep_fraction, unbiased
        self._exchange: Dict[str, Any] = dict(group=group, place=place, timeout=timeout)
        channel = open_channel(group, timeout, PURPOSE)
        processes = len(channel.ranks)
        self._ranks = ranks or VirtualRanks(processes, processes)
        self._block = self._ranks.block(channel.ranks.index(channel.rank))
        self._consensus = Consensus(round_fields(self._ranks), group, timeout, purpose=PURPOSE)
        check_descriptors(len(channel.ranks), 1)  # in time, any two may have samples to exchange
        check_equal_settings(channel, (
            f'local_target={local_target}, group_size={group_size}, '
            f'max_resample_times={max_resample_times}, shortfall={shortfall!r}, '
            f'max_age={max_age}, max_refill_rounds={max_refill_rounds}, '
            f'keep_fraction={keep_fraction}, unbiased={unbiased}, '
            f'scores_per_sample={scores_per_sample}, {validity}'))
        check_settings(local_target, group_size, max_resample_times, max_refill_rounds,
                       keep_fraction, unbiased)
        check_policy(shortfall)
        validity.check_group_size(group_size * scores_per_sample)
        self._world = self._ranks.count
        # For the log: global ranks where each process carries out one virtual rank.
        self._names = channel.ranks if self._ranks.one_each else range(self._world)
        self._observe = observe
        self._logger = logger or logging.getLogger(__name__)
        self._pools = [SurplusPool(max_age) for _ in self._block]
        self._rate = PassRate()
        self._scores = ScoreWindow()  # of all ranks, and equal on them, where a quantile is asked
        self._watch = CollapseWatch(validity, shortfall, self._logger)
        self._step = self._not_restored = 0
        self.totals = Totals()
        if keep_fraction and not self._block.start:
            self._logger.info(describe_keeping(keep_fraction, unbiased))

    @property
    def global_target(self) -> int:
        """Number of samples for all ranks together."""
        return self.local_target * self._world

    @property
    def step(self) -> int:
        """Number of the step in progress or of the last one; the first is 1."""
        return self._step

    def sample_block(self, initial: Optional[Sequence[Sequence[Any]]] = None
                     ) -> List[SampledBatch]:
        """Return the share of each virtual rank of this process in the next step. Collective.

        Args:
            initial: Batch that each of them begins with; fetched when None.

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
        carried = self._surplus() + self._not_restored
        held, expired = zip(*[pool.take(self._step) for pool in self._pools])
        stats = StepStatistics(step=self._step, goal=self.global_target, carried=carried)
        step = StepInProgress(stats, [Findings(*each) for each in zip(self._block, held)])
        try:
            decision = self._collect(step, initial)
            batches, weights = self._hand_out(step, decision)
        except ShortfallError:
            self._close(step, expired)  # the samples found are in the pool already
            self.totals.add(stats)
            raise
        except BaseException:  # KeyboardInterrupt, too: a checkpoint may be written before the end
            self._take_back(step, expired)
            raise
        self._close(step, expired)
        stats.used = sum(len(batch) for batch in batches)
        stats.seconds = time.perf_counter() - started
        self.totals.add(stats)
        self._watch.step(stats, self._consensus.channel)
        return [SampledBatch(batch, decision.loss_weights[rank], stats, own)
                for rank, batch, own in zip(self._block, batches, weights)]

    def _surplus(self) -> int:
        """Return the number of samples in the pools of this process."""
        return sum(len(pool) for pool in self._pools) * self.group_size

    def _close(self, step: StepInProgress, expired: Sequence[Sequence[Group]]) -> None:
        """Count what came with the pools into a step that is over, and its surplus."""
        step.stats.drop(EXPIRED, sum(len(each) for each in expired) * self.group_size)
        step.stats.drop(NOT_RESTORED, self._not_restored)
        self._not_restored = 0
        step.stats.surplus = self._surplus()

    def _take_back(self, step: StepInProgress, expired: Sequence[Sequence[Group]]) -> None:
        """Return to before a step that an error ended; what it found waits for the next attempt."""
        self._step -= 1
        for pool, old, found in zip(self._pools, expired, step.findings):
            pool.restore([*old, *found.held])
            for group in found.original:
                if group.reason:
                    step.stats.drop(group.reason, self.group_size)
        step.stats.drop(OVERTAKEN, step.unjudged)
        step.stats.surplus = self._surplus() + self._not_restored
        self.totals.add_unfinished(step.stats)

    def _collect(self, step: StepInProgress,
                 initial: Optional[Sequence[Sequence[Any]]]) -> Decision:
        """Fetch and judge until there are enough samples or no attempts are left. Collective."""
        found = self._round(step, 1, initial)
        if found.ended:
            raise EndOfData(f'step {step.stats.step}: the loaders of all {self._world} rank(s) '
                            f'have ended.')
        step.stats.initial = step.stats.valid
        step.stats.first_judged, step.stats.first_passed = step.stats.judged, step.stats.passed
        step.initial = sum(found.original)
        self._log(step, '[DynSample] Initial batch: collected %s valid samples globally',
                  self._of_goal(step))
        while self._wants_more(step, found):
            found = self._resample(step)
        return self._decide(step, found)

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this process: step, pass rate, latest scores, pools.

        The pools of its virtual ranks and ``not_restored``, samples left out of them and not
        counted yet, are of this process; the rest is equal on all.
        """
        return dict(step=self._step, rate=self._rate.state_dict(),
                    pools=[pool.state_dict() for pool in self._pools],
                    scores=self._scores.state_dict(), not_restored=self._not_restored)

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Samples left out of its pools add to not_restored."""
        self._step, self._not_restored = state['step'], state.get('not_restored', 0)
        self._rate.load_state_dict(state['rate'])
        for pool, groups in zip(self._pools, state['pools']):
            pool.load_state_dict(groups)
        self._scores.load_state_dict(state.get('scores', ()))

    def _wants_more(self, step: StepInProgress, found: Round) -> bool:
        return (step.stats.missing > 0 and step.attempt < self.max_resample_times
                and not found.ended)

    def _resample(self, step: StepInProgress) -> Round:
        step.attempt += 1
        rate = self._rate.value
        rounds = refill_rounds(step.stats.missing, rate + (1 - rate) * self.keep_fraction,
                               step.initial or self.global_target, self.max_refill_rounds)
        self._log(step, '[DynSample] Resample #%d/%d: global_collected=%s, need %d more',
                  step.attempt, self.max_resample_times, self._of_goal(step), step.stats.missing)
        self._log(step, '[DynSample-SYNC] Rank %d: Fetching new batch for resample #%d%s',
                  self._name, step.attempt, f' ({rounds} rounds)' if rounds > 1 else '')
        found = self._round(step, rounds, None)
        step.stats.attempts, step.stats.rounds = step.attempt, step.stats.rounds + rounds
        self._log(step, '[DynSample-SYNC] Rank %d: After resample #%d, global_pool=%s',
                  self._name, step.attempt, self._of_goal(step))
        return found

    def _round(self, step: StepInProgress, rounds: int,
               initial: Optional[Sequence[Sequence[Any]]]) -> Round:
        """Fetch and judge on this process, and return what all have found. Collective."""
        for own in step.findings:
            own.begin_round()
        failure: Optional[Exception] = None
        try:
            for number in range(rounds):
                for turn, own in enumerate(step.findings):
                    self._fetch_and_judge(step, own, number, None if initial is None
                                          else initial[turn])
        except StopIteration as error:  # of a score: a loop would take it for the end of the data
            failure = RuntimeError(f'the score or its observer raised {error!r}: '
                                   f'look for a next() in it without a default.')
        except Exception as error:  # sent to all ranks and raised there
            failure = error
        ended = all(own.ended for own in step.findings)
        found = compare_round(
            self._consensus, self._ranks, failure, [dict(
                valid=len(own.held) * self.group_size, judged=own.judged, passed=own.passed,
                not_finite=own.not_finite, original=len(own.original) * self.group_size)
                for own in step.findings],
            step=self._step, attempt=step.attempt,
            status=FAILED if failure else ENDED if ended else OK)
        stats = step.stats
        judged, passed = sum(found.judged), sum(found.passed)
        self._rate.add(judged, passed, sum(found.not_finite))
        self._share_scores(step, found)
        stats.judged, stats.passed = stats.judged + judged, stats.passed + passed
        stats.not_finite += sum(found.not_finite)
        stats.valid = sum(found.valid)
        stats.missing = max(0, self.global_target - stats.valid)
        return found

    def _fetch_and_judge(self, step: StepInProgress, own: Findings, number: int,
                         initial: Optional[Sequence[Any]]) -> None:
        if own.ended:
            return
        try:
            samples = list(self._fetch(own.rank) if initial is None else initial)
        except StopIteration:
            own.ended = True
            return
        if not samples:
            return
        size = self.group_size
        step.stats.fetched += len(samples)
        step.unjudged = len(samples)
        if len(samples) % size:
            raise ValueError(f'a batch of {len(samples)} samples does not make whole groups of '
                             f'group_size={size}. Set a batch size that it divides, and drop_last.')
        scores = self._score(own.rank, samples)
        verdict = self._validity.judge(scores, size * self._scores_per_sample, self._threshold())
        if len(verdict.reasons) * size != len(samples):
            raise ValueError(f'{len(verdict.reasons) * size} scores for {len(samples)} samples, '
                             f'expected one a sample.')
        own.judged += len(samples)
        own.scores += verdict.means.tolist()
        kept_at_random = self._keep_at_random(own.rank, len(verdict.reasons), step.attempt, number)
        for index, reason in enumerate(verdict.reasons):
            own.passed += 0 if reason else size
            own.not_finite += size if reason == NOT_FINITE else 0
            kept = bool(reason) and reason != NOT_FINITE and kept_at_random[index]
            group = Group(samples[index * size:(index + 1) * size], self._step,
                          '' if kept else reason, kept)
            if self._observe is not None:
                self._observe(group.samples, group.reason)
            self._keep(step, own, group)
            step.unjudged -= size

    def _keep(self, step: StepInProgress, own: Findings, group: Group) -> None:
        """Keep a group that was judged, or count it as dropped."""
        original = not step.attempt or len(own.original) * self.group_size < self.local_target
        if original:  # the fallback policy may use it, whether valid or not
            own.original.append(group)
        if not group.reason:
            own.held.append(group)
            step.stats.unfiltered += self.group_size if group.at_random else 0
        elif not original:
            step.stats.drop(group.reason, self.group_size)

    def _threshold(self) -> Optional[float]:
        quantile = self._validity.quantile
        return None if quantile is None else self._scores.quantile(quantile)

    def _share_scores(self, step: StepInProgress, found: Round) -> None:
        """Add the scores of the round, those of all ranks where a quantile is asked. Collective.

        The shape is that of the rank which judged most.
        """
        mine = [own.scores for own in step.findings]
        for scores in mine:
            self._watch.add(scores)
        most = max(found.judged) // self.group_size
        if self._validity.quantile is not None and most:
            rows = gather_rows(self._consensus.channel, self._ranks, mine, most, math.nan)
            self._scores.add([score for row in rows for score in row])

    def _keep_at_random(self, rank: int, groups: int, attempt: int, number: int) -> List[bool]:
        """Return which groups are kept whatever their scores; the same after a resume."""
        if not self.keep_fraction:
            return [False] * groups
        generator = torch.Generator().manual_seed(
            derived_seed(self.seed, rank, self._step, attempt, number))
        return (torch.rand(groups, generator=generator) < self.keep_fraction).tolist()

    def _decide(self, step: StepInProgress, found: Round) -> Decision:
        if step.stats.missing:
            self._log(step, '[DynSample] Shortage: %d/%d samples missing', step.stats.missing,
                      self.global_target)
        try:
            decision = decide_shortfall(
                self.shortfall, found.valid, found.original, self.local_target, self.group_size)
        except ShortfallError:
            step.stats.outcome = self.shortfall
            self._leave(step, set())  # so that they are not lost if the caller goes on
            raise
        step.stats.outcome = decision.outcome
        return decision

    def _hand_out(self, step: StepInProgress, decision: Decision
                  ) -> Tuple[List[List[Any]], List[Tuple[float, ...]]]:
        """Return the samples of each virtual rank and their weights. Collective."""
        stats, size, plan = step.stats, self.group_size, decision.plan
        fallen_back = decision.outcome == FALLBACK
        supplied: List[List[Any]] = []
        repeats = invalid = 0
        groups: List[List[Group]] = []
        used: Set[int] = set()
        for own in step.findings:
            source, supply = own.original if fallen_back else own.held, decision.supplies[own.rank]
            samples = [sample for group in source for sample in group.samples]
            supplied.append([samples[index] for index in supply])
            groups.append([source[index // size] for index in supply])
            stats.replicated += len(supply) - len(samples)
            # groups are left over only where none is replicated
            left = len(plan.leftover(own.rank)) // size
            used.update(id(group) for group in source[:len(source) - left])
            repeats += len(supply) - len(set(supply))
            invalid += sum(bool(group.reason) for group in source[:len(source) - left])
        if stats.missing:
            self._warn_of_shortfall(step, repeats, invalid)
        batches = exchange_blocks(supplied, plan, self._ranks, traffic=stats.traffic,
                                  **self._exchange)
        weights = self._weights(groups, decision)
        stats.moved_samples = len(plan.moves)
        for rank, batch in zip(self._block, batches):
            stats.sent += plan.given[rank]
            stats.received += len(batch) - plan.kept(rank)
            self._log_batch(step, rank, len(batch), None if fallen_back else plan.slice_of(rank))
        self._leave(step, used)
        return batches, weights

    def _warn_of_shortfall(self, step: StepInProgress, repeats: int, invalid: int) -> None:
        """Say on the first rank what a short step trains on. Collective.

        Args:
            step: The step, whose outcome is decided.
            repeats: Number of samples that this process supplies a second time.
            invalid: Number of groups that are not valid and that this process supplies.
        """
        mine = torch.tensor([repeats, invalid])
        counts = torch.stack(self._consensus.channel.gather(mine)).sum(0).tolist()
        if not self._block.start:
            self._logger.warning(
                '[DynSample] Step %d fell short: %s valid samples after %d resample(s), '
                'shortfall=%s. Of the samples it trains on %d repeat others, and %d group(s) are '
                'not valid.', step.stats.step, self._of_goal(step), step.attempt,
                step.stats.outcome, *counts)

    def _log_batch(self, step: StepInProgress, rank: int, count: int,
                   place: Optional[Tuple[int, int]]) -> None:
        name = self._names[rank]
        if place is None:
            self._log(step, '[DynSample] Rank %d: Using %d samples of the original batch after %d '
                      'resample(s)', name, count, step.attempt, rank=rank)
            return
        self._log(step, '[DynSample-FINAL] Rank %d: Slicing global pool [%d:%d], got %d samples',
                  name, *place, count, rank=rank)
        repeated = step.stats.outcome == 'pad'
        self._log(step, '[DynSample] Rank %d: Using %d %ssamples (%d groups) from global pool%s '
                  'after %d resample(s)', name, count, '' if repeated else 'valid ',
                  count // self.group_size, ', in which valid ones repeat,' if repeated else '',
                  step.attempt, rank=rank)

    def _weights(self, supplied: Sequence[Sequence[Group]],
                 decision: Decision) -> List[Tuple[float, ...]]:
        """Return the weight of each sample in the batches. Collective where they may differ.

        A group that was kept with probability k weighs 1/k, times the mean of k over all groups, so
        that the mean weight is 1 and the learning rate keeps its meaning. The original batch was
        not filtered.

        Args:
            supplied: The group of each sample that the virtual ranks of this process supply.
            decision: Decision of the step.
        """
        if not self.unbiased or decision.outcome == FALLBACK:
            return [(1.0,) * decision.plan.targets[rank] for rank in self._block]
        share = self._rate.kept(self.keep_fraction)
        mine = [[share / self.keep_fraction if group.at_random else share for group in groups]
                for groups in supplied]
        return [tuple(each) for each in exchange_weights(
            self._consensus.channel, decision.plan, mine, self._ranks)]

    def _leave(self, step: StepInProgress, used: Set[int]) -> None:
        """Keep the groups that were not used, and count those that cannot be kept."""
        for pool, own in zip(self._pools, step.findings):
            for group in own.original:
                if group.reason and id(group) not in used:
                    step.stats.drop(group.reason, self.group_size)
            rest = [group for group in own.held if id(group) not in used]
            step.stats.drop(SURPLUS, len(pool.put(rest)) * self.group_size)

    def _of_goal(self, step: StepInProgress) -> str:
        return f'{min(step.stats.valid, self.global_target)}/{self.global_target}'

    @property
    def _name(self) -> int:
        """Number by which the log calls the first virtual rank of this process."""
        return self._names[self._block.start]

    def _log(self, step: StepInProgress, line: str, *values: Any,
             rank: Optional[int] = None) -> None:
        work = step.attempt or step.stats.missing
        first = not (self._block.start if rank is None else rank)
        shown = work and first and self._step <= _SHOWN_STEPS
        self._logger.log(logging.INFO if shown else logging.DEBUG, line, *values)


class DynamicSampler(BlockSampler):
    """Fetch, score and judge on all ranks in lockstep until every rank has its share.

    Creating one is collective, and so is every :meth:`sample`. A step in which every
    rank's batch is valid costs one collective of 64 bytes from each rank. A validity with a
    quantile adds one of the scores, and ``unbiased`` one of the weights, 8 bytes for each group.

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
        unbiased: Whether such a group weighs ``1 / keep_fraction`` in :attr:`SampledBatch.weights`,
            so that the weighted batches have the class prior of the data.
        scores_per_sample: Number of scores of a sample, one after the other, such as rewards.
        seed: Seed of that choice, which also depends on rank, step and resample.
        group: Process group of the ranks that sample together; all ranks when None.
        timeout: Seconds a rank may be late; the group's own timeout when None.
        place: Function that returns a sample from another rank on the device where this rank
            needs it.
        observe: Function called with the samples of each group and the reason why it is dropped,
            ``''`` if it is kept.
        logger: Logger for a warning on the first rank about each step that falls short, for INFO
            lines there about the first 100 steps with missing samples, and for DEBUG lines
            otherwise.

    Attributes:
        totals: Sums over the steps since the caller last cleared them.

    Raises:
        ValueError: For a setting out of range.
        DescriptorLimitError: If this process may not open a connection to each rank.
        LockstepError: On every rank, if a rank has different settings.
    """

    def __init__(self, fetch: Callable[[], Sequence[Any]], score: Callable[[Sequence[Any]], Any],
                 validity: Validity, local_target: int, **settings: Any) -> None:
        super().__init__(lambda rank: fetch(), lambda rank, samples: score(samples), validity,
                         local_target, **settings)

    def sample(self, initial: Optional[Sequence[Any]] = None) -> SampledBatch:
        """Return this rank's share of the next step. Collective.

        Args:
            initial: Batch to begin with; fetched when None.

        Raises:
            EndOfData: And others, as :meth:`sample_block` does.
        """
        return self.sample_block(None if initial is None else [initial])[0]

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs of this rank: step, pass rate, latest scores, pool."""
        state = super().state_dict()
        [state['pool']] = state.pop('pools')
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Samples left out of its pool add to not_restored."""
        super().load_state_dict(dict(state, pools=[state['pool']]))
