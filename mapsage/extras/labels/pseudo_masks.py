"""Pseudo-label masks: the confident pixels of finished class maps.

A mask contains a class index where the model is confident enough (`class_thresholds`) and 255
elsewhere, also where a label exists already. Maps are processed in strips of rows, so a scene of
any size fits in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

import cv2
import numpy as np
from rasterio.windows import Window

from mapsage.base.files import atomic_write
from mapsage.geo import ClassMapWriter, MapInfo, write_cog
from mapsage.geo.cog import temporary_beside
from mapsage.geo.gdal_files import open_file
from mapsage.geo.qgis_style import is_own_style, map_style

from .known_labels import UNKNOWN, KnownLabels

PERCENT = 101
"""Number of steps of a confidence: 0 to 100 per cent."""

_STRIP_ROWS = 512


class MapPair(NamedTuple):
    """A finished class map with its confidence, and the image it was predicted from.

    Attributes:
        name: File name of the mask, without suffix.
        path: Path of the image or scene.
        map: Class map of the image's size, uint8; 255 without data.
        confidence: Confidence of the map's pixels in per cent, uint8.
        is_picture: Whether the mask is a PNG; if False, a GeoTIFF on the grid of the map.
    """

    name: str
    path: str
    map: Path
    confidence: Path
    is_picture: bool

    def mask(self, folder: Path) -> Path:
        """Return the path of the mask in ``folder``."""
        return folder / (self.name + ('.png' if self.is_picture else '.tif'))


@dataclass(frozen=True)
class Kept:
    """Statistics of the pixels that were kept as pseudo-labels.

    Attributes:
        thresholds: Minimum confidence by class, per cent, ``(classes,)`` int64.
        predicted: Pixels by predicted class, ``(classes,)`` int64.
        kept: Pixels by class that are pseudo-labels now, ``(classes,)`` int64.
        pairs: Maps with at least one pseudo-label in their masks.
        empty: Maps without any.
    """

    thresholds: np.ndarray
    predicted: np.ndarray
    kept: np.ndarray
    pairs: List[MapPair]
    empty: List[MapPair]

    def lost(self, names: Sequence[str]) -> List[str]:
        """Return one message per reason for which classes have no pseudo-label."""
        absent = [name for name, count in zip(names, self.predicted) if not count]
        unsure = [
            f'{name} ({threshold / 100:g})'
            for name, count, label_count, threshold in zip(
                names, self.predicted, self.kept, self.thresholds
            )
            if count and not label_count
        ]
        return [
            f'no pseudo-label teaches {", ".join(classes)}: {reason}'
            for classes, reason in (
                (
                    absent,
                    'the model predicts it nowhere except where it is labeled already. Label '
                    'some of it.',
                ),
                (
                    unsure,
                    'no pixel of it has this confidence. Lower --min-confidence, or raise '
                    '--min-share, which keeps the most confident pixels of each class.',
                ),
            )
            if classes
        ]

    def as_json(self, names: Sequence[str]) -> Dict[str, Any]:
        """Return pixels, share and threshold by class name."""
        return {
            name: dict(
                predicted=int(predicted),
                kept=int(label_count),
                share_kept=round(int(label_count) / max(1, int(predicted)), 4),
                threshold=int(threshold) / 100,
            )
            for name, predicted, label_count, threshold in zip(
                names, self.predicted, self.kept, self.thresholds
            )
        }


def write_masks(
    pairs: Sequence[MapPair],
    folder: Path,
    names: Sequence[str],
    palette: Union[np.ndarray, Sequence[Sequence[int]]],
    least: float,
    share: float,
    known: KnownLabels,
) -> Kept:
    """Write a mask for every map: class indices, 255 where the model is unsure.

    The maps are read twice: first to compute the thresholds from the confidences of all maps, then
    to write the masks. Pixels with an existing label are 255, because that label teaches them.

    Args:
        pairs: The maps.
        folder: Existing folder of the masks.
        names: Names of the classes.
        palette: RGB colors of the classes, ``(classes, 3)``.
        least: Confidence from which every pixel is kept, 0 to 1.
        share: Minimum share of each class that is kept; see ``class_thresholds``.
        known: Index of the existing labels.

    Raises:
        GeoError: If a map cannot be read, or a mask cannot be written.
        OSError: If a PNG cannot be written.
    """
    counts = np.zeros((len(names), PERCENT), np.int64)
    for pair in pairs:
        for _, classes, confidence in _strips(pair, known):
            is_class = classes < len(names)
            # One bincount over the flat index of (class, confidence).
            flat = classes[is_class].astype(np.int64) * PERCENT
            flat += np.minimum(confidence[is_class], PERCENT - 1)
            counts += np.bincount(flat, minlength=counts.size).reshape(counts.shape)
    thresholds = class_thresholds(counts, least, share)
    # Values that are no class (no data) get a threshold above any confidence.
    value_thresholds = np.full(256, 256, np.int16)
    value_thresholds[: len(names)] = thresholds
    label_counts = np.zeros(len(names), np.int64)
    with_labels: List[MapPair] = []
    empty: List[MapPair] = []
    for pair in pairs:
        mask_counts = _write_mask(pair, pair.mask(folder), value_thresholds, names, palette, known)[
            : len(names)
        ]
        label_counts += mask_counts
        (with_labels if mask_counts.any() else empty).append(pair)
    return Kept(thresholds, counts.sum(1), label_counts, with_labels, empty)


def class_thresholds(counts: np.ndarray, least: float, share: float) -> np.ndarray:
    """Return the minimum confidence of a pseudo-label for each class.

    The threshold is ``least``. A class that would keep less than ``share`` of its pixels gets a
    lower one: the highest threshold that keeps this share. So a rare class, of which a model is
    seldom sure, gets labels too; one threshold for all classes would only teach the frequent
    classes, more so in every round of self-training.

    The quantile by class comes from class-balanced self-training (Zou, Yu, Kumar and Wang, ECCV
    2018). There it is the threshold of every class, with a share that grows from round to round;
    here it applies only where it is below ``least``.

    Args:
        counts: Pixels by predicted class and confidence in per cent, integers
            ``(classes, PERCENT)``.
        least: Confidence from which pixels of any class are kept, 0 to 1. Fractions of a per cent
            are rounded up.
        share: Minimum share of each class that is kept, 0 to 1; with 0, ``least`` is the threshold
            of all classes.

    Returns:
        ``(classes,)`` int64, per cent. A class without pixels has ``least``.
    """
    limit = math.ceil(round(100 * least, 6))
    # Pixels with at least this confidence.
    above = counts[:, ::-1].cumsum(1)[:, ::-1]
    total = above[:, :1]
    enough = above >= np.ceil(share * total)
    quantile = np.where(enough, np.arange(PERCENT), 0).max(1)
    return np.where((total[:, 0] > 0) & (share > 0), np.minimum(quantile, limit), limit)


def _strips(pair: MapPair, known: KnownLabels) -> Iterator[Tuple[int, np.ndarray, np.ndarray]]:
    """Yield the first row, the classes and the confidence of each strip of a map.

    Classes are 255 where a label exists already.
    """
    with open_file(pair.map) as map_file, open_file(pair.confidence) as confidence_file:
        for row in range(0, map_file.height, _STRIP_ROWS):
            window = Window(0, row, map_file.width, min(_STRIP_ROWS, map_file.height - row))
            classes = map_file.read(1, window=window)
            if pair.path in known:
                labels = known.read(pair.path, 0, row, window.width, window.height)
                classes[labels != UNKNOWN] = UNKNOWN
            yield row, classes, confidence_file.read(1, window=window)


def _write_mask(
    pair: MapPair,
    path: Path,
    thresholds: np.ndarray,
    names: Sequence[str],
    palette: Union[np.ndarray, Sequence[Sequence[int]]],
    known: KnownLabels,
) -> np.ndarray:
    """Write the mask of a map and return its pixels by value, ``(256,)``.

    Args:
        pair: The map.
        path: Path of the mask.
        thresholds: Minimum confidence by value of the map, per cent, ``(256,)``.
        names, palette, known: As in :func:`write_masks`.
    """
    counts = np.zeros(256, np.int64)

    def masks() -> Iterator[Tuple[int, np.ndarray]]:
        for row, classes, confidence in _strips(pair, known):
            classes[confidence < thresholds[classes]] = UNKNOWN
            counts[:] += np.bincount(classes.ravel(), minlength=256)
            yield row, classes

    if pair.is_picture:
        _, data = cv2.imencode('.png', np.concatenate([mask for _, mask in masks()]))
        atomic_write(path, data.tobytes())
        return counts
    with open_file(pair.map) as source:
        height, width = source.shape
        is_georeferenced = source.crs is not None or not source.transform.is_identity
        info = MapInfo(
            class_names=names,
            palette=np.asarray(palette).tolist(),
            crs=source.crs,
            transform=source.transform if is_georeferenced else None,
        )
    with temporary_beside(path) as folder:
        working = folder / 'mask.tif'
        with ClassMapWriter(working, width, height, info) as writer:
            for row, classes in masks():
                writer.write(row, classes)
        write_cog(working, path)
    style = path.with_suffix('.qml')
    if is_own_style(style):
        atomic_write(style, map_style(names, info.palette))
    return counts


def table(result: Kept, names: Sequence[str]) -> List[str]:
    """Return the lines of a table with threshold, predicted and kept pixels by class."""
    width = max([5, *map(len, names)])
    lines = [f'{"class":{width}}  {"threshold":>9}  {"predicted":>12}  {"kept":>12}  {"share":>7}']
    lines += [
        f'{name:{width}}  {threshold / 100:9.2f}  {predicted:12,}  {count:12,}  '
        f'{_percent(count, predicted):>7}'
        for name, threshold, predicted, count in zip(
            names, result.thresholds, result.predicted, result.kept
        )
    ]
    total, predicted = int(result.kept.sum()), int(result.predicted.sum())
    return lines + [
        f'{"all":{width}}  {"":9}  {predicted:12,}  {total:12,}  {_percent(total, predicted):>7}'
    ]


def _percent(count: int, total: int) -> str:
    return f'{100 * count / total:.1f} %' if total else '-'
