"""A labeled and an unlabeled dataset as one."""
from __future__ import annotations

import logging
import os
from typing import Any, Dict, Iterable, Sequence, Set, Union

from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmseg.registry import DATASETS
from torch.utils.data import ConcatDataset

from mapsage.random_state import same_random_numbers

from .transforms import MARK


@DATASETS.register_module()
class SemiSupervisedDataset(ConcatDataset):
    """Labeled samples, and behind them unlabeled ones.

    ``LabeledUnlabeledSampler`` draws from both. Classes, colors and ``ignore_index`` are those of
    the labeled dataset.

    Args:
        labeled: Config of the labeled dataset.
        unlabeled: Config of the unlabeled dataset, or a list of them: ``UnlabeledImages``,
            ``GeoTiffDataset`` without ``labels``, or any dataset whose labels shall count in the
            log only. Its pipeline has ``HideLabels`` behind the transforms that load, and ends with
            ``PackUnlabeledInputs``.

    Attributes:
        sizes: Number of labeled and of unlabeled samples.

    Raises:
        ValueError: If there is no unlabeled sample, an image is in both, or the first samples are
            not what they should be: another number of bands, not marked as unlabeled.
    """

    def __init__(self, labeled: Dict[str, Any],
                 unlabeled: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        given = [unlabeled] if isinstance(unlabeled, dict) else list(unlabeled or ())
        if not given:
            raise ValueError('SemiSupervisedDataset.unlabeled is empty, expected the config of a '
                             "dataset, such as dict(type='UnlabeledImages', folders=...).")
        datasets = [_built(each, what) for each, what in zip(
            (labeled, *given), ('labeled', *['unlabeled'] * len(given)))]
        super().__init__(datasets)
        self.sizes = len(datasets[0]), sum(map(len, datasets[1:]))
        self.metainfo: Dict[str, Any] = dict(datasets[0].metainfo)
        self.ignore_index = getattr(datasets[0], 'ignore_index', 255)
        self._check_overlap()
        self._check_first_samples()

    def full_init(self) -> None:
        """Do nothing: the datasets list their samples when they are built."""

    def get_data_info(self, idx: int) -> Dict[str, Any]:
        """Return what its dataset says about sample ``idx``."""
        part = next(number for number, end in enumerate(self.cumulative_sizes) if idx < end)
        before = self.cumulative_sizes[part - 1] if part else 0
        return self.datasets[part].get_data_info(idx - before)  # type: ignore[attr-defined]

    def _check_overlap(self) -> None:
        """Look for files that are among the labeled and among the unlabeled samples."""
        images, others = _images(self.datasets[:1]), _images(self.datasets[1:])
        both = sorted(images & others)
        if both:
            raise ValueError(
                f'{both[0]} is a labeled and an unlabeled image, and so are {len(both) - 1} more: '
                'expected different ones. Leave them out of the unlabeled dataset, for example '
                'with NamedSamples(exclude=True).')
        shared = sorted((images | _scenes(self.datasets[:1])) &
                        (others | _scenes(self.datasets[1:])))
        if shared and get_dist_info()[0] == 0:
            print_log(
                f'scene {shared[0]} is read by the labeled and by the unlabeled dataset, and so '
                f'are {len(shared) - 1} more. Give the two different parts or areas (split, aoi), '
                'or pixels with labels count as unlabeled ones too.', logger='current',
                level=logging.WARNING)

    def _check_first_samples(self) -> None:
        """Load the first sample of each dataset, and compare them."""
        with same_random_numbers():
            first = [each[0] for each in self.datasets]
        bands = [sample['inputs'].shape[0] for sample in first]
        for sample, each, count in list(zip(first, self.datasets, bands))[1:]:
            name = type(each).__name__
            if count != bands[0]:
                raise ValueError(
                    f'the unlabeled dataset ({name}) has images of {count} bands, and the labeled '
                    f'one ({type(self.datasets[0]).__name__}) of {bands[0]}: expected the same '
                    'bands in the same order. Choose them with bands= of GeoTiffDataset.')
            chosen = [type(step).__name__ for step in getattr(getattr(
                each, 'pipeline', None), 'transforms', ()) if getattr(
                    step, 'cat_max_ratio', 1) < 1]
            if chosen:
                raise ValueError(
                    f'{chosen[0]} of the unlabeled dataset ({name}) has cat_max_ratio below 1, and '
                    'chooses crops by labels that are hidden: leave cat_max_ratio out there.')
            if MARK not in sample['data_samples'].metainfo:
                raise ValueError(
                    f'the samples of the unlabeled dataset ({name}) are packed as labeled ones: '
                    "put dict(type='HideLabels') behind the transforms that load them, and "
                    "dict(type='PackUnlabeledInputs') in the place of PackSegInputs.")
        if MARK in first[0]['data_samples'].metainfo:
            raise ValueError('the samples of the labeled dataset are packed as unlabeled ones: '
                             'expected PackSegInputs at the end of its pipeline.')


def _built(config: Dict[str, Any], what: str) -> Any:
    """Return a dataset that has listed its samples.

    Raises:
        ValueError: If there is none.
    """
    try:
        dataset = DATASETS.build(config)
        if hasattr(dataset, 'full_init'):
            dataset.full_init()
        samples = len(dataset)
    except ValueError as error:
        if 'at least one array' not in str(error):  # of MMEngine, which packs the list
            raise
        samples = 0
    if not samples:
        raise ValueError(f'the {what} dataset ({config["type"]}) has no sample: expected images in '
                         'its folders. Correct data_root and data_prefix, or indices.')
    return dataset


def _images(datasets: Sequence[Any]) -> Set[str]:
    """Return the real paths of the images of datasets."""
    listed = [each.get_data_info(index).get('img_path') for each in datasets
              if not hasattr(each, 'scene_paths') and hasattr(each, 'get_data_info')
              for index in range(len(each))]
    return _real(listed)


def _scenes(datasets: Sequence[Any]) -> Set[str]:
    """Return the real paths of the scenes of datasets, also of those inside of wrappers."""
    found: Set[str] = set()
    for each in datasets:
        if hasattr(each, 'scene_paths'):
            found |= _real(each.scene_paths())
        inside = getattr(each, 'datasets', None) or [getattr(each, 'dataset', None)]
        found |= _scenes([inner for inner in inside if inner is not None])
    return found


def _real(paths: Iterable[Any]) -> Set[str]:
    """Return the real paths of local files."""
    return {os.path.realpath(each) for each in paths
            if isinstance(each, (str, os.PathLike)) and '://' not in str(each)}
