"""Catches wrong numbers: another card computes the gradient of one virtual rank again.

A card that computes wrong numbers raises no error. What it computes reaches every rank with the
averaged gradients, so that all ranks stay equal and all are wrong. ``env_cfg.cross_check``
therefore has every rank compute something twice that another rank has computed.

A check:

1. Every rank records one virtual rank of its step (``step_capture.py``): batch, random state,
   buffers, a copy of the weights before the step, and a print of each gradient before it is
   averaged. The step is the one of the training, not a repetition of it.
2. After the step the ranks compare digests of these weights, which must be equal.
3. Every rank sends its record to the rank that checks it, which computes the gradients again. The
   record holds the batch itself and not its key, so that it does not matter where a batch comes
   from or what hooks have changed in it.
4. All ranks gather the prints of steps and recomputations. If two differ, a third rank computes
   that gradient too, and the two that agree are right. The run ends with an error that names the
   rank; with two ranks it names both.

The distance between a rank and its checker changes with each check, and then the virtual rank, so
that every pair meets (:class:`~.gradient_prints.Pairing`). Where the ranks promise the same bits
(:func:`~.reproducibility.promises_bits`), any difference is an error. Elsewhere it must exceed a
bound: ten times what cards differ by that compute a gradient twice, measured at the start, and
again before an error is raised.

A check takes place every ``interval`` iterations, in the first iteration after each start, and
before a checkpoint is saved if there were iterations since the last check. The last of these has no
step to record: rank and checker both compute the last record with the weights of now. So a card
that has become faulty, or weights that differ, reach no checkpoint, and the newest checkpoint is
the one to resume from. In the first iteration each rank also computes its own record again: a model
whose steps cannot be repeated is refused before it can look like a faulty card.

Which rank could fail to arrive at a collective of a check? Iteration, interval and first iteration
are the same on all ranks, and a checkpoint is announced to all of them. Recomputations, which can
fail for lack of memory, are inside :func:`all_ranks_or_none` and contain no collective. All
decisions follow from gathered prints.
"""

from __future__ import annotations

import json
import math
import socket
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence

from mmengine.optim import OptimWrapperDict

from mapsage.accelerator import current_accelerator
from mapsage.distributed import Channel, SerialChannel, all_ranks_or_none, local_rank, open_channel
from mapsage.distributed.weights import first_difference, total_digest, weight_digests
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards.device_check_hook import DeviceCheckError
from mapsage.engine.guards.reproducibility import facts_of_process, promises_bits
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, MapSageRun, plain_model
from mapsage.sampling.exchange import exchange
from mapsage.sampling.plan import ExchangePlan, Move

from .gradient_prints import (
    LARGEST_BOUND,
    Dispute,
    GradientPrint,
    Pairing,
    bound_of,
    find_disputes,
    guilty_ranks,
    largest_difference,
)
from .step_capture import StepCapture, StepInputs

_PURPOSE = 'cross-check'


class CrossCheckError(DeviceCheckError):
    """Ranks computed different gradients from the same numbers, or have different weights."""

    check = 'cross-check'
    suspects_all = True


