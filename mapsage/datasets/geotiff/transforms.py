"""Transforms that load the image and the labels of a window of a scene.

They run in the loader's workers and find everything they need in the sample's dict, which
`GeoTiffDataset` fills. Only `LoadGeoTiffLabels` decides which pixels count (valid, in the part, in
the area, not scored by a neighbor); training and the counts of classes both use it.

Shapes:
    img         (side, side, bands) uint8 or float32
    valid       (side, side) bool
    gt_seg_map  (side, side) uint8
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, NamedTuple, Tuple

import cv2
import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from mapsage.datasets.band_layout import bands_last
from mapsage.geo import GeoError, open_raster, output_name, suffix_of


@TRANSFORMS.register_module()
class LoadGeoTiffWindow(BaseTransform):
    """Transform that reads the image of a window of ``GeoTiffDataset``.

    Required keys: ``scene``, ``pixels`` (path of the scene or of its fast copy), ``bands``,
    ``window``, and ``conversion`` if values are not as stored. Added: ``img`` (window, window, bands), uint8
    or float32, 0 where there is no data; ``valid``, bool (window, window); ``img_shape``,
    ``ori_shape``; ``img_path``, a name for the window: ``SCENE_COLUMN_ROW.tif``.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the image to ``results``, and return them.

        Raises:
            RasterBlockError: If the file is damaged in this window.
        """
        column, row, side = results['window']
        values, valid = open_raster(
            results['pixels'], results['bands'], conversion=results.get('conversion')
        ).read(column, row, side, side)
        image = bands_last(values if values.dtype == np.uint8 else values.astype(np.float32))
        scene = Path(results['scene'])
        results['img'] = image
        results['valid'] = valid
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        results['img_path'] = str(
            scene.with_name(
                f'{output_name(results["scene"])}_{column}_{row}{suffix_of(results["scene"])}'
            )
        )
        return results


@TRANSFORMS.register_module()
class LoadGeoTiffLabels(BaseTransform):
    """Transform that reads or burns the labels of a window, after ``LoadGeoTiffWindow``.

    Required keys: ``labels``, ``window``, ``valid``, ``counted`` (first row that counts, end of the
    rows, first column, end of the columns; None if all count), ``part`` (``ScenePart``; None if all
    pixels count), ``area`` (``SceneArea``; None if all pixels count), ``num_classes``,
    ``ignore_index``. Added: ``gt_seg_map``, uint8 (window, window).
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the mask to ``results``, and return them.

        Raises:
            GeoError: If the dataset has no labels, or a label is not a class.
        """
        if results['labels'] is None:
            raise GeoError(
                f'{results["scene"]} was given without labels; set labels= of the '
                'dataset, or leave LoadGeoTiffLabels out.'
            )
        column, row, side = results['window']
        values, labeled = results['labels'].read(column, row, side, side)
        counts = labeled & results['valid']
        for limit in (results['part'], results['area']):
            if limit is not None:
                counts &= limit.mask(column, row, side, side)
        if results['counted'] is not None:
            top, bottom, left, right = results['counted']
            counts[:top] = counts[bottom:] = False
            counts[:, :left] = counts[:, right:] = False
        table = _label_table(
            results['num_classes'],
            results['ignore_index'],
            int(results['reduce_zero_label']),
            tuple((results['label_map'] or {}).items()),
        )
        if values.dtype == np.uint8 and values.max() < table.unchanged:
            mask = values
        else:
            positions = table.positions(values)
            refused = _look_up(table.refused, positions)
            if cv2.countNonZero(refused):
                self._check(values, (refused != 0) & counts, results)
            mask = _look_up(table.classes, positions)
        if not counts.all():
            mask[~counts] = table.ignored
        results['gt_seg_map'] = mask
        results['seg_fields'].append('gt_seg_map')
        return results

    @staticmethod
    def _check(values: np.ndarray, bad: np.ndarray, results: Dict[str, Any]) -> None:
        """Raise an error if a label is ``bad``, bool (height, width)."""
        if bad.any():
            count, shift = results['num_classes'], int(results['reduce_zero_label'])
            column, row, side = results['window']
            raise GeoError(
                f'labels {results["labels"].path} hold {int(values[bad][0])} in the '
                f'window (column, row, width, height) = {(column, row, side, side)} '
                f'({int(bad.sum())} pixels); {count} classes allow {shift} to {count - 1 + shift}'
                f'{", 0 for no data" if shift else ""}, and {results["ignore_index"]} for ignored '
                'pixels. Correct the labels, or the classes in metainfo.'
            )


class _LabelTable(NamedTuple):
    """What becomes of each label value.

    The tables have an entry for each value from 0 to N - 1, at least 0 to 255, and two more: N for
    all other values, N + 1 for the ignore index if it is none of 0 to N - 1.

    Attributes:
        classes: Class index or ``ignored``, uint8 (N + 2,).
        refused: 1 for a value that is neither a class nor ignored, else 0, uint8 (N + 2,).
        ignore_index: Value of ignored pixels in a label file.
        ignored: Value of ignored pixels in a mask.
        unchanged: Number of values from 0 on that are the index of their class.
    """

    classes: np.ndarray
    refused: np.ndarray
    ignore_index: int
    ignored: int
    unchanged: int

    def positions(self, values: np.ndarray) -> np.ndarray:
        """Return the entries of label values, which are integers of any type."""
        if values.dtype == np.uint8:
            return values
        other = len(self.classes) - 2
        # Compared in the type of the file: a conversion may change a value into a class index.
        inside = (values >= 0) & (values < other)
        positions = np.where(inside, np.where(inside, values, 0).astype(np.intp), other)
        if not 0 <= self.ignore_index < other:
            positions[values == self.ignore_index] = other + 1
        return positions


@lru_cache(maxsize=16)
def _label_table(
    count: int, ignore: int, shift: int, label_map: Tuple[Tuple[int, int], ...]
) -> _LabelTable:
    """Return the table of a dataset with ``count`` classes.

    Args:
        count: Number of classes of the label files.
        ignore: Value of ignored pixels.
        shift: 1 if label 0 means "no data" and label 1 is class 0, else 0.
        label_map: Pairs of a class of the label files and its new index.

    Raises:
        GeoError: If the classes and the ignored pixels do not fit into uint8.
    """
    # The same conversion as of an array, which takes -1 for 255.
    ignored = int(np.array(ignore).astype(np.uint8))
    size = max(256, count + shift)
    classes, refused = np.full(size + 2, ignored, np.uint8), np.ones(size + 2, np.uint8)
    indices = np.arange(count)
    for old, new in label_map:
        indices[old] = new
    if indices.max() > 255 or (ignored not in (ignore, 255) and ignored in indices):
        raise GeoError(
            f'{count} classes and ignore_index={ignore}: a mask is uint8, in which the '
            f'ignored pixels are {ignored} and a class is at most 254. Set '
            'ignore_index=255, and join classes with label_map if there are more.'
        )
    classes[shift : shift + count] = indices.astype(np.uint8)
    refused[: shift + count] = refused[size + 1] = 0
    if 0 <= ignore < size:
        classes[ignore], refused[ignore] = ignored, 0
    changed = np.flatnonzero((classes[:256] != np.arange(256)) | (refused[:256] != 0))
    return _LabelTable(classes, refused, ignore, ignored, int(changed[0]) if len(changed) else 256)


def _look_up(table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return ``table[positions]`` for a uint8 table with more than 255 entries."""
    return cv2.LUT(positions, table[:256]) if positions.dtype == np.uint8 else table[positions]
