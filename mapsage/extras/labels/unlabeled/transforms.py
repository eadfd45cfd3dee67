"""Transforms of unlabeled samples: the model never sees their labels, the log may.

The mask of an unlabeled sample passes through the pipeline, because it also tells which pixels
belong to the image. `HideLabels` prepares it, and `PackUnlabeledInputs` moves it out of the field
that losses read. Masks here are uint8: class index, `UNKNOWN` or `OUTSIDE`.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.structures import PixelData
from mmseg.datasets import PackSegInputs
from mmseg.registry import TRANSFORMS

UNKNOWN = 254
"""Mask value of a pixel of the image that has no label."""

OUTSIDE = 255
"""Mask value of a pixel that does not belong to the image: padding, no data."""

FIELD = 'hidden_sem_seg'
"""Field of the data sample with the mask, uint8 (1, H, W)."""

MARK = 'unlabeled'
"""Key in the metainfo of an unlabeled data sample."""

# Key in the results by which PackUnlabeledInputs sees that HideLabels ran.
_HIDDEN = 'labels_are_hidden'


@TRANSFORMS.register_module()
class HideLabels(BaseTransform):
    """Transform that rewrites the mask of a sample whose labels training must not see.

    Put it behind the transforms that load the sample. Labels, if there are any, stay in the mask up
    to ``PackUnlabeledInputs``, which keeps them away from losses. Geometric transforms move the
    mask with the image, and pad it with 255. In a window of ``GeoTiffDataset``, pixels without data
    and pixels outside the dataset's ``split`` or ``aoi`` do not belong to the image.

    Required keys: ``img``, optionally ``gt_seg_map``. Changed: ``gt_seg_map``, uint8 (H, W): class
    index, 254 where it is unknown, 255 outside of the image.

    Args:
        ignore_index: Label of pixels without a class in the masks of the dataset.
    """

    def __init__(self, ignore_index: int = 255) -> None:
        self.ignore_index = ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Replace the mask in ``results``, and return ``results``.

        Raises:
            ValueError: If a label is 254 or more: 254 means an unknown class here.
        """
        labels = results.get('gt_seg_map')
        shape = results['img'].shape[:2]
        hidden = np.full(shape, UNKNOWN, np.uint8)
        if labels is not None:
            known = labels != self.ignore_index
            if (labels[known] >= UNKNOWN).any():
                raise ValueError(
                    f'a mask with the label {int(labels[known].max())}: HideLabels '
                    f'takes class indices below {UNKNOWN}, and ignore_index='
                    f'{self.ignore_index} for pixels without a class. Give the '
                    'ignore_index of the dataset.'
                )
            hidden[known] = labels[known]
        hidden[~_inside_image(results, shape)] = OUTSIDE
        results['gt_seg_map'], results[_HIDDEN] = hidden, True
        fields = results.setdefault('seg_fields', [])
        if 'gt_seg_map' not in fields:
            fields.append('gt_seg_map')
        return results


@TRANSFORMS.register_module()
class PackUnlabeledInputs(PackSegInputs):
    """Transform that packs an unlabeled sample; it replaces ``PackSegInputs``.

    The mask of the data sample, ``gt_sem_seg``, is ``ignore_index`` everywhere, so no loss and no
    count mistakes the sample for a labeled one. The mask of ``HideLabels`` is in
    ``hidden_sem_seg``.

    Args:
        ignore_index: Label of pixels without a class.
        **kwargs: Arguments of ``PackSegInputs``.
    """

    def __init__(self, ignore_index: int = 255, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Return a dict with the image, ``inputs``, and the data sample, ``data_samples``.

        Raises:
            ValueError: If ``HideLabels`` is missing from the pipeline.
        """
        if not results.get(_HIDDEN):
            raise ValueError(
                "PackUnlabeledInputs without HideLabels: put dict(type='HideLabels') "
                'into the pipeline, behind the transforms that load the sample.'
            )
        packed = super().transform(results)
        sample = packed['data_samples']
        hidden = sample.gt_sem_seg.data
        sample.gt_sem_seg = PixelData(data=torch.full_like(hidden, self.ignore_index))
        sample.set_field(PixelData(data=hidden.to(torch.uint8)), FIELD)
        sample.set_metainfo({MARK: True})
        return packed


def _inside_image(results: Dict[str, Any], shape: Tuple[int, int]) -> np.ndarray:
    """Return which pixels belong to the image, bool (H, W)."""
    inside = np.asarray(results.get('valid', np.ones(shape, bool))).copy()
    if 'window' in results:
        column, row, side = results['window']
        for limit in (results.get('part'), results.get('area')):
            if limit is not None:
                inside &= limit.mask(column, row, side, side)
    return inside
