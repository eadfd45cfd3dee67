"""The iterators of a training loop whose batches come from dynamic sampling.

:class:`LoaderStream` turns the training loader into an endless stream of candidates, from which the
sampler draws as many batches as a step needs. :class:`SampledSteps` collates what the sampler chose
and hands it to the loop, so the loop's count of batches is not the loader's.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence

import torch
from torch.utils.data import DataLoader

from mapsage.base.errors import UserError
from mapsage.base.process import BackgroundWorker
from mapsage.distributed.wrappers.rank_batches import pack_rank_batches, unpack_rank_batches
from mapsage.sampling import BlockSampler, Candidate, SampledBatch
from mapsage.sampling.judging import incomplete_groups


class LoaderError(UserError, ValueError):
    """The training loader does not suit dynamic sampling."""

    on_every_rank = True


class LoaderStream:
    """The endless batches of a training loader, as lists of candidates.

    When the loader has ended, it starts again with the next epoch of its sampler. Refills continue
    from the end of the previous step, so every tile is drawn equally often. What a batch has beyond
    the samples that were asked for waits for the next call.

    Args:
        loader: Loader that was not iterated before. Its ``collate_fn`` is replaced, since batches
            are collated after sampling.
        block: Virtual ranks of this process, whose batches the loader hands out together.
        group_size: Number of consecutive samples that belong together.

    Attributes:
        drawn: Number of samples drawn so far for each virtual rank of this process.
    """

    def __init__(self, loader: DataLoader, block: range = range(1), group_size: int = 1) -> None:
        if loader.batch_sampler is None:
            raise LoaderError(
                'DynamicSamplingHook: the training loader makes no batches '
                '(batch_size=None), expected a batch_size.'
            )
        self.drawn = [0] * len(block)
        self._loader, self._group_size = loader, group_size
        self._iterator: Optional[Iterator[Any]] = None
        self._block = block
        self._waiting: List[Deque[Candidate]] = [deque() for _ in block]
        # Number of samples of each virtual rank that were drawn before this run.
        self._discard = [0] * len(block)
        self._epoch = 0
        if loader.collate_fn is _as_candidates:
            raise LoaderError('custom_hooks lists DynamicSamplingHook twice, expected one.')
        loader.collate_fn = _as_candidates
        # The loader must not draw from the generator of the training step.
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())

    def skip(self, samples: Sequence[int]) -> None:
        """Start after a number of samples, without loading them where the sampler can skip.

        Args:
            samples: Number of samples of each virtual rank of this process.
        """
        self.drawn, self._discard = list(samples), list(samples)
        sampler: Any = self._loader.sampler
        size = self._loader.batch_size
        # Samplers of MapSage's loaders can skip; a user's may not.
        if size is not None and hasattr(sampler, 'skip'):
            # The loader hands out whole batches of all virtual ranks of the process.
            skipped = min(samples) // size * size
            sampler.skip(skipped)
            self._discard = [count - skipped for count in samples]

    def __call__(self, rank: int, wanted: int) -> List[Candidate]:
        """Return the next samples of a virtual rank of this process.

        Args:
            rank: Number of the virtual rank.
            wanted: Number of samples.

        Raises:
            LoaderError: If the loader yields no batch at all.
            ValueError: If a batch of the loader does not consist of whole groups.
        """
        slot = rank - self._block.start
        waiting = self._waiting[slot]
        while len(waiting) < wanted:
            self._load_batches()
        self.drawn[slot] += wanted
        return [waiting.popleft() for _ in range(wanted)]

    def _load_batches(self) -> None:
        """Append the loader's next batch of each virtual rank to the samples that wait."""
        for slot, batch in enumerate(unpack_rank_batches(self._next(), self._block)):
            if len(batch) % self._group_size:
                raise ValueError(incomplete_groups(len(batch), self._group_size))
            discarded = min(self._discard[slot], len(batch))
            self._discard[slot] -= discarded
            self._waiting[slot].extend(batch[discarded:])

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            pass
        self._epoch += 1
        self._set_epoch()
        self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise LoaderError(
                'DynamicSamplingHook: the training loader gives no batch. Its '
                'dataset holds less than one batch of this rank; lower batch_size '
                'or set drop_last=False.'
            ) from None

    def _set_epoch(self) -> None:
        """Tell the epoch to the first sampler that has epochs, as DistSamplerSeedHook does."""
        inner = getattr(self._loader.batch_sampler, 'sampler', None)
        samplers: Sequence[Any] = (self._loader.sampler, inner)
        for sampler in samplers:
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(self._epoch)
                break


