"""Evaluates on every rank the buffers that the checkpoint holds."""
from __future__ import annotations

from typing import Any, Iterator

import torch
from mmengine.dist import all_reduce, is_distributed
from mmengine.hooks import EMAHook, Hook, SyncBuffersHook
from mmengine.registry import HOOKS

from mapsage.distributed import broadcast_tensors
from mapsage.wrappers import VirtualDataParallel


@HOOKS.register_module()
class EqualBuffersHook(Hook):
    """Hook that gives every rank the buffers of rank 0 before an evaluation.

    During training each rank has its own BatchNorm statistics, as under MMEngine, and so has its
    copy in ``EMAHook``. A checkpoint holds those of rank 0. All ranks evaluate these, so that the
    logged figures are those of the checkpoint.

    ``SyncBuffersHook`` averages the statistics over the ranks at the end of an epoch, and in an
    iteration-based loop before a validation, after the checkpoint of that iteration was saved. If
    the run has that hook, they are averaged before each checkpoint too.

    ``MapSageRunner`` registers it behind all other hooks: ``EMAHook`` has exchanged the model's
    buffers by then.
    """

    priority = 'LOWEST'

    def before_val_epoch(self, runner: Any) -> None:
        """Copy the buffers of rank 0 to every rank. Collective."""
        if isinstance(runner.model, VirtualDataParallel):
            runner.model.share_buffers()
        else:
            broadcast_tensors(runner.model.buffers())

    before_test_epoch = before_val_epoch

    def gather_state(self, runner: Any) -> None:
        """Average the buffers before a checkpoint, if the run averages them. Collective."""
        if is_distributed() and any(isinstance(hook, SyncBuffersHook) for hook in runner.hooks):
            for buffer in _evaluated_buffers(runner):
                all_reduce(buffer, 'mean')


def _evaluated_buffers(runner: Any) -> Iterator[torch.Tensor]:
    """Yield the buffers of the model, and those that ``EMAHook`` puts in their place."""
    yield from runner.model.buffers()
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and hook.ema_model.update_buffers:
            yield from hook.ema_model.module.buffers()
