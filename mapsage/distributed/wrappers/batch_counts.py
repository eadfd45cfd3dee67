"""Sums over the global batch for losses that need them, such as the number of labeled pixels.

A process may carry out several virtual ranks one after the other, so a loss cannot ask the other
ranks in its forward pass: the later ones have not begun. Sums therefore come from the labels
only, and are computed before the first forward pass of a step. Such a loss has two attributes::

    class MyLoss(nn.Module):
        def count_batch(self, data_samples):     # of one virtual rank, as the loader made them
            return torch.tensor([valid_pixels(data_samples), 1.])

        def forward(self, values, data_samples):
            pixels, ranks = self.sum_over_ranks(self.count_batch(data_samples))
            return values.sum() * ranks / pixels   # gradients are averaged over the virtual ranks

        sum_over_ranks = staticmethod(lambda count: count)   # a single process with one rank

The model wrapper replaces ``sum_over_ranks`` with a function that returns the sum over all virtual
ranks.

A loss that needs sums of *predictions*, such as the intersections of a Jaccard index, has
``counts_predictions = True`` and no ``count_batch``. It passes its counts to ``sum_over_ranks`` in
the forward pass. With one virtual rank in each process, this is one small collective per call. With
several, a first pass without gradients over all virtual ranks collects the counts, and the second
pass reads the sums; the first pass takes about a third of a step's time. The sums have no gradient,
and their bits do not depend on the number of processes. Outside of a training step,
``sum_over_ranks`` returns its argument.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import (
    Callable,
    Iterator,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Union,
    runtime_checkable,
)

import torch
import torch.distributed as dist
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import Channel, SerialChannel, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

# Tolerance between the counts of the first and the second pass: kernels that add in any order
# differ in the last bits.
_TOLERANCE = 1e-3
# Counts of one virtual rank in the order of the calls: index of the loss, count in float64 on the
# host.
_Calls = List[Tuple[int, torch.Tensor]]


@runtime_checkable
class LabelCounter(Protocol):
    """A loss that needs a sum over the labels of the global batch."""

    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]

    def count_batch(self, data_samples: Sequence[object]) -> torch.Tensor:
        """Return the counts of one virtual rank's samples, of the same shape for every batch."""


@runtime_checkable
class PredictionCounter(Protocol):
    """A loss that needs a sum over the predictions for the global batch."""

    counts_predictions: bool
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]