def _as_candidates(samples: Sequence[Any]) -> List[Candidate]:
    """Replace ``collate_fn``, also in the loader's workers: return samples as candidates."""
    return [sample if isinstance(sample, Candidate) else Candidate(sample) for sample in samples]


class Step:
    """The batches of one step and the state after it.

    Attributes:
        batches: Samples of the step for each virtual rank of this process.
        state: State of the sampler after the step, see :meth:`BlockSampler.state_dict`.
        drawn: Number of samples drawn by the end of the step for each virtual rank of this process.
    """

    def __init__(
        self, batches: List[SampledBatch], state: Dict[str, Any], drawn: Sequence[int]
    ) -> None:
        self.batches, self.state, self.drawn = batches, state, drawn


class SampledSteps:
    """Endless collated batches, one for each training step, for an iteration-based loop.

    If this process runs several virtual ranks, their batches come packed in one object.

    Args:
        sampler: Sampler that fetches from ``stream``.
        stream: Batches of the loader.
        collate: The original ``collate_fn`` of the loader.
        on_step: Function called with each step before its batch is handed out.
        background: Worker that samples the next step while the loop computes; None to sample
            nothing ahead. It is never closed, since loader workers that were started in its thread
            die with the thread.
        wants_another: Function that returns whether the loop will ask for a step after the one it
            is about to get.
    """

    def __init__(
        self,
        sampler: BlockSampler,
        stream: LoaderStream,
        collate: Callable[[List[Any]], Any],
        on_step: Callable[[Step], None],
        background: Optional[BackgroundWorker] = None,
        wants_another: Callable[[], bool] = lambda: True,
    ) -> None:
        self._sampler, self._stream, self._collate = sampler, stream, collate
        self._on_step, self._wants_another = on_step, wants_another
        self._background = background
        self._ahead: Optional[Future] = None

    def __iter__(self) -> SampledSteps:
        return self

    def __next__(self) -> Any:
        if self._ahead is not None:
            step = self._ahead.result()
        else:
            # The thread of the loop samples the first step and starts the loader's workers.
            step = self._sample()
        self._ahead = None
        if self._background is not None and self._wants_another():
            self._ahead = self._background.submit(self._sample)
        self._on_step(step)
        return pack_rank_batches(
            [
                self._collate([candidate.sample for candidate in batch.samples])
                for batch in step.batches
            ]
        )

    def skip_iter(self, num_iters: int) -> None:
        """Do nothing: after a resume the stream begins where the checkpoint says."""

    def close(self) -> None:
        """Wait for the end of the step that all ranks are sampling ahead."""
        if self._ahead is not None:
            self._ahead.result()

    def _sample(self) -> Step:
        batches = self._sampler.sample_block()
        return Step(batches, self._sampler.state_dict(), list(self._stream.drawn))


class SampledEpochs:
    """Replaces the loader of an epoch-based loop: an epoch has as many steps as the loader batches.

    All other attributes are the loader's.
    """

    def __init__(self, loader: DataLoader, steps: SampledSteps) -> None:
        self._loader, self._steps = loader, steps
        self.sampler = _EpochsOfStream(loader.sampler)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._steps, len(self._loader))

    def rest_of_epoch(self, done: int, cut: Callable[[Any, int], Any]) -> Iterator[Any]:
        """Return the steps of an epoch after the first ``done`` steps.

        Nothing has to be cut off: after a resume the stream continues from there anyway.
        """
        return itertools.islice(self._steps, len(self._loader) - done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _EpochsOfStream:
    """A sampler whose epoch is set by the stream and not by DistSamplerSeedHook."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
