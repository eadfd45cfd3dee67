"""Shares of the classes in the masks of image folders, and the warnings that follow from them.

A class that no mask contains gets no score, so a mean over classes may look perfect without it, and
a value that is ignored may have been meant as a class. Scenes have their own figures, see
``mapsage/datasets/geotiff/summary.py``.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np
import torch
from mmcv.transforms import LoadAnnotations, LoadImageFromFile
from mmengine.dataset import BaseDataset
from mmseg.datasets.transforms import LoadAnnotations as LoadMask

from mapsage.host.dataset_parts import lists_samples, metainfo_of, reads_remotely

from .data_checks import DataError, check_mask

# Masks that are read, evenly spread over the dataset, and the pixels after which no more are read:
# half a second.
_MASKS, _PIXELS = 256, 2**26
# From this share on, ignored pixels are named although every class occurs.
_MANY = 0.5
_PACKAGES = ('mmseg.', 'mapsage.')
_TRANSFORMS = ('mmcv.', *_PACKAGES)


class LabelCensus(NamedTuple):
    """Labels in the examined masks of a dataset.

    Attributes:
        counts: Pixels of each class, int64 ``(classes,)``.
        ignored: Pixels with the ignored label.
        masks: Number of examined masks.
        samples: Number of samples of the dataset.
        size: Height and width of the first mask.
    """

    counts: np.ndarray
    ignored: int
    masks: int
    samples: int
    size: Tuple[int, int]


def notes_on_labels(dataset: Any) -> List[Tuple[int, str]]:
    """Return a logging level and a text for each fact about a dataset's masks.

    Args:
        dataset: Dataset without wrappers. Nothing is returned for scenes, for datasets of users,
            and where masks are not loaded or cannot be read: the loader names such a file.

    Raises:
        DataError: If a mask has several channels, or a value that is no class.
    """
    census = count_labels(dataset)
    return [] if census is None else list(_notes(dataset, census))


def count_labels(dataset: Any) -> Optional[LabelCensus]:
    """Return the labels in up to 256 masks of a dataset, or None if they are not read here.

    Raises:
        DataError: If a mask has several channels, or a value that is no class.
    """
    classes = metainfo_of(dataset).get('classes') or ()
    steps = _loading_steps(dataset)
    if not steps or not classes or not len(dataset):
        return None
    ignore = getattr(dataset, 'ignore_index', 255)
    totals, masks, size = np.zeros(65536, np.int64), 0, (0, 0)
    faulty: Optional[DataError] = None
    count = min(len(dataset), _MASKS)
    try:
        for index in dict.fromkeys(np.linspace(0, len(dataset) - 1, count).astype(int).tolist()):
            results: Dict[str, Any] = dict(dataset.get_data_info(index))
            for step in steps:
                results = step(results)
            mask = np.asarray(results['gt_seg_map'])
            faulty = faulty or _find_fault(dataset, index, mask)
            if faulty:
                break
            size = size if masks else (mask.shape[0], mask.shape[1])
            if mask.ndim != 2 or mask.min() < 0 or mask.max() > 65535:
                return None
            totals += np.bincount(mask.astype(np.uint16).ravel(), minlength=65536)
            masks += 1
            if totals.sum() > _PIXELS:
                break
    # The loader that reads the file in its turn explains the error and names the file.
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, cv2.error):
        return None
    if faulty:
        # Masks of the validation would otherwise be read after hours of training.
        raise faulty
    ignored = int(totals[ignore]) if len(classes) <= ignore < 65536 else 0
    return LabelCensus(totals[: len(classes)], ignored, masks, len(dataset), size)


def _find_fault(dataset: Any, index: int, mask: np.ndarray) -> Optional[DataError]:
    """Return the error that the loader raises for a mask; None where a user's transform changes masks."""
    if all(
        type(transform).__module__.startswith(_TRANSFORMS)
        for transform in dataset.pipeline.transforms
    ):
        try:
            check_mask(dataset, index, torch.from_numpy(np.ascontiguousarray(mask)))
        except DataError as error:
            return error
    return None


