"""Sampler of groups: several augmented views of a tile, one after the other.

The views get their augmentations from the pipeline, as any sample does. The sampler only repeats
indices, so a dataset that draws a new random window for every sample cannot be used with it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler

from .geotiff import GeoTiffDataset


@DATA_SAMPLERS.register_module()
class GroupedViewsSampler(Sampler):
    """Sampler that repeats every index of another sampler, so that a group consists of one tile.

    Every view is augmented independently. For example, ``views=4`` turns the tiles 7, 2 into 7, 7,
    7, 7, 2, 2, 2, 2. Use it with ``group_size=views`` of :class:`DynamicSamplingHook` and a batch
    size that is a multiple of ``views``.

    Args:
        dataset: Dataset to draw from.
        views: Number of views of each tile, at least 1.
        sampler: Config of the sampler that draws the tiles.
        seed: Seed of that sampler.

    Raises:
        ValueError: If ``views`` is less than 1, or every view would be another random window.
    """

    def __init__(
        self, dataset: object, views: int, sampler: Dict[str, Any], seed: Optional[int] = None
    ) -> None:
        if views < 1:
            raise ValueError(f'views={views}, expected 1 or more.')
        if views > 1 and _redraws(dataset):
            raise ValueError(
                'GroupedViewsSampler with random windows, and a new window for every sample: the '
                f'{views} views of a group would show {views} places. Set redraw=False in windows= '
                'of the GeoTiffDataset.'
            )
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
        """Select the order of the tiles in an epoch, if the tile sampler distinguishes epochs."""
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)


def _redraws(dataset: object) -> bool:
    """Return whether a dataset, or one inside its wrappers, draws a new window for every sample."""
    if isinstance(dataset, GeoTiffDataset):
        return dataset.redraws
    inner_datasets = [getattr(dataset, 'dataset', None), *getattr(dataset, 'datasets', ())]
    return any(_redraws(inner) for inner in inner_datasets if inner is not None)
