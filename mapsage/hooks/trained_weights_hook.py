"""Leaves the frozen weights of a pretrained backbone out of checkpoints."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS

from mapsage.models.frozen_weights import (
    LEFT_OUT,
    FrozenWeightsError,
    digest_of,
    leave_out,
    left_out_names,
    pretrained_source,
)


@HOOKS.register_module()
class TrainedWeightsHook(Hook):
    """Hook with which checkpoints hold what is trained alone: adapters, necks and heads.

    The frozen weights of ``model.backbone`` come back from its ``init_cfg`` wherever MapSage loads
    such a checkpoint, and are compared with a hash in it. Register it in ``custom_hooks``.

    Raises:
        FrozenWeightsError: At the start, if nothing is frozen, if the backbone has no pretrained
            weights, or if ``load_from`` replaces them by others.
    """

    priority = 'LOWEST'  # behind EMAHook, which exchanges weights in the checkpoint

    def __init__(self) -> None:
        self._names: List[str] = []
        self._digest: Optional[str] = None

    def after_load_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Check that a checkpoint brings no other frozen weights than the pretrained ones."""
        if not isinstance(runner.optim_wrapper, OptimWrapper) or LEFT_OUT in (
                checkpoint.get('meta') or {}):
            return
        model = _model(runner)
        state, loaded = model.state_dict(), checkpoint.get('state_dict', {})
        others = [name for name in left_out_names(model)
                  if name in loaded and not torch.equal(loaded[name].cpu(), state[name].cpu())]
        if others:
            raise FrozenWeightsError(
                f'TrainedWeightsHook leaves frozen weights out of checkpoints, but {others[0]} and '
                f'{len(others) - 1} more of the checkpoint that is loaded are not those of '
                f'backbone.init_cfg ({pretrained_source(model.backbone)}), from which they would '
                f'be restored. Name that checkpoint there, or take the hook out of the config.')

    def before_train(self, runner: Any) -> None:
        """Find the frozen weights."""
        model = _model(runner)
        self._names, self._digest = left_out_names(model), None
        state = model.state_dict()
        kept = sum(value.numel() for name, value in state.items() if name not in set(self._names))
        every = sum(value.numel() for value in state.values())
        runner.logger.info(
            f'checkpoints hold {kept:,} of {every:,} numbers of the model; the others are those of '
            f'{pretrained_source(model.backbone)}')

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Leave them out."""
        model = _model(runner)
        if self._digest is None:
            self._digest = digest_of(model, self._names)
        leave_out(model, checkpoint, self._names, self._digest)


def _model(runner: Any) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model
