"""A labeled and an unlabeled dataset as one.

The dataset checks at the start of a run what would otherwise train silently on wrong data: files
that are in both datasets, different bands, and unlabeled samples that are packed as labeled ones.
`sampler.py` decides how many samples of each kind a batch gets.
"""

from __future__ import annotations

import bisect
import logging
import os
from typing import Any, Dict, Iterable, Sequence, Set, Union

from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmseg.registry import DATASETS
from torch.utils.data import ConcatDataset

from mapsage.base.random_state import same_random_numbers
from mapsage.datasets.geotiff import GeoTiffDataset

from .transforms import MARK


@DATASETS.register_module()
class SemiSupervisedDataset(ConcatDataset):
    """Labeled samples, followed by unlabeled ones.

    ``LabeledUnlabeledSampler`` draws from both. Classes, colors and ``ignore_index`` are taken from
    the labeled dataset.

    Args:
        labeled: Config of the labeled dataset.
        unlabeled: Config of the unlabeled dataset, or a list of them: ``UnlabeledImages``,
            ``GeoTiffDataset`` without ``labels``, or a dataset with labels, which are then used for
            figures in the log only. Its pipeline has ``HideLabels`` behind the transforms that
            load, and ends with ``PackUnlabeledInputs``.

    Attributes:
        sizes: Number of labeled and of unlabeled samples.

    Raises:
        ValueError: If a dataset has no sample, an image is in both, or the first samples differ in
            their number of bands or are packed by the wrong transform.
    """

    def __init__(
        self, labeled: Dict[str, Any], unlabeled: Union[Dict[str, Any], Sequence[Dict[str, Any]]]
    ) -> None:
        unlabeled = [unlabeled] if isinstance(unlabeled, dict) else list(unlabeled or ())
        if not unlabeled:
            raise ValueError(
                'SemiSupervisedDataset.unlabeled is empty, expected the config of a '
                "dataset, such as dict(type='UnlabeledImages', folders=...)."
            )
        datasets = [
            _build(labeled, 'labeled'),
            *(_build(config, 'unlabeled') for config in unlabeled),
        ]
        super().__init__(datasets)
        self.sizes = len(datasets[0]), sum(map(len, datasets[1:]))
        self.metainfo: Dict[str, Any] = dict(datasets[0].metainfo)
        self.ignore_index = getattr(datasets[0], 'ignore_index', 255)
        self._check_overlap()
        self._check_first_samples()

    def full_init(self) -> None:
        """Do nothing: the datasets list their samples when they are built."""

    def get_data_info(self, idx: int) -> Dict[str, Any]:
        """Return ``get_data_info`` of the dataset that contains sample ``idx``."""
        number = bisect.bisect_right(self.cumulative_sizes, idx)
        start = self.cumulative_sizes[number - 1] if number else 0
        return self.datasets[number].get_data_info(idx - start)  # type: ignore[attr-defined]

    def _check_overlap(self) -> None:
        """Look for files that both kinds of samples use.

        A common image is an error. A common scene is only a warning, because the two datasets may
        use different windows of it.

        Raises:
            ValueError: If an image is labeled and unlabeled.
        """
        labeled_images, unlabeled_images = _images(self.datasets[:1]), _images(self.datasets[1:])
        both = sorted(labeled_images & unlabeled_images)
        if both:
            raise ValueError(
                f'{both[0]} is a labeled and an unlabeled image, and so are {len(both) - 1} more: '
                'expected different ones. Leave them out of the unlabeled dataset, for example '
                'with NamedSamples(exclude=True).'
            )
        shared = sorted(
            (labeled_images | _scenes(self.datasets[:1]))
            & (unlabeled_images | _scenes(self.datasets[1:]))
        )
        if shared and get_dist_info()[0] == 0:
            print_log(
                f'scene {shared[0]} is read by the labeled and by the unlabeled dataset, and so '
                f'are {len(shared) - 1} more. Give the two different parts or areas (split, aoi), '
                'or pixels with labels count as unlabeled ones too.',
                logger='current',
                level=logging.WARNING,
            )

    def _check_first_samples(self) -> None:
        """Load the first sample of each dataset, and compare them.

        Raises:
            ValueError: If an unlabeled sample does not fit the labeled ones.
        """
        # The loading must not change the random state that the training starts with.
        with same_random_numbers():
            first_samples = [dataset[0] for dataset in self.datasets]
        bands = [sample['inputs'].shape[0] for sample in first_samples]
        for sample, dataset, count in list(zip(first_samples, self.datasets, bands))[1:]:
            name = type(dataset).__name__
            if count != bands[0]:
                raise ValueError(
                    f'the unlabeled dataset ({name}) has images of {count} bands, and the labeled '
                    f'one ({type(self.datasets[0]).__name__}) of {bands[0]}: expected the same '
                    'bands in the same order. Choose them with bands= of GeoTiffDataset.'
                )
            pipeline = getattr(dataset, 'pipeline', None)
            label_crops = [
                type(step).__name__
                for step in getattr(pipeline, 'transforms', ())
                if getattr(step, 'cat_max_ratio', 1) < 1
            ]
            if label_crops:
                raise ValueError(
                    f'{label_crops[0]} of the unlabeled dataset ({name}) has cat_max_ratio below 1 '
                    'and chooses crops by labels, which are hidden: leave cat_max_ratio out there.'
                )
            if MARK not in sample['data_samples'].metainfo:
                raise ValueError(
                    f'the samples of the unlabeled dataset ({name}) are packed as labeled ones: '
                    "put dict(type='HideLabels') behind the transforms that load them, and "
                    "dict(type='PackUnlabeledInputs') in the place of PackSegInputs."
                )
        if MARK in first_samples[0]['data_samples'].metainfo:
            raise ValueError(
                'the samples of the labeled dataset are packed as unlabeled ones: '
                'expected PackSegInputs at the end of its pipeline.'
            )


