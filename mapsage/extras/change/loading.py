"""Transforms that load the images and the labels of a pair of ``ChangeDataset``.

Shapes:
    img         (height, width, 2 bands + 2): bands of the first date, of the second date,
                then the valid pixels of both dates as 1 (`mapsage/geo/stacks/layout.py`)
    gt_seg_map  (height, width) uint8
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from mapsage.geo import GeoError, Raster
from mapsage.geo.scene_facts import STORED, open_scenes

from .labels import read_change


def open_pair(paths: Mapping[str, Any], bands: Sequence[int], units: str) -> Tuple[Raster, Raster]:
    """Return the images of both dates, with their bands in the order of the first one's names."""
    before, after = open_scenes([paths['img_path_from'], paths['img_path_to']], bands, (), units)
    return before, after


@TRANSFORMS.register_module()
class LoadChangePair(BaseTransform):
    """Transform that reads both images of a pair as a stack of one sensor with two dates.

    Required keys: ``img_path_from``, ``img_path_to``, ``stack_layout``; ``units`` counts if present.
    Added: ``img``, uint8 if both files are, else float32; ``img_shape``, ``ori_shape``; ``site``,
    unknown. Pixels without data in a file are 0 and not valid.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the image to ``results``, and return them.

        Raises:
            GeoError: If the images differ in size, or lack a band.
            RasterBlockError: If a file is damaged.
        """
        (sensor,) = results['stack_layout'].sensors
        # Not from the pool of open files: there are thousands of them, and each is read once.
        dates = open_pair(
            results, [int(band) for band in sensor.bands], results.get('units', STORED)
        )
        pixels: List[np.ndarray] = []
        valid: List[np.ndarray] = []
        for raster in dates:
            with raster:
                values, has_data = raster.read(0, 0, raster.width, raster.height)
            pixels.append(values)
            valid.append(has_data[None])
        if pixels[0].shape != pixels[1].shape:
            sizes = [
                f'{raster.path}: {values.shape[2]}x{values.shape[1]} pixels'
                for raster, values in zip(dates, pixels)
            ]
            raise GeoError(f'the dates of a pair differ: {"; ".join(sizes)}. Expected one size.')
        is_small = all(values.dtype == np.uint8 for values in pixels)
        image = np.concatenate(
            [plane.astype(np.uint8 if is_small else np.float32) for plane in (*pixels, *valid)]
        ).transpose(1, 2, 0)
        results['img'] = np.ascontiguousarray(image)
        results['site'] = float('nan'), float('nan')
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


@TRANSFORMS.register_module()
class LoadChangeLabels(BaseTransform):
    """Transform that reads the labels of change of a pair, after ``LoadChangePair``.

    Required keys: ``img``, ``label_folders`` (``LabelFolders``) and the paths of the labels. Added:
    ``gt_seg_map``: 0 for unchanged, else a class of change; the ignore index also where one of the
    dates has no data.

    Args:
        ignore_index: Label of pixels that are neither trained nor scored.
    """

    def __init__(self, ignore_index: int = 255) -> None:
        self.ignore_index = ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the labels to ``results``, and return them.

        Raises:
            GeoError: If a label cannot be read, has another size than the images, or contradicts
                another one.
        """
        labels = read_change(results, results['label_folders'], self.ignore_index)
        if labels.shape != results['img'].shape[:2]:
            path = results.get('seg_map_path') or results['seg_map_path_from']
            raise GeoError(
                f'label {path} has {labels.shape[1]}x{labels.shape[0]} pixels and the images '
                f'{results["img_path"]} {results["img"].shape[1]}x{results["img"].shape[0]}, '
                f'expected one size.'
            )
        # What has changed is unknown where one of the dates has no data.
        dates = results['stack_layout'].dates
        labels[~results['img'][..., -dates:].all(-1)] = self.ignore_index
        results['gt_seg_map'] = labels
        results['seg_fields'].append('gt_seg_map')
        return results
