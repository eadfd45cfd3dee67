"""A card that computes wrong numbers: bits of what its kernels return are flipped on demand.

The kernels are matrix products and convolutions, in the forward and in the backward pass, so that a
fault takes the way through the model that it takes on a real card.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

import torch
import torch.nn.functional as functional
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

STAGES = ('forward', 'backward')


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one float32 of a tensor on any device, in place."""
    host = tensor.detach().cpu().contiguous()
    numbers = host.view(-1).view(torch.int32)
    numbers[element % numbers.numel()] ^= 1 << bit if bit < 31 else -(2**31)
    with torch.no_grad():
        tensor.copy_(host)


class FaultyCard:
    """The kernels of this process, which are sound until :meth:`break_down` is called.

    Attributes:
        flips: Number of bits that were flipped.
    """

    def __init__(self) -> None:
        self.flips = 0
        self._stage, self._once = '', False
        self._element = self._bit = 0
        self._when: Callable[[], bool] = lambda: True
        self._originals = functional.linear, functional.conv2d
        functional.linear = self._through(functional.linear)
        functional.conv2d = self._through(functional.conv2d)

    def break_down(
        self,
        stage: str,
        element: int,
        bit: int,
        once: bool = False,
        when: Optional[Callable[[], bool]] = None,
    ) -> None:
        """Flip a bit in the results of all kernels of a stage, or of the next one only."""
        self._stage, self._element, self._bit, self._once = stage, element, bit, once
        self._when = when or (lambda: True)

    def mend(self) -> None:
        """Compute right numbers from now on."""
        self._stage = ''

    @contextmanager
    def mended(self) -> Iterator[None]:
        """Compute right numbers in the block."""
        stage, self._stage = self._stage, ''
        try:
            yield
        finally:
            self._stage = stage

    def remove(self) -> None:
        """Restore PyTorch's functions."""
        functional.linear, functional.conv2d = self._originals

    def _through(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
            return _Result.apply(kernel(*args, **kwargs), self)

        return compute

    def returned(self, stage: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a kernel has computed, with a flipped bit if the card is broken."""
        if self._stage != stage or not self._when():
            return tensor
        if self._once:
            self._stage = ''
        self.flips += 1
        changed = tensor.detach().clone()
        flip_bit(changed, self._element, self._bit)
        return changed


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, card: FaultyCard) -> torch.Tensor:
        ctx.card = card
        return card.returned('forward', result).view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.card.returned('backward', gradient), None


@HOOKS.register_module(force=True)
class CardBreaksDown(Hook):
    """Lets the card of one rank compute wrong numbers from one iteration on, counted from 1."""

    priority = 'VERY_HIGH'

    def __init__(self, rank: int, iteration: int, stage: str = 'forward', bit: int = 20) -> None:
        self.rank, self.iteration, self.stage, self.bit = rank, iteration, stage, bit

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if get_rank() == self.rank and runner.iter + 1 == self.iteration:
            FaultyCard().break_down(self.stage, 3, self.bit)
