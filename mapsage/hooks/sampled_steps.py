"""What a training loop iterates when batches come from dynamic sampling."""
from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch
from torch.utils.data import DataLoader

from mapsage.background_worker import BackgroundWorker
from mapsage.sampling import Candidate, DynamicSampler, SampledBatch


class LoaderError(ValueError):
    """The training loader does not suit dynamic sampling."""


class LoaderStream:
    """The batches of a training loader without end, as lists of candidates.

    A loader that has ended begins anew, its sampler one epoch further: refills read on where the
    step before ended, and no tile comes up more often than another.

    Args:
        loader: Not iterated before. Its ``collate_fn`` is taken away: batches are made after
            sampling.

    Attributes:
        drawn: Batches drawn so far.
    """

    def __init__(self, loader: DataLoader) -> None:
        if loader.batch_sampler is None:
            raise LoaderError('DynamicSamplingHook: the training loader makes no batches '
                              '(batch_size=None), expected a batch_size.')
        self.drawn = 0
        self._loader = loader
        self._iterator: Any = None
        self._epoch = self._discard = 0
        if loader.collate_fn is _as_candidates:
            raise LoaderError('custom_hooks lists DynamicSamplingHook twice, expected one.')
        loader.collate_fn = _as_candidates
        # The loader's draws must not be from the generator that the training step draws from.
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())

    def skip(self, batches: int) -> None:
        """Begin after this many batches, without loading them where the sampler can skip."""
        self.drawn = batches
        sampler: Any = self._loader.sampler
        size = self._loader.batch_size
        if size is not None and hasattr(sampler, 'skip'):
            sampler.skip(batches * size)
        else:
            self._discard = batches

    def __call__(self) -> List[Candidate]:
        """Return the next batch.

        Raises:
            LoaderError: If the loader gives no batch at all.
        """
        for _ in range(self._discard):
            self._next()
        self._discard = 0
        self.drawn += 1
        return self._next()

    def _next(self) -> List[Candidate]:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            pass
        self._epoch += 1
        sampler = getattr(self._loader.batch_sampler, 'sampler', None)
        candidates: Any = (self._loader.sampler, sampler)
        for each in candidates:
            if hasattr(each, 'set_epoch'):
                each.set_epoch(self._epoch)
                break
        self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise LoaderError('DynamicSamplingHook: the training loader gives no batch. Its '
                              'dataset holds less than one batch of this rank; lower batch_size '
                              'or set drop_last=False.') from None


def _as_candidates(samples: Sequence[Any]) -> List[Candidate]:
    """Stands in for ``collate_fn``, in the loader's workers too."""
    return [each if isinstance(each, Candidate) else Candidate(each) for each in samples]


class Step:
    """One step's batch, and the state from which the next one follows.

    Attributes:
        batch: What was sampled.
        state: :meth:`DynamicSampler.state_dict` after it.
        drawn: Batches drawn from the loader until then.
    """

    def __init__(self, batch: SampledBatch, state: Dict[str, Any], drawn: int) -> None:
        self.batch, self.state, self.drawn = batch, state, drawn


class SampledSteps:
    """Endless collated batches, one a training step; the iterator of an iteration-based loop.

    Args:
        sampler: Fetches from ``stream``.
        stream: The loader's batches.
        collate: The loader's own ``collate_fn``.
        taken: Called with each step before its batch is handed out.
        begin: Called before each step that is sampled in the loop's own thread, with its number.
        background: Worker that samples the next step while the loop computes; None to sample
            nothing ahead. Loader workers that are started in its thread die with the thread, so it
            is never closed.
        wants_another: Says whether the loop will come for a step after the one it is about to get.
    """

    def __init__(self, sampler: DynamicSampler, stream: LoaderStream,
                 collate: Callable[[List[Any]], Any], taken: Callable[[Step], None],
                 begin: Callable[[int], None], background: Optional[BackgroundWorker] = None,
                 wants_another: Callable[[], bool] = lambda: True) -> None:
        self._sampler, self._stream, self._collate = sampler, stream, collate
        self._taken, self._begin, self._wants_another = taken, begin, wants_another
        self._background = background
        self._ahead: Optional[Future] = None

    def __iter__(self) -> SampledSteps:
        return self

    def __next__(self) -> Any:
        if self._ahead is not None:
            step = self._ahead.result()
        else:
            # The first step, with the start of the loader's workers, is in the loop's own thread.
            self._begin(self._sampler.step + 1)
            step = self._sample()
        self._ahead = None
        if self._background is not None and self._wants_another():
            self._ahead = self._background.submit(self._sample)
        self._taken(step)
        return self._collate([candidate.sample for candidate in step.batch.samples])

    def skip_iter(self, num_iters: int) -> None:
        """Do nothing: after a resume the checkpoint says where the stream begins."""

    def close(self) -> None:
        """Wait for the step that is being sampled ahead, which all ranks are sampling."""
        if self._ahead is not None:
            self._ahead.result()

    def _sample(self) -> Step:
        batch = self._sampler.sample()
        return Step(batch, self._sampler.state_dict(), self._stream.drawn)


class SampledEpochs:
    """Stands in for the loader of an epoch-based loop: an epoch has as many steps as it had.

    Everything else is asked of the loader.
    """

    def __init__(self, loader: DataLoader, steps: SampledSteps) -> None:
        self._loader, self._steps = loader, steps
        self.sampler = _OwnEpochs(loader.sampler)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._steps, len(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _OwnEpochs:
    """A sampler whose epoch the stream counts, not DistSamplerSeedHook."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
