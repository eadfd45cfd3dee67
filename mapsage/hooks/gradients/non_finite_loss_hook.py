"""End a run in which a loss, a gradient or a weight is NaN or infinite, before it is saved."""
from __future__ import annotations

import json
import math
import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from mmengine.dist import get_rank, is_main_process
from mmengine.hooks import CheckpointHook, SyncBuffersHook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mapsage.accelerator import current_accelerator
from mapsage.distributed import Channel, RankLostError, SerialChannel, open_channel
from mapsage.distributed.device_checks import is_statistic, not_finite_tensors
from mapsage.errors import UserError
from mapsage.hooks.base import MapSageHook
from mapsage.wrappers import VirtualDataParallel
from mapsage.wrappers.rank_batches import unpack_rank_batches

from .gradient_watch import GradientWatch

_MAX_PATHS = 16
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
    '  5. resume from the last checkpoint: {checkpoint}.')
_REPLAY = (
    '\n  6. look at the batches, losses and gradients of this step on every rank, with the options '
    'of the run and without a launcher: python tools/train.py {config} --work-dir {work_dir} '
    '--replay {iteration}')


class NonFiniteLossError(UserError, RuntimeError):
    """A loss, a gradient or a weight of the training is NaN or infinite."""

    on_every_rank = True


@HOOKS.register_module()
class NonFiniteLossHook(MapSageHook):
    """Raise :class:`NonFiniteLossError` on every rank when a number of one rank is not finite.

    Each rank looks at its own total loss after every iteration, which RuntimeInfoHook has read from
    the device already. One process raises at once. Of several ranks, the one with the bad loss goes
    on until the weights have been updated and one more iteration has passed: by then the NaN has
    come to every rank with the averaged gradients, and all of them raise together. The error names
    the rank and the iteration where it began. A healthy step thus costs neither a collective nor a
    wait for the device.

    The ranks also agree that all is finite before every validation, at the end of the training, and
    before each checkpoint of a CheckpointHook. There the parameters of every rank are looked at,
    and on the main process also the averages (EMAHook) and the running statistics of normalization
    layers that would be written. Other buffers, such as masks, may be infinite on purpose. Nor is a
    tensor looked at that is not finite when the training begins.

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
        self._skipped = 0
        self._channel: Channel = SerialChannel()  # that of all ranks while the model trains
        self._key = ''  # of what the first rank to notice publishes; empty unless it trains
        self._now = -1  # iteration, counted from 0
        self._updated = -1  # last iteration that updated the weights
        self._found: Optional[Dict[str, Any]] = None  # this rank's bad loss
        self._watch = GradientWatch()
        self._before_each: Optional[Callable[[int, Any], None]] = None  # called by the wrapper
        self._judged: Iterable[str] = ()

    def before_train(self, runner: Runner) -> None:
        """Open a channel, and see which tensors are finite now. Collective."""
        self._unwatch(runner)  # after a training that an error has ended
        self._found, self._skipped, self._now, self._updated = None, 0, -1, -1
        self._watch = GradientWatch()
        self._channel = open_channel(purpose='non-finite')
        self._key = f'first/{self._channel.next_number()}'
        named = _written(runner)
        broken = not_finite_tensors(named)
        self._judged = {name for name, _ in named} - broken
        if not current_accelerator().lazy:  # more results would change what it compiles
            several = isinstance(runner.model, VirtualDataParallel)
            self._watch.attach(_unwrapped(runner), len(runner.model.block) if several else 1)
        if isinstance(runner.model, VirtualDataParallel):
            # Not in a first pass, which has no gradients.
            self._before_each = lambda virtual_rank, batch: None if runner.model.counting else \
                self._watch.begin(runner.iter, _image_paths(batch), _whose(runner, virtual_rank))
            runner.model.on_virtual_rank_start.append(self._before_each)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Note which images this iteration trains on."""
        self._now = runner.iter
        if not isinstance(runner.model, VirtualDataParallel):
            self._watch.begin(runner.iter, _image_paths(data_batch), _whose(runner))

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        """Check the loss of this iteration. Collective once the ranks know of a bad one.

        Raises:
            NonFiniteLossError: If it is not finite and no loss scaler excuses it.
        """
        self._now = runner.iter
        self._look_at_loss(runner, outputs, data_batch)
        if self._found is not None and self._updated >= self._found['meet_after']:
            self._meet(runner, self._found['text'], _MEETING_SECONDS)
        if _updates(runner.optim_wrapper):
            self._updated = runner.iter

    def before_val_epoch(self, runner: Runner) -> None:
        """Agree that no rank has found anything before a validation. Collective."""
        if self._key:
            self._meet(runner, '' if self._found is None else self._found['text'])

    def after_train(self, runner: Runner) -> None:
        """Agree that no rank has found anything. Collective."""
        self._meet(runner, '' if self._found is None else self._found['text'])
        self._unwatch(runner)
        self._channel, self._key = SerialChannel(), ''

    def gather_state(self, runner: Runner) -> None:
        """Agree that what would be written is finite. Collective; the runner calls it.

        Raises:
            NonFiniteLossError: On every rank, before a file is written or removed.
        """
        if self._key:
            self._meet(runner, self._trouble(runner))

    def check_own_state(self, runner: Runner) -> None:
        """Check what would be written, where the other ranks may not take part.

        Raises:
            NonFiniteLossError: If it is not finite.
        """
        trouble = self._trouble(runner) if self._key else ''
        if trouble:
            error = self._error(runner, [self._evidence(trouble)])
            self._publish(runner, str(error))  # for ranks that lose this one
            raise error

    def explain(self, runner: Runner) -> Optional[NonFiniteLossError]:
        """Return the error that ranks have noticed before this one failed; None if they have not.

        A rank whose peer has ended fails in a collective, and one whose weights are NaN anywhere.
        """
        if not self._key:
            return None
        published = self._channel.published(self._key)
        if published is not None:
            return NonFiniteLossError(published.split('\n', 1)[1])
        return None if self._found is None else self._error(runner, [self._evidence('')])

    def _unwatch(self, runner: Runner) -> None:
        self._watch.detach()
        if self._before_each is not None:
            runner.model.on_virtual_rank_start.remove(self._before_each)
            self._before_each = None

    def _look_at_loss(self, runner: Runner, outputs: Optional[Dict[str, Any]],
                      data_batch: Any) -> None:
        bad = [each for each in _losses_of_ranks(runner, outputs, data_batch)
               if not math.isfinite(each[1].get('loss', 0))]
        if not bad:
            self._skipped = 0
            return
        whose, losses, data_batch = bad[0]
        self._skipped += 1
        if _scales_loss(runner.optim_wrapper) and self._skipped <= self.patience:
            runner.logger.warning(
                f'the loss is {losses["loss"]} at iteration {runner.iter + 1} ({whose}), '
                f'the loss scaler skips the step: {self._skipped} in a row, {self.patience} are '
                'tolerated')
            return
        if self._found is None:
            text = self._describe_loss(runner, whose, losses, data_batch)
            self._found = dict(
                iteration=runner.iter, text=text,
                meet_after=self._publish(runner, f'{text}\n{self._advice(runner, runner.iter)}'))

    def _publish(self, runner: Runner, report: str) -> int:
        """Publish what this rank has found; return the iteration whose update spreads it.

        That is the same one on all ranks: the averaged gradients that carry a NaN to a rank come
        later than what was published about it.
        """
        if len(self._channel.ranks) == 1:
            return -1
        if self._channel.publish(self._key, f'{runner.iter}\n{report}'):
            return runner.iter
        published = self._channel.published(self._key)
        return runner.iter if published is None else int(published.split('\n', 1)[0])

    def _meet(self, runner: Runner, text: str, seconds: Optional[float] = None) -> None:
        """Raise one error on every rank if one of them has found something. Collective.

        Wherever ranks meet they call the same collectives, so that one which comes because of its
        loss can meet another that is about to save.
        """
        bad = torch.tensor([bool(text)], dtype=torch.int64)
        try:
            self._channel.max(bad, seconds)
            if not bad.item():
                return
            every = [json.loads(each) for each in
                     self._channel.gather_texts(json.dumps(self._evidence(text)))]
        except RankLostError as lost:
            known = self.explain(runner)
            if known is None:
                raise
            raise known from lost
        raise self._error(runner, every)

    def _evidence(self, trouble: str) -> Dict[str, Any]:
        """Return the earliest thing that went wrong on this rank, as what JSON can hold."""
        kinds: List[Tuple[int, int, str]] = []
        if self._found is not None:
            kinds.append((self._found['iteration'], 0, self._found['text']))
        gradient = self._watch.first_bad()
        if gradient is not None:
            kinds.append((gradient.iteration, 1, _with_images(
                f'the gradient of {gradient.name!r} is not finite at iteration '
                f'{gradient.iteration + 1}, {gradient.whose}, before it is averaged over the '
                f'ranks; the loss was finite', gradient.images)))
        if trouble:
            kinds.append((self._now, 2, trouble))
        if not kinds:
            return dict(iteration=-1)
        iteration, kind, text = min(kinds)
        return dict(iteration=iteration, kind=kind, text=text, rank=get_rank())

    def _error(self, runner: Runner, every: List[Dict[str, Any]]) -> NonFiniteLossError:
        """Return the error that names where it began."""
        found = [each for each in every if each['iteration'] >= 0]
        first = min((each['iteration'], each['kind']) for each in found)
        began = [each for each in found if (each['iteration'], each['kind']) == first]
        text = began[0]['text']
        if len(began) > 1:
            text += f"\n  the same on rank(s) {[each['rank'] for each in began[1:]]}"
        return NonFiniteLossError(f'{text}\n{self._advice(runner, first[0])}')

    def _advice(self, runner: Runner, iteration: int) -> str:
        checkpoint = runner.message_hub.get_info('last_ckpt')
        steps = _NEXT_STEPS.format(checkpoint=checkpoint or 'none was written yet')
        # A run may have begun with the checkpoint of another work dir.
        own = bool(checkpoint) and any(os.path.dirname(checkpoint) == hook.out_dir for hook
                                       in runner.hooks if isinstance(hook, CheckpointHook))
        can_replay = getattr(runner, 'can_replay', lambda: False)  # MapSageRunner
        return steps if not (own and can_replay()) else steps + _REPLAY.format(
            config=runner.cfg.filename or 'CONFIG', work_dir=runner.work_dir,
            iteration=iteration + 1)

    def _describe_loss(self, runner: Runner, whose: str, losses: Dict[str, float],
                       data_batch: Any) -> str:
        lines = [f'the loss is {losses["loss"]} at iteration {runner.iter + 1}, {whose}']
        if self._skipped > 1:
            lines[0] += (f'; {self._skipped} in a row, the loss scaler could not recover '
                         f'(patience={self.patience})')
        lines.append('  loss terms: ' + ', '.join(
            f'{name}={value:g}' for name, value in losses.items()))
        lines.append('  learning rate: ' + ', '.join(
            f'{name}={values[0]:.3e}' for name, values in runner.optim_wrapper.get_lr().items()))
        return _with_images('\n'.join(lines), _image_paths(data_batch))

    def _trouble(self, runner: Runner) -> str:
        """Return what would be written and is not finite, or the loss that was not; '' if none."""
        if self._found is not None:
            return str(self._found['text'])
        named = [(name, tensor) for name, tensor in _written(runner) if name in self._judged]
        if not _scales_loss(runner.optim_wrapper):  # a scaler skips a step of bad gradients
            named += _accumulated(runner)
        bad = not_finite_tensors(named)
        if not bad:
            return ''
        first = next(name for name, _ in named if name in bad)
        return _with_images(
            f'{first!r} (of {len(bad)} tensor(s)) holds NaN or infinity after iteration '
            f'{self._now + 1}, rank {get_rank()}; the losses of this rank were finite',
            self._watch.images_of(self._now))


