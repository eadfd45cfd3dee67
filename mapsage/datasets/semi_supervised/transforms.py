"""Transforms of unlabeled samples: the model never sees their labels, the log may."""
from __future__ import annotations

from typing import Any, Dict

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.structures import PixelData
from mmseg.datasets import PackSegInputs
from mmseg.registry import TRANSFORMS

# Values of the mask of an unlabeled sample that are no class.
UNKNOWN = 254  # a pixel of the image, whose class nobody knows
OUTSIDE = 255  # no pixel of the image: padding, no data
# Field of a data sample with that mask, uint8 (1, H, W), and the mark of such a sample.
FIELD = 'hidden_sem_seg'
MARK = 'unlabeled'
_HIDDEN = 'labels_are_hidden'  # key of the results between the two transforms


@TRANSFORMS.register_module()
class HideLabels(BaseTransform):
    """Transform that hides the labels of a sample, if it has any, behind those that load it.

    Up to ``PackUnlabeledInputs`` the mask says what the log alone may know, and which pixels belong
    to the image. It moves with the image, and transforms fill up with 255. Of a window of
    ``GeoTiffDataset``, pixels without data and pixels that are not of the dataset's part or area do
    not belong to the image.

    Required keys: ``img``, optionally ``gt_seg_map``. Changed: ``gt_seg_map``, uint8 (H, W): class
    index, 254 where it is unknown, 255 outside of the image.

    Args:
        ignore_index: Label of pixels without a class in the masks of the dataset.
    """

    def __init__(self, ignore_index: int = 255) -> None:
        self.ignore_index = ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Exchange the mask in ``results``, and return them.

        Raises:
            ValueError: If a label is 254, which stands for an unknown class here.
        """
        labels = results.get('gt_seg_map')
        shape = results['img'].shape[:2]
        hidden = np.full(shape, UNKNOWN, np.uint8)
        if labels is not None:
            known = labels != self.ignore_index
            if (labels[known] >= UNKNOWN).any():
                raise ValueError(f'a mask with the label {int(labels[known].max())}: HideLabels '
                                 f'takes class indices below {UNKNOWN}, and ignore_index='
                                 f'{self.ignore_index} for pixels without a class. Give the '
                                 'ignore_index of the dataset.')
            hidden[known] = labels[known]
        hidden[~_of_image(results, shape)] = OUTSIDE
        results['gt_seg_map'], results[_HIDDEN] = hidden, True
        fields = results.setdefault('seg_fields', [])
        if 'gt_seg_map' not in fields:
            fields.append('gt_seg_map')
        return results


@TRANSFORMS.register_module()
class PackUnlabeledInputs(PackSegInputs):
    """Transform that packs an unlabeled sample, in the place of ``PackSegInputs``.

    The mask of the data sample is ``ignore_index`` everywhere, so that no loss and no count takes
    the sample for a labeled one; ``hidden_sem_seg`` holds what ``HideLabels`` has kept.

    Args:
        ignore_index: Label of pixels without a class.
        **kwargs: Arguments of ``PackSegInputs``.
    """

    def __init__(self, ignore_index: int = 255, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Return image and data sample.

        Raises:
            ValueError: If ``HideLabels`` is missing from the pipeline.
        """
        if not results.get(_HIDDEN):
            raise ValueError("PackUnlabeledInputs without HideLabels: put dict(type='HideLabels') "
                             'into the pipeline, behind the transforms that load the sample.')
        packed = super().transform(results)
        sample = packed['data_samples']
        hidden = sample.gt_sem_seg.data
        sample.gt_sem_seg = PixelData(data=torch.full_like(hidden, self.ignore_index))
        sample.set_field(PixelData(data=hidden.to(torch.uint8)), FIELD)
        sample.set_metainfo({MARK: True})
        return packed


def _of_image(results: Dict[str, Any], shape: Any) -> np.ndarray:
    """Return which pixels belong to the image, bool (H, W)."""
    inside = np.asarray(results.get('valid', np.ones(shape, bool))).copy()
    if 'window' in results:
        column, row, side = results['window']
        for limit in (results.get('part'), results.get('area')):
            if limit is not None:
                inside &= limit.mask(column, row, side, side)
    return inside
