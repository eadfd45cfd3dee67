"""A sampler that draws a number of augmented views of each tile, one after the other."""
from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler


@DATA_SAMPLERS.register_module()
class GroupedViewsSampler(Sampler):
    """Sampler that repeats every index of another sampler, so that a group holds one tile's views.

    Every view is augmented independently. Use it with ``group_size=views`` of
    :class:`DynamicSamplingHook` and a batch size that is a multiple of ``views``.

    Args:
        dataset: Dataset to draw from.
        views: Number of views of each tile, at least 1.
        sampler: Config of the sampler that draws the tiles.
        seed: Seed of that sampler.

    Raises:
        ValueError: If ``views`` is less than 1.
    """

    def __init__(self, dataset: Any, views: int, sampler: Dict[str, Any],
                 seed: Optional[int] = None) -> None:
        if views < 1:
            raise ValueError(f'views={views}, expected 1 or more.')
        self.views = views
        self.sampler = DATA_SAMPLERS.build(sampler, default_args=dict(dataset=dataset, seed=seed))
        self.seed = getattr(self.sampler, 'seed', seed)

    def __iter__(self) -> Iterator[int]:
        for index in self.sampler:
            for _ in range(self.views):
                yield index

    def __len__(self) -> int:
        return len(self.sampler) * self.views

    def set_epoch(self, epoch: int) -> None:
        """Select the order of the given pass over the tiles."""
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)