def _written(runner: Runner) -> List[Tuple[str, torch.Tensor]]:
    """Return what training changes and a checkpoint would hold, by name.

    These are the parameters on every rank. The running statistics of BatchNorm are each rank's own,
    and those of the main process alone are written, unless a SyncBuffersHook averages them.
    """
    found: List[Tuple[str, torch.Tensor]] = []
    together = is_main_process() or any(isinstance(each, SyncBuffersHook) for each in runner.hooks)
    averages = [hook.ema_model for hook in runner.hooks
                if isinstance(getattr(hook, 'ema_model', None), torch.nn.Module)]
    for prefix, model in [('', _unwrapped(runner)), *(('ema.', each) for each in averages)]:
        tensors = dict(model.named_parameters())
        if together:
            tensors.update((name, value) for name, value in model.state_dict().items()
                           if is_statistic(name))
        found.extend((prefix + name, tensor) for name, tensor in tensors.items())
    return found


def _accumulated(runner: Runner) -> List[Tuple[str, torch.Tensor]]:
    """Return the gradients of an accumulation cycle, which a checkpoint inside it holds."""
    return [(f'the gradient of {name}', each.grad)
            for name, each in _unwrapped(runner).named_parameters()
            if each.grad is not None and each.grad.layout == torch.strided]


