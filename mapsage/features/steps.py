"""What a training loop iterates when a feature source works ahead of it."""
from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Iterable, Iterator, Optional, Tuple

from .source import FeatureSource, Item


class FeatureSteps:
    """The batches of a loop, each requested from the feature source before it is needed.

    Args:
        batches: The loop's own iterator.
        make_item: Makes the item of a batch.
        source: Gets every item, up to ``source.ahead`` of them before they are needed.
        taken: Called with each batch's item before the batch is handed out.
        still_wanted: Returns how many batches the loop will take after the next one.
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
            if batch is None:  # stands for one that a resumed loop discards
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
        return getattr(self._given, name)  # skip_iter


class FeatureEpochs:
    """Stands in for the loader of an epoch-based loop. Everything else is asked of the loader.

    Args:
        loader: The training loader.
        steps: Makes an epoch's :class:`FeatureSteps` of its batches.
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
