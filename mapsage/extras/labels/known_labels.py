"""Index of the existing labels in a config's datasets: file path -> label mask.

Masks are read through the datasets themselves, so a pixel counts as labeled here only if training
would see its label. Paths are compared after `os.path.realpath`.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from mapsage.datasets import GeoTiffDataset
from mapsage.geo.labels import byte_labels

# Labels of a scene are read in squares of at most this many pixels a side.
_TILE = 512

UNKNOWN = 255
"""Value of pixels without a label."""


class KnownLabels:
    """Label masks of the files in datasets.

    Masks contain class indices as training gets them, before augmentation: excluded classes,
    ``split``, ``aoi`` and ``reduce_zero_label`` apply as in training.

    Args:
        datasets: Initialized datasets (``full_init``), wrapped or not; None is skipped.
    """

    def __init__(self, *datasets: Any) -> None:
        # Real path of a file -> the datasets that contain it, each with the sample's index.
        self._samples: Dict[str, List[Tuple[Any, int]]] = {}
        self._cached_mask: Tuple[Any, np.ndarray] = None, np.empty(0)
        for leaf in _leaves(list(datasets)):
            for index, path in enumerate(_files(leaf)):
                self._samples.setdefault(os.path.realpath(path), []).append((leaf, index))

    def __contains__(self, path: str) -> bool:
        return os.path.realpath(path) in self._samples

    def is_scene(self, path: str) -> bool:
        """Return whether a file is a scene, so that only parts of it may be labeled."""
        samples = self._samples.get(os.path.realpath(path), ())
        return any(isinstance(leaf, GeoTiffDataset) for leaf, _ in samples)

    def __len__(self) -> int:
        return len(self._samples)

    def read(
        self,
        path: str,
        column: int,
        row: int,
        width: int,
        height: int,
        of_all_parts: bool = False,
    ) -> np.ndarray:
        """Return the labels of a window in pixels of a file, uint8 ``(height, width)``.

        With ``of_all_parts``, labels count that ``split`` keeps from every dataset, such as those
        in the margin between training and validation.

        Pixels without a label are ``UNKNOWN``. If several datasets label the same file, the first
        one wins.

        Raises:
            GeoError: If a label file cannot be read.
        """
        mask = np.full((height, width), UNKNOWN, np.uint8)
        for leaf, index in self._samples.get(os.path.realpath(path), ()):
            if isinstance(leaf, GeoTiffDataset):
                labels = _read_scene(leaf, index, column, row, width, height, of_all_parts)
            else:
                labels = self._read_image(path, leaf, index)[
                    row : row + height, column : column + width
                ]
            labels = np.where(labels == leaf.ignore_index, UNKNOWN, labels)
            window = mask[: labels.shape[0], : labels.shape[1]]
            np.copyto(window, labels, where=window == UNKNOWN)
        return mask

    def _read_image(self, path: str, leaf: Any, index: int) -> np.ndarray:
        """Return the mask of a whole image.

        The latest mask is cached, because callers read the windows of one image in a row.
        """
        if self._cached_mask[0] != (leaf, path):
            results: Any = leaf.get_data_info(index)
            for step in leaf.pipeline.transforms:
                if type(step).__name__.startswith('Load'):
                    results = step(results)
            mask = results.get('gt_seg_map')
            if mask is None:
                mask = np.full(results['ori_shape'][:2], UNKNOWN)
            self._cached_mask = (leaf, path), byte_labels(np.asarray(mask), path)
        return self._cached_mask[1]


def _leaves(dataset: Any) -> Iterator[Any]:
    """Yield the innermost datasets of wrapped, concatenated or listed datasets."""
    if isinstance(dataset, (list, tuple)):
        for item in dataset:
            yield from _leaves(item)
    elif dataset is not None:
        inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
        if inner is None:
            yield dataset
        else:
            yield from _leaves(inner)


def _files(leaf: Any) -> List[str]:
    if isinstance(leaf, GeoTiffDataset):
        return leaf.scene_paths()
    return [str(leaf.get_data_info(index).get('img_path', '')) for index in range(len(leaf))]


def _read_scene(
    leaf: GeoTiffDataset,
    index: int,
    column: int,
    row: int,
    width: int,
    height: int,
    of_all_parts: bool,
) -> np.ndarray:
    mask, side = np.empty((height, width), np.uint8), min(_TILE, max(height, width))
    for top in range(0, height, side):
        for left in range(0, width, side):
            tile = mask[top : top + side, left : left + side]
            tile[:] = leaf.read_labels(index, column + left, row + top, side, of_all_parts)[
                : tile.shape[0], : tile.shape[1]
            ]
    return mask


def labeled_share(labels: np.ndarray) -> float:
    """Return the share of labeled pixels in a mask."""
    return float((labels != UNKNOWN).mean())
