"""Merge the predictions of test-time augmentation into one that says how sure it is.

Gap: ``SegTTAModel.merge_preds`` of mmseg 1.2.2 and onedl-mmsegmentation takes ``seg_logits`` of a
binary model, which are probabilities already, through a sigmoid once more. That gives 0.5 or more
everywhere, above the default threshold of 0.3, so that every pixel becomes foreground. It takes the
softmax of all others, which flattens the scores of mask queries: a class with 0.9 of the score
comes out as 0.3 of seven. The merged sample keeps the ``seg_logits`` of the last view alone.
Remove when: the host does none of it, or averages what ``predict`` made.
"""
from __future__ import annotations

from typing import Any, List

import torch
from mmengine.structures import PixelData


def _merge(self: Any, data_samples_list: List[List[Any]]) -> List[Any]:
    """Return the mean of the views' class probabilities, for each image.

    Args:
        self: ``SegTTAModel``.
        data_samples_list: Data samples of the views of each image, the first as in the file.

    Returns:
        The first view of each image. ``seg_logits`` are the logarithms of the mean probabilities
        (C, H, W); of a binary model (1, H, W), and of a decode head that gives scores, the mean
        itself, as without views. ``pred_sem_seg`` is made of them.
    """
    merged = []
    head: Any = getattr(self.module, 'decode_head', None)
    binary = self.module.out_channels == 1
    as_they_are = binary or getattr(head, 'gives_scores', False)
    for views in data_samples_list:
        scores: Any = [view.seg_logits.data for view in views]
        mean = sum(scores if as_they_are else [each.softmax(dim=0) for each in scores]) / len(views)
        if binary:
            labels = (mean > head.threshold).to(mean)
        else:
            labels = mean.argmax(dim=0, keepdim=True)
        logits = mean if as_they_are else mean.clamp(min=torch.finfo(mean.dtype).tiny).log()
        views[0].set_data(dict(seg_logits=PixelData(data=logits),
                               pred_sem_seg=PixelData(data=labels)))
        merged.append(views[0])
    return merged


def apply() -> None:
    """Replace the method."""
    from mmseg.models import SegTTAModel
    SegTTAModel.merge_preds = _merge