class CrossCheckHook(MapSageHook):
    """Hook that compares a gradient of each rank with what another rank computes.

    Args:
        interval: Number of iterations between two checks.

    Raises:
        ConfigError: In ``before_train``, if there are several optimizers.
        CrossCheckError: In a check, on every rank.
    """

    # Before CheckpointHook (VERY_LOW).
    priority = 'LOW'

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._channel: Channel = SerialChannel()
        self._exact = True
        self._bound: Optional[float] = None
        self._capture: Optional[StepCapture] = None
        self._recording = False
        # Virtual ranks of each process, and the one that this process records.
        self._blocks: List[range] = [range(1)]
        self._recorded_rank = 0
        # Number of the check for which the current record was made.
        self._record_number = 0
        # Iteration, counted from 1, of the last check; number of checks, and of iterations since.
        self._last_good = 0
        self._checks = 0
        self._steps_since = 0
        # Names of the ranks' hosts and devices.
        self._places: List[str] = []

    def before_train(self, runner: HostRunner) -> None:
        """Find out whether the ranks promise the same bits. Collective."""
        # MMEngine's OptimWrapperDict is an OptimWrapper, too.
        if isinstance(runner.optim_wrapper, OptimWrapperDict):
            raise ConfigError(
                f'env_cfg.cross_check with {type(runner.optim_wrapper).__name__}: expected one '
                f'optimizer, whose steps can be computed again. Remove env_cfg.cross_check.'
            )
        self._stop_recording()
        self._capture, self._bound = None, None
        self._checks = self._steps_since = 0
        self._channel = open_channel(purpose=_PURPOSE)
        world = len(self._channel.ranks)
        model = runner.model
        self._blocks = (
            model.virtual_ranks.blocks
            if isinstance(model, VirtualDataParallel)
            else [range(rank, rank + 1) for rank in range(world)]
        )
        accelerator = current_accelerator()
        facts = facts_of_process(accelerator, local_rank(), '')
        place = f'{socket.gethostname()}, {accelerator.device(local_rank())}'
        texts = self._channel.gather_texts(json.dumps([facts, place]))
        all_facts, places = zip(*(json.loads(text) for text in texts))
        self._exact, self._places = promises_bits(all_facts), list(places)
        self.follow_virtual_ranks(runner)
        runner.logger.info(
            f'[CrossCheck] every {self.interval} iteration(s) and before each checkpoint, '
            + (
                f'another of the {world} ranks computes a gradient of each rank again'
                if world > 1
                else 'this device computes a gradient again: it finds faults that come and go, and '
                'none that stays, for which there must be two ranks'
            )
            + (
                '; results must be equal bit for bit'
                if self._exact
                else '; results may differ by rounding, which the first check measures'
            )
        )

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Record this iteration, if it is checked."""
        if self._bound is not None and (runner.iter + 1) % self.interval:
            return
        self._capture = StepCapture(plain_model(runner), runner.optim_wrapper, self._exact)
        pairing = self._pairing(runner)
        self._record_number = pairing.number
        self._recorded_rank = pairing.virtual_rank(
            self._blocks[self._channel.ranks.index(self._channel.rank)]
        )
        self._capture.active = not isinstance(runner.model, VirtualDataParallel)
        self._recording = True
        self._capture.begin()

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Record the chosen virtual rank of this process."""
        if self._capture is not None and self._recording:
            # A first pass, which only counts predictions, has no gradients.
            self._capture.active = virtual_rank == self._recorded_rank and not runner.model.counting

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Check the recorded iteration. Collective then.

        Raises:
            CrossCheckError: On every rank.
        """
        self._steps_since += 1
        if not self._recording or self._capture is None:
            return
        self._stop_recording()
        capture, when = self._capture, f'after iteration {runner.iter + 1}'
        self._compare_weights(runner, capture.weight_digests, when)
        if self._bound is None:
            self._bound = self._measure(capture.print)
        self._check(runner, capture.print, when, before_step=True)
        self._pass(runner.iter + 1)

    def gather_state(self, runner: MapSageRun) -> None:
        """Check before a checkpoint, if there were iterations since the last check. Collective.

        Raises:
            CrossCheckError: On every rank; nothing is saved then.
        """
        if self._capture is None or self._bound is None or not self._steps_since:
            return
        when = f'before a checkpoint, after iteration {self._last_good + self._steps_since},'
        self._compare_weights(runner, weight_digests(plain_model(runner), buffers=False), when)
        with all_ranks_or_none('the cross-check'):
            step = self._recompute(self._inputs(), before_step=False)
        self._check(runner, step, when, before_step=False)
        self._pass(self._last_good + self._steps_since)

    def after_train(self, runner: HostRunner) -> None:
        """End the checks; a later save has no iterations that were not checked."""
        runner.logger.info(f'[CrossCheck] {self._checks} check(s) found no difference')
        self._close(runner)

    def end_run(self, runner: MapSageRun, error: Optional[BaseException]) -> None:
        """End the checks of a run that an error has ended."""
        self._close(runner)

    def _close(self, runner: HostRunner) -> None:
        self._stop_recording()
        self.unfollow_virtual_ranks(runner)
        self._capture = None

    def _stop_recording(self) -> None:
        if self._capture is not None:
            self._capture.end()
        self._recording = False

    def _pass(self, iteration: int) -> None:
        self._last_good, self._steps_since = iteration, 0
        self._checks += 1
        if self._capture is not None:
            self._capture.release_weights()

    def _pairing(self, runner: HostRunner) -> Pairing:
        return Pairing((runner.iter + 1) // self.interval, len(self._channel.ranks))

    def _inputs(self) -> StepInputs:
        if self._capture is None or self._capture.inputs is None:
            raise RuntimeError(
                'the step did not call data_preprocessor of the model, so that there is no record '
                'of its batch: remove env_cfg.cross_check.'
            )
        return self._capture.inputs

    def _recompute(self, inputs: StepInputs, before_step: bool) -> GradientPrint:
        assert self._capture is not None
        return self._capture.recompute(inputs, before_step)

    # --- what ranks do together

    def _measure(self, step: GradientPrint) -> float:
        """Return the bound of differences; 0.0 where bits are promised. Collective.

        Raises:
            CrossCheckError: On every rank, if some of them cannot compute their step again.
            ConfigError: On every rank, if none of them can.
        """
        with all_ranks_or_none('the cross-check'):
            again = self._recompute(self._inputs(), before_step=True)
            difference = largest_difference(step, again, self._exact)
        drifts = self._gather(difference)
        limit = 0.0 if self._exact else LARGEST_BOUND
        odd = [rank for rank, (_, rank_drift) in enumerate(drifts) if rank_drift > limit]
        if len(odd) == len(drifts):
            name, drift = drifts[0]
            raise ConfigError(
                f'env_cfg.cross_check: the first step, computed a second time from the same batch, '
                f'weights and random state, gives another gradient of {name!r} '
                f'({_describe_difference(drift)}), on every rank. Either the model keeps a state '
                f'outside of its parameters and buffers, hooks change its gradients, or a layer is '
                f'not deterministic: remove env_cfg.cross_check, or'
                + (
                    ' start the run again in case it was a fault of the only card.'
                    if len(drifts) == 1
                    else ' mend the model.'
                )
            )
        if odd:
            raise CrossCheckError(
                'in the first iteration',
                {
                    self._channel.ranks[rank]: [
                        f'({self._places[rank]}) computed its step twice from the same numbers, and '
                        f'the gradients of {drifts[rank][0]!r} differ '
                        f'({_describe_difference(drifts[rank][1])}), unlike on the other ranks. '
                        f'Take this card out of service.'
                    ]
                    for rank in odd
                },
            )
        return 0.0 if self._exact else bound_of([rank_drift for _, rank_drift in drifts])

    def _check(self, runner: HostRunner, step: GradientPrint, when: str, before_step: bool) -> None:
        """Have another rank compute each rank's gradient, and compare. Collective."""
        pairing = self._pairing(runner)
        world = len(self._channel.ranks)
        position = self._channel.ranks.index(self._channel.rank)
        with all_ranks_or_none('the cross-check'):
            inputs = self._inputs()
        arrived = self._send(inputs, {owner: pairing.checker(owner) for owner in range(world)})
        with all_ranks_or_none('the cross-check'):
            check = self._recompute(arrived[pairing.owner(position)], before_step)
        steps, checks = zip(*self._gather([step, check]))
        assert self._bound is not None
        disputes = find_disputes(steps, checks, pairing, self._bound, self._exact)
        if disputes and not self._exact:
            # A batch may be of a kind that rounding disturbs more than the first one.
            with all_ranks_or_none('the cross-check'):
                again = self._recompute(inputs, before_step)
                drift = largest_difference(step, again, self._exact)[1]
            self._bound = max(self._bound, min(LARGEST_BOUND, bound_of(self._gather(drift))))
            disputes = find_disputes(steps, checks, pairing, self._bound, self._exact)
        if disputes:
            self._settle(disputes, steps, checks, inputs, before_step)
            self._raise(runner, disputes, when)

    def _settle(
        self,
        disputes: Sequence[Dispute],
        steps: Sequence[GradientPrint],
        checks: Sequence[GradientPrint],
        inputs: StepInputs,
        before_step: bool,
    ) -> None:
        """Let a third rank compute each disputed gradient. Collective."""
        routes = {dispute.owner: dispute.voter for dispute in disputes if dispute.voter is not None}
        arrived = self._send(inputs, routes)
        with all_ranks_or_none('the cross-check'):
            votes = {
                str(owner): self._recompute(received, before_step)
                for owner, received in arrived.items()
            }
        gathered = self._gather(votes)
        limit = 0.0 if self._exact else self._bound or 0.0
        for dispute in disputes:
            agrees = [False, False]
            if dispute.voter is not None:
                vote = gathered[dispute.voter][str(dispute.owner)]
                agrees = [
                    largest_difference(print_, vote, self._exact)[1] <= limit
                    for print_ in (steps[dispute.owner], checks[dispute.checker])
                ]
            dispute.settle(*agrees)

    def _send(self, inputs: StepInputs, routes: Mapping[int, int]) -> Dict[int, StepInputs]:
        """Send records to other ranks, and return those that arrive, by owner. Collective.

        Args:
            inputs: Record of this rank.
            routes: Receiver by owner, as positions in the channel, equal on every rank.
        """
        world = len(self._channel.ranks)
        moves: List[Move] = []
        for receiver in range(world):
            owners = [owner for owner, other in sorted(routes.items()) if other == receiver]
            moves += [Move(owner, 0, receiver, number) for number, owner in enumerate(owners, 1)]
        # Every rank keeps its record, and the arrivals follow.
        targets = [
            1 + sum(move.destination_rank == rank for move in moves) for rank in range(world)
        ]
        plan = ExchangePlan((1,) * world, tuple(targets), (0,) * world, tuple(moves))
        position = self._channel.ranks.index(self._channel.rank)
        arrived = exchange([inputs], plan, open_channel(None, None, _PURPOSE))[1:]
        owners = [move.source_rank for move in moves if move.destination_rank == position]
        return dict(zip(owners, arrived))

    def _gather(self, value: Any) -> List[Any]:
        """Return a value of JSON of every rank. Collective."""
        return [json.loads(text) for text in self._channel.gather_texts(json.dumps(value))]

    def _compare_weights(self, runner: HostRunner, digests: Mapping[str, int], when: str) -> None:
        """Raise on every rank if the ranks have different weights. Collective.

        Args:
            runner: Runner of the training.
            digests: Digest of each parameter of this rank, by name.
            when: Time of the check, for the error.
        """
        if len(set(self._channel.gather_texts(total_digest(digests)))) == 1:
            return
        name, odd, usual = first_difference(self._gather(digests))
        ranks = self._channel.ranks
        if len(ranks) == 2:
            odd = [0, 1]
        text = (
            f'parameter {name!r} is not equal to the one of rank {ranks[usual]}'
            if len(ranks) > 2
            else f'parameter {name!r} differs between the two ranks'
        )
        raise CrossCheckError(
            when,
            {
                ranks[rank]: [
                    f'({self._places[rank]}) {text}. Either its memory or its card is faulty, or hooks or '
                    f'model code change weights by rank or data. {self._advice(runner)}'
                ]
                for rank in odd
            },
            compared=True,
        )

    def _raise(self, runner: HostRunner, disputes: Sequence[Dispute], when: str) -> NoReturn:
        """Raise the error that names the ranks that may be at fault."""
        problems: Dict[int, List[str]] = {}
        everywhere = not self._checks and len(disputes) == len(self._blocks) > 1
        if everywhere and all(len(dispute.suspects) == 3 for dispute in disputes):
            raise ConfigError(
                f'env_cfg.cross_check: every rank gets another gradient from a batch of the first '
                f'step: the step depends on something that only its rank has, such as the state '
                f'of a hook (first at {disputes[0].parameter!r}). Remove env_cfg.cross_check.'
            )
        note = (
            ' If sound cards show this too, the step depends on something that only its rank '
            'has, such as the state of a hook: remove env_cfg.cross_check.'
            if everywhere and len(self._blocks) == 2
            else ''
        )
        for position in guilty_ranks(disputes):
            dispute = next(dispute for dispute in disputes if position in dispute.suspects)
            problems[self._channel.ranks[position]] = [
                f'({self._places[position]}) {self._describe(dispute, position)} '
                f'{self._advice(runner)}{note}'
            ]
        raise CrossCheckError(when, problems)

    def _describe(self, dispute: Dispute, position: int) -> str:
        """Return what is wrong with the rank at a position of the channel, by one dispute."""
        virtual_rank = Pairing(self._record_number, len(self._blocks)).virtual_rank(
            self._blocks[dispute.owner]
        )
        gradient = (
            f'the gradient of {dispute.parameter!r} in virtual rank {virtual_rank} '
            f'({_describe_difference(dispute.difference)})'
        )
        if dispute.owner == dispute.checker:
            return (
                f'computed {gradient} twice from the same numbers, with different results. The '
                f'card has faults that come and go: take it out of service.'
            )
        three = {
            dispute.owner,
            dispute.checker,
            *([] if dispute.voter is None else [dispute.voter]),
        }
        others = ' and '.join(
            f'rank {self._channel.ranks[rank]}' for rank in sorted(three - {position})
        )
        if len(dispute.suspects) == 1:
            return (
                f'computes wrong numbers: {gradient} differs from the results of {others}, '
                f'which agree. Take this card out of service.'
            )
        return (
            f'or {others} computes wrong numbers: {gradient} differs between them, and '
            f'{len(three)} ranks do not show which is right. Test each of these cards by '
            f'itself before you use it again.'
        )

    def _advice(self, runner: HostRunner) -> str:
        checkpoint = runner.message_hub.get_info('last_ckpt')
        return f'The last check that found nothing was after iteration {self._last_good}; ' + (
            f'{checkpoint} was saved after a check: --resume continues from it.'
            if checkpoint
            else 'no checkpoint was saved yet.'
        )


def _describe_difference(drift: float) -> str:
    if math.isinf(drift):
        return 'other bits'
    return f'by {drift:.1e} of the size of the whole gradient'