def _loading_steps(dataset: Any) -> List[Any]:
    """Return the transforms that load a mask; empty if the dataset is not read here."""
    if (
        not isinstance(dataset, BaseDataset)
        or not type(dataset).__module__.startswith(_PACKAGES)
        or not lists_samples(dataset)
        or reads_remotely(dataset)
    ):
        return []
    steps = []
    for transform in getattr(dataset.pipeline, 'transforms', ()):
        if not type(transform).__name__.startswith('Load'):
            continue
        steps.append(transform)
        if isinstance(transform, LoadAnnotations):
            # Reading a mask does not need the image, polygons need its size.
            return [transform] if type(transform) is LoadMask else steps
    return []


def _notes(dataset: Any, census: LabelCensus) -> Iterator[Tuple[int, str]]:
    title = _title(dataset)
    classes: Sequence[str] = metainfo_of(dataset)['classes']
    pixels = max(1, int(census.counts.sum()) + census.ignored)
    examined = f'{census.masks} of {census.samples} masks'
    shares = [f'{name} {100 * n / pixels:.3g} %' for name, n in zip(classes, census.counts)]
    if census.ignored:
        shares.append(f'ignored {100 * census.ignored / pixels:.3g} %')
    height, width = census.size
    yield (
        logging.INFO,
        f'{title}: {census.samples:,} images, {width} x {height} pixels; shares in {examined}: '
        f'{", ".join(shares)}',
    )
    absent = [name for name, n in zip(classes, census.counts) if not n]
    ignore = getattr(dataset, 'ignore_index', 255)
    if absent:
        yield (
            logging.WARNING,
            f'{title}: no pixel of {examined} is {", ".join(map(str, absent))}. A class that does '
            f'not occur is not learned and gets no score, so a mean over the classes looks better '
            f'than it is. Check the values of the masks (0 to {len(classes) - 1}) and the split, or '
            f'take the class out of metainfo.',
        )
    share = census.ignored / pixels
    if census.ignored and (absent or share >= _MANY):
        yield (
            logging.WARNING,
            f'{title}: {100 * share:.3g} % of the pixels of {examined} are {ignore}, which is '
            f'ignored: they are neither trained nor scored. If {ignore} means a class in these '
            f'files, give it the index of that class (0 to {len(classes) - 1}) in the masks.',
        )
    yield from _large_crops(dataset, census, title)
    yield from _cut_values(dataset, title)


def _large_crops(dataset: Any, census: LabelCensus, title: str) -> Iterator[Tuple[int, str]]:
    """Yield a warning if a crop is larger than the first image and nothing enlarges it before."""
    for transform in getattr(dataset.pipeline, 'transforms', ()):
        name, size = type(transform).__name__, getattr(transform, 'crop_size', None)
        if 'Resize' in name:
            return
        if name == 'RandomCrop' and isinstance(size, (tuple, list)) and len(size) == 2:
            height, width = census.size
            if height < size[0] or width < size[1]:
                side = f'({min(height, size[0])}, {min(width, size[1])})'
                yield (
                    logging.WARNING,
                    f'{title}: crop_size={tuple(size)} is larger than its images ({height} x '
                    f'{width} pixels, height x width). The rest of each crop is padding, which '
                    f'costs time and teaches nothing: set crop_size={side} in RandomCrop, and as '
                    f'size of the data_preprocessor.',
                )
            return


def _cut_values(dataset: Any, title: str) -> Iterator[Tuple[int, str]]:
    """Yield a warning if OpenCV cuts the 16-bit values of the first image to 8 bits."""
    loader = dataset.pipeline.transforms[0]
    path = dataset.get_data_info(0).get('img_path')
    if (
        type(loader) is not LoadImageFromFile
        or loader.imdecode_backend not in (None, 'cv2')
        or loader.color_type == 'unchanged'
        or not isinstance(path, str)
        or not os.path.isfile(path)
    ):
        return
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is not None and image.dtype == np.uint16:
        high = int(image.max())
        yield (
            logging.WARNING,
            f'{title}: {path} has values of 16 bits up to {high}, and LoadImageFromFile keeps the '
            f'upper 8 bits ({high} becomes {high >> 8}), so that most of the contrast may be lost. '
            f'Convert the images to 8 bits by percentiles, or read them as scenes with '
            f'GeoTiffDataset (docs/tutorials/scenes.md).',
        )


def _title(dataset: Any) -> str:
    folder = (getattr(dataset, 'data_prefix', None) or {}).get('img_path') or ''
    return f'{type(dataset).__name__} {folder or getattr(dataset, "data_root", "")}'.strip()
