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

A loss that needs sums of *predictions*, such as the intersections of a Jaccard index, has
``counts_predictions = True`` and no ``count_batch``. Its ``sum_over_ranks`` sums what it is called
with in the forward pass: over processes then and there, one small collective a call; where a
process carries out several virtual ranks in turn, a first pass without gradients over all of them
collects the counts, which costs one more forward pass a step, about a third of its time. The sums
are without gradient, and equal bit for bit on any number of processes. Outside a training step such
a call returns what it is given.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import Channel, SerialChannel, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

# How far a count of the second pass may be from that of the first: the noise of kernels that add
# in any order.
_SAME = 1e-3
# Counts of one virtual rank in the order of the calls, with the place of the module that made it.
_Calls = List[Tuple[int, torch.Tensor]]


class BatchCounts:
    """Gives modules the sums of their counts over virtual ranks, of labels and of predictions.

    Args:
        module: Model.
        ranks: Virtual ranks of the run and their processes.
        group: Process group of these; all ranks when None.
    """

    def __init__(self, module: nn.Module, ranks: VirtualRanks, group: Optional[Any] = None
                 ) -> None:
        self._modules: List[Any] = []
        self._predicting: List[Any] = []
        self._ranks, self._group = ranks, group
        self._training = False
        self._collected: Optional[_Calls] = None  # in the first pass: of the present virtual rank
        self._found: List[_Calls] = []  # of the virtual ranks of this process
        self._totals: List[torch.Tensor] = []
        self._turn, self._call = 0, 0
        self._channel: Channel = SerialChannel()
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Give counts to a module outside of the model, such as a hook's loss, too. Collective."""
        known = [*self._modules, *self._predicting]
        counters, predicting = (
            [each for each in find(module) if not any(each is other for other in known)]
            for find in (_counters, _predicting))
        if (counters or predicting) and not known:
            # The channel of control traffic, since not every group that carries gradients takes
            # CPU tensors.
            self._channel = open_channel(self._group, purpose='counts')
        for place, each in enumerate(predicting, len(self._predicting)):
            each.sum_over_ranks = self._summer(place)
        self._modules += counters
        self._predicting += predicting

    @property
    def wants_first_pass(self) -> bool:
        """Whether a step needs a pass without gradients over all virtual ranks of this process."""
        return bool(self._predicting) and not self._ranks.one_each

    @contextmanager
    def step(self, batches: Sequence[Any]) -> Iterator[None]:
        """Return the context of a training step on one batch for each virtual rank. Collective.

        Raises:
            VirtualRanksError: As :meth:`prepare` does.
        """
        self.prepare(batches)
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self._found, self._totals = [], []

    def prepare(self, batches: Sequence[Any]) -> None:
        """Count the batches of a step, one for each virtual rank of this process. Collective.

        Raises:
            VirtualRanksError: If a count is no tensor, or the batches have no data samples.
        """
        if not self._modules:
            return
        counts = [[self._count(each, batch) for each in self._modules] for batch in batches]
        total = self._total([torch.cat([count.reshape(-1) for count in each]) for each in counts])
        shapes = [count.shape for count in counts[0]]
        parts = total.split([shape.numel() for shape in shapes])
        for each, shape, part in zip(self._modules, shapes, parts):
            each.sum_over_ranks = _giver(part.reshape(shape))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the counts of the predictions for one virtual rank, in the first pass."""
        self._collected = []
        try:
            yield
        finally:
            found, self._collected = self._collected, None
        self._found.append(found)

    def sum_collected(self) -> None:
        """End the first pass: sum what was collected over all virtual ranks. Collective.

        Raises:
            VirtualRanksError: If virtual ranks have called other losses than the first one.
        """
        layouts = [[(place, count.shape) for place, count in calls] for calls in self._found]
        if any(layout != layouts[0] for layout in layouts):
            raise VirtualRanksError(
                f'virtual ranks of this process have called {_names(self._predicting)} with other '
                f'counts than the first: {layouts}. Expected a model that computes the same losses '
                f'for every batch.')
        flat = [torch.cat([count.reshape(-1) for _, count in calls]) for calls in self._found] \
            if layouts[0] else []
        self._totals = []
        if flat:
            total = self._total(flat)
            sizes = [shape.numel() for _, shape in layouts[0]]
            self._totals = [part.reshape(shape)
                            for part, (_, shape) in zip(total.split(sizes), layouts[0])]
        self._turn, self._call = 0, 0

    def next_turn(self) -> None:
        """Go on to the next virtual rank of this process, in the second pass."""
        self._turn, self._call = self._turn + 1, 0

    def _summer(self, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # No bound method: a deep copy of the model, as EMAHook makes, would copy the channel too.
        return lambda count: self._sum_predictions(place, count)

    def _sum_predictions(self, place: int, count: torch.Tensor) -> torch.Tensor:
        """Return the sum over virtual ranks of what a loss has counted. Collective in a step."""
        if not self._training:
            return count.detach()
        # It leaves its device first: not every device has float64.
        host = count.detach().cpu().double()
        if self._collected is not None:
            self._collected.append((place, host))
            return count.detach()
        total = self._total([host.reshape(-1)]).reshape(host.shape) if self._ranks.one_each \
            else self._next_total(place, host)
        return total.to(count.dtype).to(count.device)

    def _next_total(self, place: int, host: torch.Tensor) -> torch.Tensor:
        calls, call = self._found[self._turn], self._call
        self._call += 1
        if call >= len(calls) or calls[call][0] != place or calls[call][1].shape != host.shape:
            raise VirtualRanksError(
                f'{type(self._predicting[place]).__name__} was called otherwise in the second pass '
                f'of a step than in the first: expected a model that computes the same losses '
                f'twice for a batch.')
        first = calls[call][1]
        # A device that records its operations would have to carry them out twice for this.
        if not current_accelerator().lazy and not torch.allclose(
                first, host, rtol=_SAME, atol=_SAME * float(first.abs().max()), equal_nan=True):
            raise VirtualRanksError(
                f'{type(self._predicting[place]).__name__} counted something else in the second '
                f'pass of a step than in the first, by up to {float((first - host).abs().max()):g} '
                f'of {float(first.abs().max()):g} pixels: the model keeps a state or draws random '
                f'numbers that are not seeded. Start {self._ranks.count} processes, one for each '
                f'virtual rank, where one pass suffices.')
        return self._totals[call]

    def _total(self, mine: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of vectors over all virtual ranks, in their order. Collective."""
        padded = mine[0].new_zeros(len(self._ranks.block(0)), len(mine[0]))
        padded[:len(mine)] = torch.stack(list(mine))
        total = torch.zeros_like(mine[0])
        for rows, block in zip(self._channel.gather(padded), self._ranks.blocks):
            for row in rows[:len(block)]:
                total += row
        return total

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
    return sorted({type(each).__name__ for each in [*_counters(module), *_predicting(module)]})


def _counters(module: nn.Module) -> List[Any]:
    return [each for each in module.modules() if hasattr(each, 'count_batch')]


def _predicting(module: nn.Module) -> List[Any]:
    return [each for each in module.modules() if getattr(each, 'counts_predictions', False)]


def _names(modules: Sequence[Any]) -> str:
    return ', '.join(sorted({type(each).__name__ for each in modules}))


def _giver(total: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        if count.shape != total.shape:
            raise VirtualRanksError(
                f'sum_over_ranks was given a count of shape {tuple(count.shape)}: expected that '
                f'of count_batch, {tuple(total.shape)}. Only counts of labels can be summed over '
                f'virtual ranks, since these take turns in one process.')
        return total.to(count.device, count.dtype)

    return sum_over_ranks
