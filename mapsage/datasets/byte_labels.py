"""Label maps that travel as uint8 from a loader's workers to the device of the model.

MMSegmentation packs label maps as int64, eight times the bytes. In a worker, MapSage's
`PackSegInputs` leaves them uint8; `narrow_labels` narrows labels that another transform packed.
`widen_labels` makes them int64 again. MapSage's preprocessor does that on a card. In other runs the
rank does it when it receives the batch, so that hooks see the labels that they see under MMEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample


class ByteLabels(PixelData):
    """A label map whose ``data`` is uint8 (1, H, W) until the preprocessor makes it int64 again."""


def narrow_labels(sample: Any) -> Any:
    """Turn the int64 label map of a packed sample into :class:`ByteLabels`; return the sample.

    A sample without a label map, and one with labels outside 0 to 255, is returned unchanged.
    """
    data_sample: Any = sample.get('data_samples') if isinstance(sample, dict) else None
    labels: Any = data_sample.get('gt_sem_seg') if isinstance(data_sample, SegDataSample) else None
    # A subclass, or another field beside the labels, would be lost.
    if type(labels) is not PixelData or labels.keys() != ['data'] or labels.metainfo_keys():
        return sample
    data = labels.data
    if (
        isinstance(data, torch.Tensor)
        and data.dtype == torch.int64
        and data.numel()
        and data.min() >= 0
        and data.max() <= 255
    ):
        data_sample.gt_sem_seg = ByteLabels(data=data.to(torch.uint8))
    return sample


def widen_labels(data_sample: Any) -> Any:
    """Make the label map of a data sample int64 again, on its device; return the sample."""
    labels = data_sample.get('gt_sem_seg')
    if isinstance(labels, ByteLabels):
        data_sample.gt_sem_seg = PixelData(data=labels.data.long())
    return data_sample


def widen_batch(batch: Any) -> None:
    """Make the label maps of a collated batch int64 again."""
    samples = batch.get('data_samples') if isinstance(batch, dict) else None
    for sample in samples if isinstance(samples, list) else ():
        if isinstance(sample, SegDataSample):
            widen_labels(sample)
