"""The batches of a training loop whose feature source works ahead of it."""
from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Iterable, Iterator, Optional, Tuple

from .source import FeatureSource, Item


class FeatureSteps:
    """The batches of a loop, whose items are requested from the feature source ahead of time.

    Args:
        batches: Batches of the training loader.
        make_item: Function that makes the item of a batch.
        source: Source from which each item is requested, up to ``source.ahead`` items early.
        taken: Function that is called with the item of each batch before the loop gets the batch.
        still_wanted: Function that returns how many batches the loop will take after the next one.
    """

    def __init__(self, batches: Iterable[Any], make_item: Callable[[Any], Item],
                 source: FeatureSource, taken: Callable[[Item], None],
                 still_wanted: Callable[[], int]) -> None:
        self._given = batches
        self._batches: Optional[Iterator[Any]] = None
        self._make_item, self._source = make_item, source
        self._taken, self._still_wanted = taken, still_wanted
        self._queue: Deque[Tuple[Any, Item]] = deque()

    def __iter__(self) -> FeatureSteps:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._given)
        wanted = 1 + max(0, min(self._source.ahead, self._still_wanted()))
        while len(self._queue) < wanted:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            if batch is None:  # placeholder of a batch that a resumed loop skips
                return None
            item = self._make_item(batch)
            self._source.request(item)
            self._queue.append((batch, item))
        if not self._queue:
            raise StopIteration
        batch, item = self._queue.popleft()
        self._taken(item)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == '_given':
            raise AttributeError(name)
        return getattr(self._given, name)  # for example skip_iter


class FeatureEpochs:
    """Replaces the loader of an epoch-based loop; all other attributes are those of the loader.

    Args:
        loader: Training loader.
        steps: Function that makes the :class:`FeatureSteps` of one epoch from its batches.
    """

    def __init__(self, loader: Any, steps: Callable[[Iterable[Any]], FeatureSteps]) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> FeatureSteps:
        return self._steps(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == '_loader':
            raise AttributeError(name)
        return getattr(self._loader, name)
