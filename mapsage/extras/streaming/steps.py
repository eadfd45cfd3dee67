"""The batches of a training loop whose feature source works ahead of it.

:class:`FeatureSteps` draws batches from the loader earlier than the loop asks for them, and
requests their features. How far ahead it reads depends on the source (``source.ahead``) and on the
end of the loop.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Iterable, Iterator, List, Optional, Tuple

from mapsage.base.stand_ins import Delegate

from .source import FeatureSource, Item


class FeatureSteps(Delegate):
    """Batches of a loop that requests their items from the feature source ahead of time.

    Args:
        batches: Batches of the training loader.
        make_items: Function that makes the items of a batch: one for each virtual rank of this
            process, in order.
        source: Source of the features. All items of a step are requested before it begins, and then
            the items of further whole steps, up to ``source.ahead``.
        taken: Function that is called with the items of each batch before the loop gets the batch.
        still_wanted: Function that returns how many batches the loop will take after the next one.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        make_items: Callable[[Any], List[Item]],
        source: FeatureSource,
        taken: Callable[[List[Item]], None],
        still_wanted: Callable[[], int],
    ) -> None:
        super().__init__(batches)
        self._batches: Optional[Iterator[Any]] = None
        self._make_items, self._source = make_items, source
        self._taken, self._still_wanted = taken, still_wanted
        self._queue: Deque[Tuple[Any, List[Item]]] = deque()

    def __iter__(self) -> FeatureSteps:
        return self

    def __next__(self) -> object:
        if self._batches is None:
            self._batches = iter(self.original)
        left = 1 + max(0, self._still_wanted())
        while len(self._queue) < left and not self._enough():
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            # None is the placeholder of a batch that a resumed loop skips.
            if batch is None:
                return None
            items = self._make_items(batch)
            for item in items:
                self._source.request(item)
            self._queue.append((batch, items))
        if not self._queue:
            raise StopIteration
        batch, items = self._queue.popleft()
        self._taken(items)
        return batch

    def _enough(self) -> bool:
        """Return whether enough items are requested in addition to those of the next batch."""
        items = sum(len(step_items) for _, step_items in self._queue)
        return bool(self._queue) and items - len(self._queue[0][1]) >= self._source.ahead


class FeatureEpochs(Delegate):
    """Replaces the loader of an epoch-based loop; it has all other attributes of the loader.

    Args:
        loader: Training loader.
        steps: Function that makes the :class:`FeatureSteps` of one epoch from its batches.
    """

    def __init__(self, loader: Any, steps: Callable[[Iterable[Any]], FeatureSteps]) -> None:
        super().__init__(loader)
        self._steps = steps

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> FeatureSteps:
        return self._steps(self.original)

    def rest_of_epoch(self, done: int, cut: Callable[[Any, int], Iterable[Any]]) -> FeatureSteps:
        """Return the steps of one epoch without its first ``done`` batches.

        Args:
            done: Number of batches to leave out.
            cut: Function that returns the batches of a loader without the first ones.
        """
        return self._steps(cut(self.original, done))
