"""Evaluates on every rank the buffers that the checkpoint holds.

Ranks have different BatchNorm statistics while they train, but a checkpoint holds one set. Without
this hook the logged score would mix statistics of which most are never saved.
"""

from __future__ import annotations

from typing import Iterator

import torch
from mmengine.dist import all_reduce, is_distributed
from mmengine.hooks import EMAHook, SyncBuffersHook
from mmengine.registry import HOOKS

from mapsage.distributed import broadcast_tensors
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, MapSageRun, hooks_of_type


@HOOKS.register_module()
class EqualBuffersHook(MapSageHook):
    """Hook that gives every rank the buffers of rank 0 before an evaluation.

    During training each rank has its own BatchNorm statistics, as under MMEngine, in the model and
    in the copy of ``EMAHook``. A checkpoint holds the statistics of rank 0. All ranks evaluate
    these, so the logged figures are the figures of the checkpoint.

    ``SyncBuffersHook`` averages the statistics over the ranks at the end of an epoch, and in an
    iteration-based loop before a validation, after the checkpoint of that iteration was saved. If
    the run has that hook, they are averaged before each checkpoint too.

    ``MapSageRunner`` registers it after all other hooks: ``EMAHook`` has exchanged the model's
    buffers by then.
    """

    priority = 'LOWEST'

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Copy the buffers of rank 0 to every rank. Collective."""
        if isinstance(runner.model, VirtualDataParallel):
            runner.model.share_buffers()
        else:
            broadcast_tensors(runner.model.buffers())

    before_test_epoch = before_val_epoch

    def gather_state(self, runner: MapSageRun) -> None:
        """Average the buffers before a checkpoint, if the run averages them. Collective."""
        if is_distributed() and hooks_of_type(runner, SyncBuffersHook):
            for buffer in _evaluated_buffers(runner):
                all_reduce(buffer, 'mean')


def _evaluated_buffers(runner: HostRunner) -> Iterator[torch.Tensor]:
    """Yield the buffers of the model, and the buffers that ``EMAHook`` exchanges with them."""
    yield from runner.model.buffers()
    for hook in hooks_of_type(runner, EMAHook):
        if hook.ema_model.update_buffers:
            yield from hook.ema_model.module.buffers()