def _build(config: Dict[str, Any], kind: str) -> Any:
    """Build a dataset and let it list its samples; ``kind`` names it in the error message.

    Raises:
        ValueError: If the dataset has no sample.
    """
    try:
        dataset = DATASETS.build(config)
        if hasattr(dataset, 'full_init'):
            dataset.full_init()
        samples = len(dataset)
    except ValueError as error:
        # MMEngine concatenates the serialized samples, which NumPy refuses for an empty list.
        if 'at least one array' not in str(error):
            raise
        samples = 0
    if not samples:
        raise ValueError(
            f'the {kind} dataset ({config["type"]}) has no sample: expected images in '
            'its folders. Correct data_root and data_prefix, or indices.'
        )
    return dataset


def _images(datasets: Sequence[Any]) -> Set[str]:
    """Return the real paths of the images in datasets; datasets of scenes are skipped."""
    paths = [
        dataset.get_data_info(index).get('img_path')
        for dataset in datasets
        if not isinstance(dataset, GeoTiffDataset) and hasattr(dataset, 'get_data_info')
        for index in range(len(dataset))
    ]
    return _real_paths(paths)


def _scenes(datasets: Sequence[object]) -> Set[str]:
    """Return the real paths of the scenes in datasets, and in datasets inside wrappers."""
    paths: Set[str] = set()
    for dataset in datasets:
        if isinstance(dataset, GeoTiffDataset):
            paths |= _real_paths(dataset.scene_paths())
        inner_datasets = getattr(dataset, 'datasets', None) or [getattr(dataset, 'dataset', None)]
        paths |= _scenes([inner for inner in inner_datasets if inner is not None])
    return paths


def _real_paths(paths: Iterable[object]) -> Set[str]:
    """Return the real paths of local files; URLs and values of other types are skipped."""
    return {
        os.path.realpath(path)
        for path in paths
        if isinstance(path, (str, os.PathLike)) and '://' not in str(path)
    }