def _unwrapped(runner: Runner) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def _losses(runner: Runner, outputs: Optional[Dict[str, Any]]) -> Dict[str, float]:
    """Return this iteration's loss terms by name, the total as 'loss'."""
    scalars = runner.message_hub.log_scalars
    # The hub also keeps terms of earlier iterations; the outputs name those of this one.
    names: Iterable[str] = outputs if isinstance(outputs, dict) else ()
    return {name: float(scalars[f'train/{name}'].current()) for name in names
            if 'loss' in name and f'train/{name}' in scalars}


def _losses_of_ranks(runner: Runner, outputs: Optional[Dict[str, Any]],
                     data_batch: Any) -> List[Tuple[str, Dict[str, float], Any]]:
    """Return name, losses and batch of each virtual rank that this process has carried out."""
    model = runner.model
    first = _losses(runner, outputs)
    if not isinstance(model, VirtualDataParallel) or 'loss' not in first:
        return [(_whose(runner), first, data_batch)]
    others = [{name: float(value.detach()) for name, value in each.items() if 'loss' in name}
              for each in model.block_outputs[1:]]
    return [(_whose(runner, virtual_rank), losses, batch) for virtual_rank, losses, batch
            in zip(model.block, [first, *others], unpack_rank_batches(data_batch, model.block))]


