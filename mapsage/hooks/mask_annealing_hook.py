"""Lets the masks in the attention of EoMT and PMT fade out while they train."""
from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS

from mapsage.models.mask_transformers.annealing import (
    AnnealingError,
    check_phases,
    equal_phases,
    mask_probability,
)


@HOOKS.register_module()
class MaskAnnealingHook(Hook):
    """Hook that sets ``attn_mask_probs`` of a model's heads by the number of the step.

    Block after block, the probability that a query sees only the patches in its mask falls from 1
    to 0; at 0 a model needs neither masks nor the predictions that they come from. What a step gets
    depends on its number alone, so that a resumed run goes on with the same values. The average of
    ``EMAHook`` has the same values: a mean over the steps before would keep masks that are gone.

    Args:
        starts: Step at which each block's probability begins to fall; None for ``blocks + 2``
            phases of equal length, from the training's length.
        ends: Step at which it is 0.
        power: Exponent of the fall.

    Raises:
        AnnealingError: If starts and ends do not fit each other or the model, or the model has no
            masks.
    """

    priority = 'BELOW_NORMAL'  # behind EMAHook, before what validates and saves

    def __init__(self, starts: Optional[Sequence[int]] = None,
                 ends: Optional[Sequence[int]] = None, power: float = 0.9) -> None:
        check_phases(starts, ends)
        self.starts, self.ends, self.power = starts, ends, power
        self._probabilities: List[torch.Tensor] = []
        self._values: List[float] = []

    def before_train(self, runner: Any) -> None:
        """Look for the masks, and choose the phases if the config does not give them."""
        self._probabilities = _probabilities_of(runner.model)
        if not self._probabilities:
            raise AnnealingError('MaskAnnealingHook: the model has no masks that could fade out '
                                 '(attn_mask_probs, as EoMTHead and PMTHead have); take it out of '
                                 'custom_hooks')
        blocks = len(self._probabilities[0])
        if self.starts is None or self.ends is None:
            self.starts, self.ends = equal_phases(blocks, runner.max_iters)
        wrong = [len(each) for each in self._probabilities if len(each) != len(self.starts)]
        if wrong:
            raise AnnealingError(f'MaskAnnealingHook: {len(self.starts)} starts and ends, and '
                                 f'the model has {wrong[0]} masked blocks (num_blocks of its '
                                 'decode head); give one for each')
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._probabilities += _probabilities_of(hook.ema_model)
        runner.logger.info(f'[Masks] fade out from steps {list(self.starts)} to {list(self.ends)}, '
                           f'of {runner.max_iters}')
        self._values = []
        self._update(runner.iter)
        if hasattr(runner.model, 'on_virtual_rank_start'):
            # Each virtual rank has buffers of its own, which are in place by then.
            runner.model.on_virtual_rank_start.append(self._set)

    def after_train(self, runner: Any) -> None:
        """Leave the model's wrapper as it was."""
        if self._set in getattr(runner.model, 'on_virtual_rank_start', ()):
            runner.model.on_virtual_rank_start.remove(self._set)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """Set the probabilities of the next step, with which validations and checkpoints come."""
        self._update(runner.iter + 1)
        runner.message_hub.update_scalar('train/masked', sum(self._values) / len(self._values))

    def _update(self, step: int) -> None:
        assert self.starts is not None and self.ends is not None
        values = [mask_probability(step, start, end, self.power)
                  for start, end in zip(self.starts, self.ends)]
        if values != self._values:
            self._values = values
            self._set()

    @torch.no_grad()
    def _set(self, *_: Any) -> None:
        for buffer in self._probabilities:
            buffer.copy_(torch.tensor(self._values, dtype=buffer.dtype))


def _probabilities_of(model: torch.nn.Module) -> List[torch.Tensor]:
    found = [getattr(each, 'attn_mask_probs', None) for each in model.modules()]
    return [each for each in found if isinstance(each, torch.Tensor)]
