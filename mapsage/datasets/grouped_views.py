"""A sampler that draws a number of augmented views of each tile, one after the other."""
from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from .geotiff import GeoTiffDataset


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
        ValueError: If ``views`` is less than 1, or each view would be a random window of its own.
    """

    def __init__(self, dataset: Any, views: int, sampler: Dict[str, Any],
                 seed: Optional[int] = None) -> None:
        if views < 1:
            raise ValueError(f'views={views}, expected 1 or more.')
        if views > 1 and _redraws(dataset):
            raise ValueError(
                'GroupedViewsSampler with random windows that are drawn anew for every sample: the '
                f'{views} views of a group would show {views} places. Set redraw=False in windows= '
                'of the GeoTiffDataset.')
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


def _redraws(dataset: Any) -> bool:
    """Return whether a dataset, or one inside of its wrappers, draws a place for every sample."""
    if isinstance(dataset, GeoTiffDataset):
        return dataset.redraws
    inside = [getattr(dataset, 'dataset', None), *getattr(dataset, 'datasets', ())]
    return any(_redraws(each) for each in inside if each is not None)