def _whose(runner: Runner, virtual_rank: Optional[int] = None) -> str:
    """Return the words for this process, or a virtual rank of it."""
    several = virtual_rank is not None and not runner.model.virtual_ranks.one_each
    return f'virtual rank {virtual_rank} (rank {get_rank()})' if several else f'rank {get_rank()}'


def _wrappers(optim_wrapper: Any) -> List[Any]:
    # OptimWrapperDict: several optimizers
    return list(optim_wrapper.values()) if hasattr(optim_wrapper, 'values') else [optim_wrapper]


def _updates(optim_wrapper: Any) -> bool:
    """Return whether the iteration that has just ended updated the weights."""
    return all(wrapper.should_update() for wrapper in _wrappers(optim_wrapper))


def _scales_loss(optim_wrapper: Any) -> bool:
    """Return whether an enabled loss scaler guards every step of the wrapper."""
    scalers = [getattr(wrapper, 'loss_scaler', None) for wrapper in _wrappers(optim_wrapper)]
    return all(scaler is not None and scaler.is_enabled() for scaler in scalers)


def _with_images(text: str, paths: List[str]) -> str:
    return '\n'.join([text, '  images of the batch:', *(f'    {path}' for path in paths or [
        'unknown: the batch carries no img_path (meta_keys of PackSegInputs)'])])


def _image_paths(data_batch: Any) -> List[str]:
    samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
    if not isinstance(samples, (list, tuple)):
        return []
    paths = [str(path) for path in (getattr(sample, 'img_path', None) for sample in samples)
             if isinstance(path, (str, os.PathLike))]
    if len(paths) > _MAX_PATHS:
        return paths[:_MAX_PATHS] + [f'... and {len(paths) - _MAX_PATHS} more']
    return paths
