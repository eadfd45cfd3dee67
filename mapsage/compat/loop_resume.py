"""Resume a run without reading the data that it has already used, and without using it again.

Gap: ``IterBasedTrainLoop`` of mmengine 0.10.7 starts the workers of its loader when it is built. On
resume it loads and discards every batch up to the resumed iteration (mmengine issue 1520).
onedl-mmengine 0.10.12 does neither.
Remove when: mmengine 0.10.7 is no longer supported.

Gap: ``EpochBasedTrainLoop`` of both resumes a checkpoint that was saved inside an epoch at the
first batch of that epoch, but with the checkpoint's iteration number, so that the run trains on
these batches twice and ends behind its last iteration.
Remove when: the host's loop goes on behind the batches that are done.
"""
from __future__ import annotations

import itertools
from typing import Any, Iterable

from mmengine.runner import loops


class _LazyInfiniteIterator:
    """MMEngine's endless loader iterator, but created at the first batch and able to skip."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._iterator: Any = None
        self._discard = 0

    def __iter__(self) -> _LazyInfiniteIterator:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = _Eager(self._dataloader)
        for _ in range(self._discard):
            next(self._iterator)
        self._discard = 0
        return next(self._iterator)

    def skip_iter(self, num_iters: int) -> None:
        if hasattr(self._dataloader.sampler, 'skip'):
            self._dataloader.sampler.skip(num_iters * self._dataloader.batch_size)
        else:
            self._discard = num_iters


_Eager = loops._InfiniteDataloaderIterator
_run = loops.IterBasedTrainLoop.run


def _run_after_skip(loop: loops.IterBasedTrainLoop) -> Any:
    iterator = loop.dataloader_iterator
    if loop._iter > 0:
        iterator.skip_iter(loop._iter)
        # The loop discards this many items of its iterator before it trains.
        loop.num_discarded = loop._iter
        loop.dataloader_iterator = itertools.chain(itertools.repeat(None, loop._iter), iterator)
    return _run(loop)


_run_epoch = loops.EpochBasedTrainLoop.run_epoch


def _run_rest_of_epoch(loop: Any) -> None:
    """Run the epoch behind the batches that a checkpoint says are done, ``loop.batches_done``."""
    done, loop.batches_done = getattr(loop, 'batches_done', 0), 0
    if not done:
        _run_epoch(loop)
        return
    loop.runner.call_hook('before_train_epoch')
    loop.runner.model.train()
    # If the last batch is done, what follows an epoch is still to come: schedulers, validation.
    if done < len(loop.dataloader):
        for index, batch in enumerate(_rest_of_epoch(loop.dataloader, done), done):
            loop.run_iter(index, batch)
    loop.runner.call_hook('after_train_epoch')
    loop._epoch += 1


def _rest_of_epoch(dataloader: Any, done: int) -> Iterable[Any]:
    if hasattr(dataloader, 'rest_of_epoch'):  # the hooks' loaders that stand before another
        return dataloader.rest_of_epoch(done, _rest_of_epoch)
    if dataloader.batch_size and hasattr(dataloader.sampler, 'skip'):
        dataloader.sampler.skip(done * dataloader.batch_size)
        return dataloader
    return itertools.islice(dataloader, done, None)


def apply() -> bool:
    """Patch mmengine's loops if it is necessary, and return whether the iterator was patched."""
    loops.EpochBasedTrainLoop.run_epoch = _run_rest_of_epoch
    if hasattr(_Eager, 'skip_iter') or loops._InfiniteDataloaderIterator is not _Eager:
        return False
    loops._InfiniteDataloaderIterator = _LazyInfiniteIterator
    loops.IterBasedTrainLoop.run = _run_after_skip
    return True
