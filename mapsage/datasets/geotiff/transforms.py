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

from pathlib import Path
from typing import Any, Dict

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from mapsage.geo import UNLABELED, GeoError, open_raster, output_name, suffix_of


@TRANSFORMS.register_module()
class LoadGeoTiffWindow(BaseTransform):
    """Transform that reads the image of a window of ``GeoTiffDataset``.

    Required keys: ``scene``, ``pixels`` (path of the scene or of its fast copy), ``bands``,
    ``window``. Added: ``img`` (window, window, bands), uint8
    or float32, 0 where there is no data; ``valid``, bool (window, window); ``img_shape``,
    ``ori_shape``; ``img_path``, a name for the window: ``SCENE_COLUMN_ROW.tif``.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the image to ``results``, and return them.

        Raises:
            RasterBlockError: If the file is damaged in this window.
        """
        column, row, side = results['window']
        values, valid = open_raster(results['pixels'], results['bands']).read(
            column, row, side, side)
        image = np.ascontiguousarray(values.transpose(1, 2, 0))
        scene = Path(results['scene'])
        results['img'] = image if image.dtype == np.uint8 else image.astype(np.float32)
        results['valid'] = valid
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        results['img_path'] = str(scene.with_name(
            f'{output_name(results["scene"])}_{column}_{row}{suffix_of(results["scene"])}'))
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
            raise GeoError(f'{results["scene"]} was given without labels; set labels= of the '
                           'dataset, or leave LoadGeoTiffLabels out.')
        column, row, side = results['window']
        ignore = results['ignore_index']
        labels = results['labels'].read(column, row, side, side)
        ignored = (labels == UNLABELED) | (labels == ignore) | ~results['valid']
        for limit in (results['part'], results['area']):
            if limit is not None:
                ignored |= ~limit.mask(column, row, side, side)
        if results['counted'] is not None:
            top, bottom, left, right = results['counted']
            ignored[:top] = ignored[bottom:] = True
            ignored[:, :left] = ignored[:, right:] = True
        shift = int(results['reduce_zero_label'])
        if shift:
            ignored |= labels == 0
        indices = np.where(ignored, 0, labels - shift)
        self._check(indices, shift, results)
        if results['label_map'] is not None:
            lookup = np.arange(results['num_classes'])
            for old, new in results['label_map'].items():
                lookup[old] = new
            indices = lookup[indices]
        results['gt_seg_map'] = np.where(ignored, ignore, indices).astype(np.uint8)
        results['seg_fields'].append('gt_seg_map')
        return results

    @staticmethod
    def _check(indices: np.ndarray, shift: int, results: Dict[str, Any]) -> None:
        """Raise an error if an index is not a class; ``shift`` was subtracted from the labels."""
        count = results['num_classes']
        bad = (indices < 0) | (indices >= count)
        if bad.any():
            column, row, side = results['window']
            raise GeoError(
                f'labels {results["labels"].path} hold {int(indices[bad][0]) + shift} in the '
                f'window (column, row, width, height) = {(column, row, side, side)} '
                f'({int(bad.sum())} pixels); {count} classes allow {shift} to {count - 1 + shift}'
                f'{", 0 for no data" if shift else ""}, and {results["ignore_index"]} for ignored '
                'pixels. Correct the labels, or the classes in metainfo.')
