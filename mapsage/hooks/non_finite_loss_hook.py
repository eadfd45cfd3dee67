"""Stop a run whose loss is NaN or infinite, with an error that helps to find the cause."""
from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

_MAX_PATHS = 16

_NEXT_STEPS = (
    'The weights in memory may already be damaged. What to do next:\n'
    '  1. look at the images named above and at their masks (labels outside the classes, '
    'empty or constant images);\n'
    '  2. lower the learning rate or lengthen its warm-up;\n'
    '  3. clip the gradients: optim_wrapper.clip_grad=dict(max_norm=1.0);\n'
    '  4. with mixed precision, train in bfloat16 or without it and see whether the loss stays '
    'finite;\n'
    '  5. resume from the last checkpoint: {checkpoint}.')


class NonFiniteLossError(RuntimeError):
    """The total loss of a training step is NaN or infinite."""


@HOOKS.register_module()
class NonFiniteLossHook(Hook):
    """Raise :class:`NonFiniteLossError` when the total training loss is NaN or infinite.

    It reads the values that RuntimeInfoHook has put into the runner's message hub, and so does not
    wait for the device once more. It runs before the EMA and checkpoint hooks, so that no bad
    checkpoint is written. Each rank checks its own loss without a collective; when one raises, the
    launcher ends the others.

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

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        """Check the loss of this iteration.

        Raises:
            NonFiniteLossError: If it is not finite and no loss scaler excuses it.
        """
        losses = _losses(runner, outputs)
        if 'loss' not in losses or math.isfinite(losses['loss']):
            self._skipped = 0
            return
        self._skipped += 1
        if _scales_loss(runner.optim_wrapper) and self._skipped <= self.patience:
            runner.logger.warning(
                f'the loss is {losses["loss"]} at iteration {runner.iter + 1} (rank {get_rank()}), '
                f'the loss scaler skips the step: {self._skipped} in a row, {self.patience} are '
                'tolerated')
            return
        raise NonFiniteLossError(self._report(runner, losses, data_batch))

    def _report(self, runner: Runner, losses: Dict[str, float], data_batch: Any) -> str:
        lines = [f'the loss is {losses["loss"]} at iteration {runner.iter + 1}, '
                 f'rank {get_rank()}']
        if self._skipped > 1:
            lines[0] += (f'; {self._skipped} in a row, the loss scaler could not recover '
                         f'(patience={self.patience})')
        lines.append('  loss terms: ' + ', '.join(
            f'{name}={value:g}' for name, value in losses.items()))
        lines.append('  learning rate: ' + ', '.join(
            f'{name}={values[0]:.3e}' for name, values in runner.optim_wrapper.get_lr().items()))
        lines.append('  images of the batch:')
        lines.extend(f'    {path}' for path in _image_paths(data_batch))
        checkpoint = runner.message_hub.get_info('last_ckpt') or 'none was written yet'
        lines.append(_NEXT_STEPS.format(checkpoint=checkpoint))
        return '\n'.join(lines)


def _losses(runner: Runner, outputs: Optional[Dict[str, Any]]) -> Dict[str, float]:
    """Return this iteration's loss terms by name, the total as 'loss'."""
    scalars = runner.message_hub.log_scalars
    # The hub also keeps terms of earlier iterations; the outputs name those of this one.
    names: Iterable[str] = outputs or ()
    return {name: float(scalars[f'train/{name}'].current()) for name in names
            if 'loss' in name and f'train/{name}' in scalars}


def _scales_loss(optim_wrapper: Any) -> bool:
    """Return whether an enabled loss scaler guards every step of the wrapper."""
    # OptimWrapperDict: one scaler for each of several optimizers.
    wrappers = list(optim_wrapper.values()) if hasattr(optim_wrapper, 'values') \
        else [optim_wrapper]
    scalers = [getattr(wrapper, 'loss_scaler', None) for wrapper in wrappers]
    return all(scaler is not None and scaler.is_enabled() for scaler in scalers)


def _image_paths(data_batch: Any) -> List[str]:
    samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
    paths = [str(path) for path in (getattr(sample, 'img_path', None) for sample in samples or ())
             if path]
    if not paths:
        return ['unknown: the batch carries no img_path (meta_keys of PackSegInputs)']
    if len(paths) > _MAX_PATHS:
        return paths[:_MAX_PATHS] + [f'... and {len(paths) - _MAX_PATHS} more']
    return paths
