"""Leaves the frozen weights of a pretrained backbone out of checkpoints.

With adapters or only a head in training, most of a checkpoint would be weights that a public file
already holds. Loading such a checkpoint needs that file; a hash in the checkpoint tells whether it
is the same file. Restoring is done in `mapsage/models/frozen_weights.py` wherever MapSage loads.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS

from mapsage.host.runner import HostRunner, plain_model
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
    """Hook with which checkpoints hold only trained weights: adapters, necks and heads.

    The frozen weights of ``model.backbone`` come back from its ``init_cfg`` wherever MapSage loads
    such a checkpoint, and are compared with a hash in it. Register it in ``custom_hooks``.

    Raises:
        FrozenWeightsError: At the start, if nothing is frozen, if the backbone has no pretrained
            weights, or if ``load_from`` replaces them by others.
    """

    # After EMAHook, which exchanges weights in the checkpoint.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._names: List[str] = []
        self._digest: Optional[str] = None

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Check that a checkpoint has no other frozen weights than the pretrained ones."""
        # Without an optimizer the run is a test, which saves no checkpoints.
        if not isinstance(runner.optim_wrapper, OptimWrapper) or LEFT_OUT in (
            checkpoint.get('meta') or {}
        ):
            return
        model: Any = plain_model(runner)
        state, loaded = model.state_dict(), checkpoint.get('state_dict', {})
        changed = [
            name
            for name in left_out_names(model)
            if name in loaded and not torch.equal(loaded[name].cpu(), state[name].cpu())
        ]
        if changed:
            raise FrozenWeightsError(
                f'TrainedWeightsHook leaves frozen weights out of checkpoints, but {changed[0]} '
                f'and {len(changed) - 1} more of the checkpoint that is loaded differ from '
                f'backbone.init_cfg ({pretrained_source(model.backbone)}), from which they would '
                f'be restored. Name that checkpoint there, or take the hook out of the config.'
            )

    def before_train(self, runner: HostRunner) -> None:
        """Find the frozen weights."""
        model: Any = plain_model(runner)
        self._names, self._digest = left_out_names(model), None
        sizes = {name: value.numel() for name, value in model.state_dict().items()}
        frozen = sum(sizes[name] for name in set(self._names) if name in sizes)
        total = sum(sizes.values())
        runner.logger.info(
            f'checkpoints hold {total - frozen:,} of {total:,} numbers of the model; the others '
            f'come from {pretrained_source(model.backbone)}'
        )

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Remove the frozen weights from the checkpoint."""
        model = plain_model(runner)
        if self._digest is None:
            self._digest = digest_of(model, self._names)
        leave_out(model, checkpoint, self._names, self._digest)
