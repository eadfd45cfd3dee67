"""Resume a run without reading the data that it has already used, and without using it again.

Gap: ``IterBasedTrainLoop`` of mmengine 0.10.7 starts the workers of its loader when it is built. On
resume it loads and discards every batch up to the resumed iteration (mmengine issue 1520).
onedl-mmengine 0.10.12 does neither.
Remove when: mmengine 0.10.7 is no longer supported.

Gap: ``EpochBasedTrainLoop`` of both resumes a checkpoint that was saved within an epoch at the
first batch of that epoch, but with the checkpoint's iteration number, so that the run trains on
these batches twice and ends after more than its last iteration.
Remove when: the host's loop continues after the batches that are done.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Iterator, Optional

from mmengine.runner import loops
from torch import nn
from torch.utils.data import DataLoader


class _LazyInfiniteIterator:
    """MMEngine's endless iterator over a loader, created at the first batch and able to skip."""

    def __init__(self, dataloader: DataLoader) -> None:
        self._dataloader = dataloader
        self._iterator: Optional[Iterator[Any]] = None
        # Batches that are loaded and discarded, if the sampler cannot skip them.
        self._discard = 0

    def __iter__(self) -> _LazyInfiniteIterator:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = _EagerIterator(self._dataloader)
        for _ in range(self._discard):
            next(self._iterator)
        self._discard = 0
        return next(self._iterator)

    def skip_iter(self, num_iters: int) -> None:
        batch_size = self._dataloader.batch_size
        if batch_size and hasattr(self._dataloader.sampler, 'skip'):
            self._dataloader.sampler.skip(num_iters * batch_size)
        else:
            self._discard = num_iters


_EagerIterator = loops._InfiniteDataloaderIterator
_run = loops.IterBasedTrainLoop.run


def _run_after_skip(loop: loops.IterBasedTrainLoop) -> nn.Module:
    iterator = loop.dataloader_iterator
    if loop._iter > 0:
        iterator.skip_iter(loop._iter)
        # The loop discards this many items of its iterator before it trains.
        loop.num_discarded = loop._iter
        loop.dataloader_iterator = itertools.chain(itertools.repeat(None, loop._iter), iterator)
    return _run(loop)


_run_epoch = loops.EpochBasedTrainLoop.run_epoch


def _run_rest_of_epoch(loop: loops.EpochBasedTrainLoop) -> None:
    """Run an epoch without its first ``loop.batches_done`` batches, which a resumed run has done.

    ``MapSageRunner`` sets the attribute when it resumes.
    """
    done, loop.batches_done = loop.batches_done, 0
    if not done:
        _run_epoch(loop)
        return
    loop.runner.call_hook('before_train_epoch')
    loop.runner.model.train()
    # If all batches are done, the hooks after an epoch are still to run: schedulers, validation.
    if done < len(loop.dataloader):
        for index, batch in enumerate(_rest_of_epoch(loop.dataloader, done), done):
            loop.run_iter(index, batch)
    loop.runner.call_hook('after_train_epoch')
    loop._epoch += 1


def _rest_of_epoch(dataloader: Any, done: int) -> Iterable[Any]:
    # A stage that a hook inserted before the loader cuts the epoch itself.
    if hasattr(dataloader, 'rest_of_epoch'):
        return dataloader.rest_of_epoch(done, _rest_of_epoch)
    if dataloader.batch_size and hasattr(dataloader.sampler, 'skip'):
        dataloader.sampler.skip(done * dataloader.batch_size)
        return dataloader
    return itertools.islice(dataloader, done, None)


def apply() -> bool:
    """Patch mmengine's loops if necessary, and return whether the iterator was patched."""
    loops.EpochBasedTrainLoop.batches_done = 0
    loops.EpochBasedTrainLoop.run_epoch = _run_rest_of_epoch
    is_patched = loops._InfiniteDataloaderIterator is not _EagerIterator
    if hasattr(_EagerIterator, 'skip_iter') or is_patched:
        return False
    loops._InfiniteDataloaderIterator = _LazyInfiniteIterator
    loops.IterBasedTrainLoop.run = _run_after_skip
    return True
