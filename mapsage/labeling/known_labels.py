"""The labels that the datasets of a config hold already, by file."""
from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from mapsage.datasets import GeoTiffDataset

_TILE = 512  # pixels, at most, along the squares that are read from labels of a scene

UNKNOWN = 255
"""Value of pixels without a label."""


class KnownLabels:
    """Masks of the files that datasets hold.

    Masks are class indices, as training gets them, before any augmentation: classes that are left
    out, ``split``, ``aoi`` and zero labels count as in training.

    Args:
        datasets: Datasets, whatever wraps them, with their samples listed.
    """

    def __init__(self, *datasets: Any) -> None:
        self._places: Dict[str, List[Tuple[Any, int]]] = {}
        self._last: Tuple[Any, np.ndarray] = None, np.empty(0)
        for leaf in _leaves(list(datasets)):
            for number, path in enumerate(_files(leaf)):
                self._places.setdefault(os.path.realpath(path), []).append((leaf, number))

    def __contains__(self, path: str) -> bool:
        return os.path.realpath(path) in self._places

    def is_scene(self, path: str) -> bool:
        """Return whether a file is a scene, of which any part may be labeled."""
        places = self._places.get(os.path.realpath(path), ())
        return any(isinstance(leaf, GeoTiffDataset) for leaf, _ in places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, path: str, column: int, row: int, width: int, height: int) -> np.ndarray:
        """Return the labels of a window in pixels of a file, uint8 ``(height, width)``.

        ``UNKNOWN`` is where there is none. Where several datasets have one, the first counts.

        Raises:
            GeoError: If a label file cannot be read.
        """
        mask = np.full((height, width), UNKNOWN, np.uint8)
        for leaf, number in self._places.get(os.path.realpath(path), ()):
            if isinstance(leaf, GeoTiffDataset):
                found = _from_scene(leaf, number, column, row, width, height)
            else:
                found = self._whole(path, leaf, number)[row:row + height, column:column + width]
            found = np.where(found == leaf.ignore_index, UNKNOWN, found)
            here = mask[:found.shape[0], :found.shape[1]]
            np.copyto(here, found, where=here == UNKNOWN)
        return mask

    def _whole(self, path: str, leaf: Any, number: int) -> np.ndarray:
        """Return the mask of an image, of which the last one is kept."""
        if self._last[0] != (leaf, path):
            results: Any = leaf.get_data_info(number)
            for step in leaf.pipeline.transforms:
                if type(step).__name__.startswith('Load'):
                    results = step(results)
            mask = results.get('gt_seg_map')
            if mask is None:
                mask = np.full(results['ori_shape'][:2], UNKNOWN)
            self._last = (leaf, path), np.asarray(mask).astype(np.uint8)
        return self._last[1]


def _leaves(dataset: Any) -> Iterator[Any]:
    """Yield the datasets in ``dataset``, out of whatever wraps or joins them."""
    if isinstance(dataset, (list, tuple)):
        for each in dataset:
            yield from _leaves(each)
    elif dataset is not None:
        inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
        if inner is None:
            yield dataset
        else:
            yield from _leaves(inner)


def _files(leaf: Any) -> List[str]:
    if isinstance(leaf, GeoTiffDataset):
        return leaf.scene_paths()
    return [str(leaf.get_data_info(number).get('img_path', '')) for number in range(len(leaf))]


def _from_scene(leaf: GeoTiffDataset, number: int, column: int, row: int, width: int,
                height: int) -> np.ndarray:
    mask, side = np.empty((height, width), np.uint8), min(_TILE, max(height, width))
    for top in range(0, height, side):
        for left in range(0, width, side):
            part = mask[top:top + side, left:left + side]
            part[:] = leaf.read_labels(number, column + left, row + top,
                                       side)[:part.shape[0], :part.shape[1]]
    return mask


def labeled_share(labels: np.ndarray) -> float:
    """Return which share of the pixels of a mask has a label."""
    return float((labels != UNKNOWN).mean())
