"""Lets the masks in the attention of EoMT and PMT fade out while they train.

The probabilities are buffers of the heads. So all copies of the model must get them: each virtual
rank's buffers, and the average of ``EMAHook``. Blocks fade one after the other, the first block
first.

Source of the schedule: tue-mps/eomt@7bd19dd, ``training/lightning_module.py``; equal phases as in
LightlyTrain.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from mmengine.hooks import EMAHook
from mmengine.registry import HOOKS
from torch import nn

from mapsage.base.errors import UserError
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, hooks_of_type


class AnnealingError(UserError, ValueError):
    """An annealing schedule is invalid or does not fit the model."""


@HOOKS.register_module()
class MaskAnnealingHook(MapSageHook):
    """Hook that sets ``attn_mask_probs`` of a model's heads by the number of the step.

    Block after block, the probability that a query sees only the patches in its mask falls from 1
    to 0; at 0 a model needs neither masks nor the predictions that they come from. The values
    depend only on the number of the step, so a resumed run continues with the same values. The
    average of ``EMAHook`` gets them too: a mean over the earlier steps would keep masks that the
    training has left behind.

    Args:
        starts: Step at which each block's probability begins to fall; None for ``blocks + 2``
            phases of equal length, from the training's length.
        ends: Step at which each block's probability is 0.
        power: Exponent of the fall.

    Raises:
        AnnealingError: If starts and ends do not fit each other or the model, or the model has no
            masks.
    """

    # After EMAHook, before the hooks that validate and save.
    priority = 'BELOW_NORMAL'

    def __init__(
        self,
        starts: Optional[Sequence[int]] = None,
        ends: Optional[Sequence[int]] = None,
        power: float = 0.9,
    ) -> None:
        check_phases(starts, ends)
        self.starts, self.ends, self.power = starts, ends, power
        # One tensor for each head, with one probability for each of its blocks.
        self._probabilities: List[torch.Tensor] = []
        self._values: List[float] = []

    def before_train(self, runner: HostRunner) -> None:
        """Look for the masks, and choose the phases if the config does not give them."""
        self._probabilities = _find_probabilities(runner.model)
        if not self._probabilities:
            raise AnnealingError(
                'MaskAnnealingHook: the model has no masks that could fade out '
                '(attn_mask_probs, as EoMTHead and PMTHead have); take it out of '
                'custom_hooks'
            )
        blocks = len(self._probabilities[0])
        if self.starts is None or self.ends is None:
            self.starts, self.ends = equal_phases(blocks, runner.max_iters)
        wrong = [len(buffer) for buffer in self._probabilities if len(buffer) != len(self.starts)]
        if wrong:
            raise AnnealingError(
                f'MaskAnnealingHook: {len(self.starts)} starts and ends, and '
                f'the model has {wrong[0]} masked blocks (num_blocks of its '
                'decode head); give one for each'
            )
        for hook in hooks_of_type(runner, EMAHook):
            self._probabilities += _find_probabilities(hook.ema_model)
        runner.logger.info(
            f'[Masks] fade out from steps {list(self.starts)} to {list(self.ends)}, '
            f'of {runner.max_iters}'
        )
        self._values = []
        self._update(runner.iter)
        self.follow_virtual_ranks(runner)

    def after_train(self, runner: HostRunner) -> None:
        """Leave the model's wrapper as it was."""
        self.unfollow_virtual_ranks(runner)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Set the probabilities of the next step, which validations and checkpoints use too."""
        self._update(runner.iter + 1)
        runner.message_hub.update_scalar('train/masked', sum(self._values) / len(self._values))

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Set the probabilities in the buffers of a virtual rank, which are in the model now."""
        self._write_buffers()

    def _update(self, step: int) -> None:
        assert self.starts is not None and self.ends is not None
        values = [
            mask_probability(step, start, end, self.power)
            for start, end in zip(self.starts, self.ends)
        ]
        if values != self._values:
            self._values = values
            self._write_buffers()

    @torch.no_grad()
    def _write_buffers(self) -> None:
        for buffer in self._probabilities:
            buffer.copy_(torch.tensor(self._values, dtype=buffer.dtype))


def _find_probabilities(model: nn.Module) -> List[torch.Tensor]:
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name.rpartition('.')[2] == 'attn_mask_probs'
    ]


def mask_probability(step: int, start: int, end: int, power: float = 0.9) -> float:
    """Return the probability (0..1) that a query's attention is masked in a step.

    Args:
        step: Number of the step, counted from 0.
        start: Last step with the probability 1.
        end: First step with the probability 0.
        power: Exponent of the polynomial between ``start`` and ``end``.
    """
    if step < start:
        return 1.0
    if step >= end:
        return 0.0
    return (1 - (step - start) / (end - start)) ** power


def equal_phases(blocks: int, steps: int) -> Tuple[List[int], List[int]]:
    """Return the starts and ends of fading, one per block, for a training of ``steps`` steps.

    The training has ``blocks + 2`` phases of equal length. In the first phase all blocks mask, then
    one block after the other fades out, and in the last phase none masks.
    """
    bounds = [steps * phase // (blocks + 2) for phase in range(1, blocks + 2)]
    return bounds[:-1], bounds[1:]


def check_phases(starts: Optional[Sequence[int]], ends: Optional[Sequence[int]]) -> None:
    """Check that both are None, or have one length and every start is before its end.

    Raises:
        AnnealingError: If they are not.
    """
    if starts is None and ends is None:
        return
    if (
        starts is None
        or ends is None
        or len(starts) != len(ends)
        or not starts
        or any(not 0 <= start < end for start, end in zip(starts, ends))
    ):
        raise AnnealingError(
            f'starts={starts} and ends={ends}: expected one start and one end per '
            'masked block, each start of 0 or more before its end; or leave '
            'both out for phases of equal length'
        )
