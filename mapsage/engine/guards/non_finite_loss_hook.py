"""End a run in which a loss, a gradient or a weight is NaN or infinite, before it is saved.

A NaN of one rank reaches all ranks with the averaged gradients, so one iteration later nobody can
see where it began. This hook therefore notes on each rank what that rank saw first, and compares
the notes once something is wrong. A healthy step costs neither a collective nor a wait for the
device. `gradient_watch.py` notes the gradients.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

import torch
from mmengine.dist import get_rank
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.base.errors import UserError
from mapsage.distributed import Channel, RankLostError, SerialChannel, open_channel
from mapsage.distributed.device_checks import not_finite_tensors
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import (
    HostRunner,
    MapSageRun,
    OptimWrappers,
    built_wrappers,
    enabled_scaler,
    hooks_of_type,
    plain_model,
)

from .gradient_watch import GradientWatch
from .step_numbers import (
    RankLosses,
    accumulated_gradients,
    add_images,
    checkpoint_tensors,
    image_paths,
    losses_of_ranks,
    rank_name,
)

# How long the ranks wait for each other before they raise one error, in seconds. A rank that has
# noticed nothing does not come; it is freed when the others end.
_MEETING_SECONDS = 10.0

_NEXT_STEPS = (
    'The weights in memory may already be damaged; nothing was saved since. What to do next:\n'
    '  1. look at the images named above and at their masks (labels outside the classes, '
    'empty or constant images);\n'
    '  2. lower the learning rate or lengthen its warm-up;\n'
    '  3. clip the gradients: optim_wrapper.clip_grad=dict(max_norm=1.0);\n'
    '  4. with mixed precision, train in bfloat16 or without it and see whether the loss stays '
    'finite;\n'
    '  5. resume from the last checkpoint: {checkpoint}.'
)
_REPLAY = (
    '\n  6. look at the batches, losses and gradients of this step on every rank, with the options '
    'of the run and without a launcher: python tools/train.py {config} --work-dir {work_dir} '
    '--replay {iteration}'
)


class NonFiniteLossError(UserError, RuntimeError):
    """A loss, a gradient or a weight of the training is NaN or infinite."""

    on_every_rank = True


class _BadLoss(NamedTuple):
    """A loss of this rank that was not finite.

    Attributes:
        iteration: Iteration, counted from 0.
        text: Description for the error.
        meet_after: Iteration whose weight update spreads the NaN to all ranks.
    """

    iteration: int
    text: str
    meet_after: int


@dataclass(order=True)
class _Evidence:
    """The earliest thing that went wrong on a rank; sent as JSON. Sorted, the earliest comes first.

    Attributes:
        iteration: Iteration, counted from 0.
        kind: 0 for a loss, 1 for a gradient, 2 for a weight: the order within an iteration.
        text: Description for the error.
        rank: Rank of the process.
    """

    iteration: int
    kind: int
    text: str
    rank: int


@HOOKS.register_module()
class NonFiniteLossHook(MapSageHook):
    """Raise :class:`NonFiniteLossError` on every rank when a number of one rank is not finite.

    Each rank looks at its total loss after every iteration, which RuntimeInfoHook has read from
    the device already. A single process raises at once. Of several ranks, the rank with the bad
    loss continues until the weights have been updated and one more iteration has passed: by then
    the NaN has reached every rank with the averaged gradients, and all of them raise together. The
    error names the rank and the iteration where it began. A healthy step thus costs neither a
    collective nor a wait for the device.

    The ranks also agree that all is finite before every validation, at the end of the training, and
    before each checkpoint of a CheckpointHook. There every rank checks its parameters, and the main
    process also the averages (EMAHook) and the running statistics of normalization layers that
    would be written. Other buffers, such as masks, may be infinite on purpose. A tensor that is not
    finite when the training begins is not checked either.

    With an enabled loss scaler (float16 mixed precision) single overflows are normal: the scaler
    skips the step and lowers its factor. They are warnings, until there have
    been more than ``patience`` of them without a finite loss in between.

    Args:
        patience: Number of non-finite losses in a row that are tolerated with a loss scaler.

    Raises:
        ValueError: If ``patience`` is negative.
    """

    # After RuntimeInfoHook (VERY_HIGH), before EMAHook (NORMAL) and CheckpointHook (VERY_LOW).
    priority = 'HIGH'

    def __init__(self, patience: int = 10) -> None:
        if patience < 0:
            raise ValueError(f'patience={patience}, expected 0 or more iterations')
        self.patience = patience
        # Number of non-finite losses in a row.
        self._skipped = 0
        # All ranks are connected only while the model trains.
        self._channel: Channel = SerialChannel()
        # Key under which the first rank to notice publishes its report; empty outside a training.
        self._key = ''
        # Current iteration, and the last iteration that updated the weights, counted from 0.
        self._current_iteration = self._updated_iteration = -1
        self._bad_loss: Optional[_BadLoss] = None
        self._watch = GradientWatch()
        # Names of the tensors that were finite when the training began.
        self._checked_names: Set[str] = set()

    def before_train(self, runner: HostRunner) -> None:
        """Open a channel, and note which tensors are finite now. Collective."""
        # An error may have ended an earlier training before after_train().
        self._stop_watching(runner)
        self._bad_loss, self._skipped = None, 0
        self._current_iteration = self._updated_iteration = -1
        self._watch = GradientWatch()
        self._channel = open_channel(purpose='non-finite')
        self._key = f'first/{self._channel.next_number()}'
        named = checkpoint_tensors(runner)
        self._checked_names = {name for name, _ in named} - not_finite_tensors(named)
        # On a lazy device, more results of a step would change what is compiled.
        if not current_accelerator().lazy:
            model = runner.model
            ranks = len(model.block) if isinstance(model, VirtualDataParallel) else 1
            self._watch.attach(plain_model(runner), ranks)
        self.follow_virtual_ranks(runner)

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Note which images this iteration trains on."""
        self._current_iteration = runner.iter
        if not isinstance(runner.model, VirtualDataParallel):
            self._watch.begin(runner.iter, image_paths(data_batch), rank_name(runner))

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Note which images a virtual rank trains on."""
        # A first pass, which only counts predictions, has no gradients.
        if not runner.model.counting:
            self._watch.begin(runner.iter, image_paths(batch), rank_name(runner, virtual_rank))

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Check the loss of this iteration. Collective once the ranks know of a bad one.

        Raises:
            NonFiniteLossError: If it is not finite and no loss scaler excuses it.
        """
        self._current_iteration = runner.iter
        self._check_loss(runner, outputs, data_batch)
        if self._bad_loss is not None and self._updated_iteration >= self._bad_loss.meet_after:
            self._meet(runner, self._bad_loss.text, _MEETING_SECONDS)
        if _updates(runner.optim_wrapper):
            self._updated_iteration = runner.iter

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Agree, before a validation, that no rank has had a bad loss. Collective."""
        if self._key:
            self._meet(runner, '' if self._bad_loss is None else self._bad_loss.text)

    def after_train(self, runner: HostRunner) -> None:
        """Agree that no rank has had a bad loss. Collective."""
        self._meet(runner, '' if self._bad_loss is None else self._bad_loss.text)
        self._stop_watching(runner)
        self._channel, self._key = SerialChannel(), ''

    def gather_state(self, runner: MapSageRun) -> None:
        """Agree that what would be written is finite. Collective; the runner calls it.

        Raises:
            NonFiniteLossError: On every rank, before a file is written or removed.
        """
        self.raise_together(runner)

    def raise_together(self, runner: HostRunner) -> None:
        """Raise one error on every rank if anything is not finite on any of them. Collective.

        Raises:
            NonFiniteLossError: On every rank.
        """
        if self._key:
            self._meet(runner, self._describe_trouble(runner))

    def check_own_state(self, runner: MapSageRun) -> None:
        """Check what would be written, if the other ranks may not take part.

        Raises:
            NonFiniteLossError: If it is not finite.
        """
        trouble = self._describe_trouble(runner) if self._key else ''
        if trouble:
            error = self._make_error(runner, self._evidence(trouble))
            # Other ranks look here when they lose this one.
            self._publish(runner, str(error))
            raise error

    def explain(self, runner: MapSageRun) -> Optional[NonFiniteLossError]:
        """Return the error that ranks noticed before this rank failed; None if they did not.

        A rank whose peer has ended fails in a collective. A rank with NaN weights fails anywhere.
        """
        return self._known_error(runner)

    def _known_error(self, runner: HostRunner) -> Optional[NonFiniteLossError]:
        if not self._key:
            return None
        published = self._channel.published(self._key)
        if published is not None:
            return NonFiniteLossError(published.split('\n', 1)[1])
        return None if self._bad_loss is None else self._make_error(runner, self._evidence(''))

    def _stop_watching(self, runner: HostRunner) -> None:
        self._watch.detach()
        self.unfollow_virtual_ranks(runner)

    def _check_loss(
        self, runner: HostRunner, outputs: Optional[Dict[str, Any]], data_batch: Any
    ) -> None:
        bad = [
            rank
            for rank in losses_of_ranks(runner, outputs, data_batch)
            if not math.isfinite(rank.losses.get('loss', 0))
        ]
        if not bad:
            self._skipped = 0
            return
        first = bad[0]
        self._skipped += 1
        if _scales_loss(runner.optim_wrapper) and self._skipped <= self.patience:
            runner.logger.warning(
                f'the loss is {first.losses["loss"]} at iteration {runner.iter + 1} '
                f'({first.rank_name}), the loss scaler skips the step: {self._skipped} in a row, '
                f'{self.patience} are tolerated'
            )
            return
        if self._bad_loss is None:
            text = self._describe_loss(runner, first)
            meet_after = self._publish(runner, f'{text}\n{self._advice(runner, runner.iter)}')
            self._bad_loss = _BadLoss(runner.iter, text, meet_after)

    def _publish(self, runner: HostRunner, report: str) -> int:
        """Publish this rank's report, and return the iteration whose update spreads the NaN.

        All ranks get the same iteration: a rank has the published report before it has the averaged
        gradients with the NaN.
        """
        if len(self._channel.ranks) == 1:
            return -1
        if self._channel.publish(self._key, f'{runner.iter}\n{report}'):
            return runner.iter
        published = self._channel.published(self._key)
        return runner.iter if published is None else int(published.split('\n', 1)[0])

    def _meet(self, runner: HostRunner, trouble: str, seconds: Optional[float] = None) -> None:
        """Raise one error on every rank if one of them has trouble. Collective.

        Wherever ranks meet they call the same collectives, so a rank that comes because of its loss
        can meet a rank that is about to save.

        Args:
            runner: Runner of the training.
            trouble: Description of what is wrong on this rank; ``''`` if nothing is.
            seconds: Longest wait for the other ranks; the channel's timeout when None.
        """
        bad = torch.tensor([bool(trouble)], dtype=torch.int64)
        try:
            self._channel.max(bad, seconds)
            if not bad.item():
                return
            local_evidence = [asdict(evidence) for evidence in self._evidence(trouble)]
            texts = self._channel.gather_texts(json.dumps(local_evidence))
        except RankLostError as lost:
            error = self._known_error(runner)
            if error is None:
                raise
            raise error from lost
        raise self._make_error(
            runner, [_Evidence(**evidence) for text in texts for evidence in json.loads(text)]
        )

    def _evidence(self, trouble: str) -> List[_Evidence]:
        """Return the earliest thing that went wrong on this rank; empty if nothing did."""
        evidence: List[_Evidence] = []
        if self._bad_loss is not None:
            evidence.append(_Evidence(self._bad_loss.iteration, 0, self._bad_loss.text, get_rank()))
        gradient = self._watch.first_bad()
        if gradient is not None:
            evidence.append(
                _Evidence(
                    gradient.iteration,
                    1,
                    add_images(
                        f'the gradient of {gradient.name!r} is not finite at iteration '
                        f'{gradient.iteration + 1}, {gradient.rank_name}, before it is averaged over the '
                        f'ranks; the loss was finite',
                        gradient.images,
                    ),
                    get_rank(),
                )
            )
        if trouble:
            evidence.append(_Evidence(self._current_iteration, 2, trouble, get_rank()))
        return sorted(evidence)[:1]

    def _make_error(self, runner: HostRunner, evidence: Sequence[_Evidence]) -> NonFiniteLossError:
        """Return the error that names where it began.

        Args:
            runner: Runner of the training.
            evidence: What went wrong on each rank, at least one.
        """
        first = min((entry.iteration, entry.kind) for entry in evidence)
        earliest = [entry for entry in evidence if (entry.iteration, entry.kind) == first]
        text = earliest[0].text
        if len(earliest) > 1:
            text += f'\n  the same on rank(s) {[entry.rank for entry in earliest[1:]]}'
        return NonFiniteLossError(f'{text}\n{self._advice(runner, first[0])}')

    def _advice(self, runner: HostRunner, iteration: int) -> str:
        checkpoint = runner.message_hub.get_info('last_ckpt')
        steps = _NEXT_STEPS.format(checkpoint=checkpoint or 'none was written yet')
        # A run may have begun with the checkpoint of another work dir, which has no replay.
        from_this_run = bool(checkpoint) and any(
            os.path.dirname(checkpoint) == hook.out_dir
            for hook in hooks_of_type(runner, CheckpointHook)
        )
        if not (from_this_run and isinstance(runner, MapSageRun) and runner.can_replay()):
            return steps
        return steps + _REPLAY.format(
            config=runner.cfg.filename or 'CONFIG',
            work_dir=runner.work_dir,
            iteration=iteration + 1,
        )

    def _describe_loss(self, runner: HostRunner, rank: RankLosses) -> str:
        lines = [
            f'the loss is {rank.losses["loss"]} at iteration {runner.iter + 1}, {rank.rank_name}'
        ]
        if self._skipped > 1:
            lines[0] += (
                f'; {self._skipped} in a row, the loss scaler could not recover '
                f'(patience={self.patience})'
            )
        lines.append(
            '  loss terms: ' + ', '.join(f'{name}={value:g}' for name, value in rank.losses.items())
        )
        lines.append(
            '  learning rate: '
            + ', '.join(
                f'{name}={values[0]:.3e}' for name, values in runner.optim_wrapper.get_lr().items()
            )
        )
        return add_images('\n'.join(lines), image_paths(rank.batch))

    def _describe_trouble(self, runner: HostRunner) -> str:
        """Return which tensor of a checkpoint is not finite, or the bad loss; '' without either."""
        if self._bad_loss is not None:
            return self._bad_loss.text
        named = [
            (name, tensor)
            for name, tensor in checkpoint_tensors(runner)
            if name in self._checked_names
        ]
        # A loss scaler skips a step with bad gradients, so they do no harm.
        if not _scales_loss(runner.optim_wrapper):
            named += accumulated_gradients(runner)
        bad = not_finite_tensors(named)
        if not bad:
            return ''
        first = next(name for name, _ in named if name in bad)
        return add_images(
            f'{first!r} (of {len(bad)} tensor(s)) holds NaN or infinity after iteration '
            f'{self._current_iteration + 1}, rank {get_rank()}; the losses of this rank were '
            f'finite',
            self._watch.images_of(self._current_iteration),
        )


def _updates(optim_wrapper: OptimWrappers) -> bool:
    """Return whether the iteration that has just ended updated the weights."""
    return all(wrapper.should_update() for wrapper in built_wrappers(optim_wrapper))


def _scales_loss(optim_wrapper: OptimWrappers) -> bool:
    """Return whether an enabled loss scaler guards every step of the wrapper."""
    wrappers = built_wrappers(optim_wrapper)
    return bool(wrappers) and all(enabled_scaler(wrapper) is not None for wrapper in wrappers)