class BatchCounts:
    """Computes the sums over all virtual ranks and hands them to the losses of a model.

    Args:
        module: Model.
        ranks: Virtual ranks of the run and their processes.
        group: Process group of these processes; all ranks when None.
    """

    def __init__(
        self, module: nn.Module, ranks: VirtualRanks, group: Optional[dist.ProcessGroup] = None
    ) -> None:
        self._label_counters: List[LabelCounter] = []
        self._prediction_counters: List[PredictionCounter] = []
        self._ranks, self._group = ranks, group
        self._training = False
        # In the first pass: the counts of the current virtual rank. None outside of it.
        self._current_calls: Optional[_Calls] = None
        # Results of the first pass: counts of each virtual rank of this process, and the sum over
        # all virtual ranks of every call.
        self._calls_of_ranks: List[_Calls] = []
        self._totals: List[torch.Tensor] = []
        # Progress of the second pass: index of the virtual rank in this process, and of the call.
        self._rank_index, self._call_index = 0, 0
        self._channel: Channel = SerialChannel()
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Also serve a module that is not part of the model, such as a hook's loss. Collective."""
        known = {id(counter) for counter in (*self._label_counters, *self._prediction_counters)}
        label_counters = [
            counter for counter in _label_counters(module) if id(counter) not in known
        ]
        prediction_counters = [
            counter for counter in _prediction_counters(module) if id(counter) not in known
        ]
        if (label_counters or prediction_counters) and not known:
            # Not the group itself: some groups that carry gradients refuse CPU tensors.
            self._channel = open_channel(self._group, purpose='counts')
        for index, counter in enumerate(prediction_counters, len(self._prediction_counters)):
            counter.sum_over_ranks = self._prediction_summer(index)
        self._label_counters += label_counters
        self._prediction_counters += prediction_counters

    @property
    def wants_first_pass(self) -> bool:
        """Whether a step needs a pass without gradients over all virtual ranks of this process."""
        return bool(self._prediction_counters) and not self._ranks.one_each

    @contextmanager
    def step(self, batches: Sequence[object]) -> Iterator[None]:
        """Open the context of a training step on one batch per virtual rank. Collective.

        Raises:
            VirtualRanksError: As :meth:`prepare` does.
        """
        self.prepare(batches)
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self._calls_of_ranks, self._totals = [], []

    def prepare(self, batches: Sequence[object]) -> None:
        """Sum the label counts of a step's batches, one per virtual rank here. Collective.

        Raises:
            VirtualRanksError: If a count is not a tensor, or the batches have no data samples.
        """
        if not self._label_counters:
            return
        counts = [
            [_count_labels(counter, batch) for counter in self._label_counters] for batch in batches
        ]
        total = self._sum_over_virtual_ranks(
            [torch.cat([count.reshape(-1) for count in rank_counts]) for rank_counts in counts]
        )
        shapes = [count.shape for count in counts[0]]
        sums = total.split([shape.numel() for shape in shapes])
        for counter, shape, counter_sum in zip(self._label_counters, shapes, sums):
            counter.sum_over_ranks = _label_summer(counter_sum.reshape(shape))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Store the prediction counts of one virtual rank, in the first pass."""
        calls: _Calls = []
        self._current_calls = calls
        try:
            yield
        finally:
            self._current_calls = None
        self._calls_of_ranks.append(calls)

    def sum_collected(self) -> None:
        """End the first pass: sum the collected counts over all virtual ranks. Collective.

        Raises:
            VirtualRanksError: If the virtual ranks of this process called different losses.
        """
        layouts = [
            [(index, count.shape) for index, count in calls] for calls in self._calls_of_ranks
        ]
        if any(layout != layouts[0] for layout in layouts):
            raise VirtualRanksError(
                f'virtual ranks of this process have called {_names(self._prediction_counters)} '
                f'with other counts than the first: {layouts}. Expected a model that computes the '
                f'same losses for every batch.'
            )
        self._totals = []
        if layouts[0]:
            total = self._sum_over_virtual_ranks(
                [
                    torch.cat([count.reshape(-1) for _, count in calls])
                    for calls in self._calls_of_ranks
                ]
            )
            shapes = [shape for _, shape in layouts[0]]
            self._totals = [
                values.reshape(shape)
                for values, shape in zip(total.split([shape.numel() for shape in shapes]), shapes)
            ]
        self._rank_index, self._call_index = 0, 0

    def next_virtual_rank(self) -> None:
        """Continue with the next virtual rank of this process, in the second pass."""
        self._rank_index, self._call_index = self._rank_index + 1, 0

    def _prediction_summer(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # Not a bound method: a deep copy of the model, such as EMAHook's, would copy the channel.
        return lambda count: self._sum_predictions(index, count)

    def _sum_predictions(self, index: int, count: torch.Tensor) -> torch.Tensor:
        """Return a loss's count summed over the virtual ranks. Collective in a training step."""
        if not self._training:
            return count.detach()
        # Converted on the host, because some devices have no float64.
        host_count = count.detach().cpu().double()
        if self._current_calls is not None:
            self._current_calls.append((index, host_count))
            return count.detach()
        if self._ranks.one_each:
            total = self._sum_over_virtual_ranks([host_count.reshape(-1)])
            total = total.reshape(host_count.shape)
        else:
            total = self._read_total(index, host_count)
        return total.to(count.dtype).to(count.device)

    def _read_total(self, index: int, host_count: torch.Tensor) -> torch.Tensor:
        """Return the sum that the first pass computed for the current call."""
        calls, call_index = self._calls_of_ranks[self._rank_index], self._call_index
        self._call_index += 1
        name = type(self._prediction_counters[index]).__name__
        if (
            call_index >= len(calls)
            or calls[call_index][0] != index
            or calls[call_index][1].shape != host_count.shape
        ):
            raise VirtualRanksError(
                f'{name} was called otherwise in the second pass of a step than in the first: '
                f'expected a model that computes the same losses twice for a batch.'
            )
        first_count = calls[call_index][1]
        # Skipped on a lazy device, which would have to run its recorded operations twice.
        if not current_accelerator().lazy and not torch.allclose(
            first_count,
            host_count,
            rtol=_TOLERANCE,
            atol=_TOLERANCE * float(first_count.abs().max()),
            equal_nan=True,
        ):
            raise VirtualRanksError(
                f'{name} counted something else in the second pass of a step than in the first, '
                f'by up to {float((first_count - host_count).abs().max()):g} of '
                f'{float(first_count.abs().max()):g} pixels: the model keeps a state or draws '
                f'random numbers that are not seeded. Start {self._ranks.count} processes, one for '
                f'each virtual rank, where one pass suffices.'
            )
        return self._totals[call_index]

    def _sum_over_virtual_ranks(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of one vector per virtual rank, added in their order. Collective.

        Args:
            vectors: Vectors of this process's virtual ranks, float64 ``(length,)`` on the host.
        """
        # Processes may have blocks of different lengths, and the channel gathers equal shapes.
        padded = vectors[0].new_zeros(len(self._ranks.block(0)), len(vectors[0]))
        padded[: len(vectors)] = torch.stack(list(vectors))
        total = torch.zeros_like(vectors[0])
        for rows, block in zip(self._channel.gather(padded), self._ranks.blocks):
            for row in rows[: len(block)]:
                total += row
        return total


@runtime_checkable
class _HasCounts(Protocol):
    counts: BatchCounts


def gives_counts(wrapper: nn.Module) -> bool:
    """Return whether a model wrapper has :class:`BatchCounts`, as its attribute ``counts``."""
    return isinstance(wrapper, _HasCounts) and isinstance(wrapper.counts, BatchCounts)


def counters_of(module: nn.Module) -> List[Union[LabelCounter, PredictionCounter]]:
    """Return the losses of a module that need sums over the global batch, in its order."""
    return [
        child for child in module.modules() if isinstance(child, (LabelCounter, PredictionCounter))
    ]


def names_of_counters(module: nn.Module) -> List[str]:
    """Return the sorted names of the loss classes that need sums over the global batch."""
    return sorted(
        {
            type(counter).__name__
            for counter in (*_label_counters(module), *_prediction_counters(module))
        }
    )


def _label_counters(module: nn.Module) -> List[LabelCounter]:
    return [child for child in module.modules() if isinstance(child, LabelCounter)]


def _prediction_counters(module: nn.Module) -> List[PredictionCounter]:
    return [
        child
        for child in module.modules()
        if isinstance(child, PredictionCounter) and child.counts_predictions
    ]


def _names(counters: Sequence[PredictionCounter]) -> str:
    return ', '.join(sorted({type(counter).__name__ for counter in counters}))


def _count_labels(counter: LabelCounter, batch: object) -> torch.Tensor:
    """Return the counts of one virtual rank's labels in float64, where all counts are exact."""
    samples = batch.get('data_samples') if isinstance(batch, Mapping) else None
    if samples is None:
        raise VirtualRanksError(
            f'{type(counter).__name__}.count_batch counts data samples, and the batch '
            f'({type(batch).__name__}) has no key data_samples.'
        )
    count: object = counter.count_batch(samples)
    if not isinstance(count, torch.Tensor):
        raise VirtualRanksError(
            f'{type(counter).__name__}.count_batch gives {count!r}, expected a tensor of the '
            f'same shape for every batch.'
        )
    return count.detach().to('cpu', torch.float64)


def _label_summer(total: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        if count.shape != total.shape:
            raise VirtualRanksError(
                f'sum_over_ranks was given a count of shape {tuple(count.shape)}: expected the '
                f'shape that count_batch returns, {tuple(total.shape)}. Only counts of labels can '
                f'be summed over virtual ranks, because one process carries them out one after '
                f'the other.'
            )
        return total.to(count.device, count.dtype)

    return sum_over_ranks
