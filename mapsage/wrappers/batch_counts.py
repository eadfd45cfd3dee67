"""Counts of the global batch for losses that need them, without a collective in a forward pass.

Where one process carries out several virtual ranks in turn, the later ones' counts are not known
while the first one computes its loss. Counts therefore come from the labels alone, before the first
forward pass of a step. A module that needs them has two attributes::

    class MyLoss(nn.Module):
        def count_batch(self, data_samples):     # of one virtual rank, as the loader made them
            return torch.tensor([valid_pixels(data_samples), 1.])

        def forward(self, values, data_samples):
            pixels, ranks = self.sum_over_ranks(self.count_batch(data_samples))
            return values.sum() * ranks / pixels   # gradients are averaged over the virtual ranks

        sum_over_ranks = staticmethod(lambda count: count)   # a single process with one rank

The wrapper puts a function of its own in the place of ``sum_over_ranks``.
"""
from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import nn

from mapsage.distributed import Channel, SerialChannel, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError


class BatchCounts:
    """Gives the modules that have ``count_batch`` the sums of their counts over virtual ranks.

    Args:
        module: Model.
        ranks: Virtual ranks of the run and their processes.
        group: Process group of these; all ranks when None.
    """

    def __init__(self, module: nn.Module, ranks: VirtualRanks, group: Optional[Any] = None
                 ) -> None:
        self._modules = _counters(module)
        self._ranks = ranks
        # The channel of control traffic, since not every group that carries gradients takes CPU
        # tensors.
        self._channel: Channel = (open_channel(group, purpose='counts') if self._modules
                                  else SerialChannel())

    def prepare(self, batches: Sequence[Any]) -> None:
        """Count the batches of a step, one for each virtual rank of this process. Collective.

        Raises:
            VirtualRanksError: If a count is no tensor, or the batches have no data samples.
        """
        if not self._modules:
            return
        counts = [[self._count(each, batch) for each in self._modules] for batch in batches]
        flat = torch.stack([torch.cat([count.reshape(-1) for count in each]) for each in counts])
        padded = flat.new_zeros(len(self._ranks.block(0)), flat.shape[1])
        padded[:len(flat)] = flat
        total = torch.zeros_like(flat[0])
        for rows, block in zip(self._channel.gather(padded), self._ranks.blocks):
            for row in rows[:len(block)]:
                total += row
        shapes = [count.shape for count in counts[0]]
        parts = total.split([shape.numel() for shape in shapes])
        for each, shape, part in zip(self._modules, shapes, parts):
            each.sum_over_ranks = _giver(part.reshape(shape))

    def _count(self, module: Any, batch: Any) -> torch.Tensor:
        samples = batch.get('data_samples') if isinstance(batch, dict) else None
        if samples is None:
            raise VirtualRanksError(
                f'{type(module).__name__}.count_batch counts data samples, and the batch '
                f'({type(batch).__name__}) has no key data_samples.')
        count = module.count_batch(samples)
        if not isinstance(count, torch.Tensor):
            raise VirtualRanksError(
                f'{type(module).__name__}.count_batch gives {count!r}, expected a tensor of the '
                f'same shape for every batch.')
        # In float64 all counts are exact.
        return count.detach().to('cpu', torch.float64)


def gives_counts(wrapper: nn.Module) -> bool:
    """Return whether a model wrapper has :class:`BatchCounts`, as its attribute ``counts``."""
    return isinstance(getattr(wrapper, 'counts', None), BatchCounts)


def names_of_counters(module: nn.Module) -> List[str]:
    """Return the names of the classes that want counts of the global batch, sorted."""
    return sorted({type(each).__name__ for each in _counters(module)})


def _counters(module: nn.Module) -> List[Any]:
    return [each for each in module.modules() if hasattr(each, 'count_batch')]


def _giver(total: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        if count.shape != total.shape:
            raise VirtualRanksError(
                f'sum_over_ranks was given a count of shape {tuple(count.shape)}: expected that '
                f'of count_batch, {tuple(total.shape)}. Only counts of labels can be summed over '
                f'virtual ranks, since these take turns in one process.')
        return total.to(count.device, count.dtype)

    return sum_over_ranks
