"""Resume an iteration-based run without reading the data that it has already used.

Gap: ``IterBasedTrainLoop`` of mmengine 0.10.7 starts the workers of its loader when it is built. On
resume it loads and discards every batch up to the resumed iteration (mmengine issue 1520).
onedl-mmengine 0.10.12 does neither.
Remove when: mmengine 0.10.7 is no longer supported.
"""
from __future__ import annotations

import itertools
from typing import Any

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


def apply() -> bool:
    """Patch mmengine's loop if it is necessary, and return whether it was."""
    if hasattr(_Eager, 'skip_iter') or loops._InfiniteDataloaderIterator is not _Eager:
        return False
    loops._InfiniteDataloaderIterator = _LazyInfiniteIterator
    loops.IterBasedTrainLoop.run = _run_after_skip
    return True
