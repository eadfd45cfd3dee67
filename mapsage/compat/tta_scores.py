"""Merge the predictions of test-time augmentation with correct scores.

Gap, in ``SegTTAModel.merge_preds`` of mmseg 1.2.2 and onedl-mmsegmentation:
- ``seg_logits`` of a binary model are probabilities already, and it applies a sigmoid again. The
  result is 0.5 or more, above the default threshold of 0.3, so every pixel becomes foreground.
- It applies a softmax to all other models, which flattens the scores of mask queries: with seven
  classes, a score of 0.9 becomes 0.3.
- The merged sample has the ``seg_logits`` of the last view only.
Remove when: the host does none of this, or averages the results of ``predict``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

import torch
from mmengine.model import BaseTTAModel
from mmengine.structures import PixelData

if TYPE_CHECKING:
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead
    from mmseg.structures import SegDataSample


def _merge(self: BaseTTAModel, data_samples_list: List[List[SegDataSample]]) -> List[SegDataSample]:
    """Return the mean of the views' class probabilities, for each image.

    Args:
        self: ``SegTTAModel``.
        data_samples_list: Data samples of the views of each image; the first view is the image as
            in its file.

    Returns:
        The first view of each image. ``seg_logits`` are the logarithms of the mean probabilities,
        (C, H, W). For a binary model, (1, H, W), and for a decode head that returns scores, they
        are the mean itself, as without views. ``pred_sem_seg`` is computed from them.
    """
    merged = []
    head: Optional[BaseDecodeHead] = getattr(self.module, 'decode_head', None)
    binary = self.module.out_channels == 1
    are_scores = binary or getattr(head, 'gives_scores', False)
    for views in data_samples_list:
        views_logits: List[torch.Tensor] = [view.seg_logits.data for view in views]
        probabilities = (
            views_logits if are_scores else [logits.softmax(dim=0) for logits in views_logits]
        )
        mean: torch.Tensor = sum(probabilities) / len(views)  # type: ignore[assignment]
        if binary:
            labels = (mean > self.module.decode_head.threshold).to(mean)
        else:
            labels = mean.argmax(dim=0, keepdim=True)
        logits = mean if are_scores else mean.clamp(min=torch.finfo(mean.dtype).tiny).log()
        views[0].set_data(
            dict(seg_logits=PixelData(data=logits), pred_sem_seg=PixelData(data=labels))
        )
        merged.append(views[0])
    return merged


def apply() -> None:
    """Replace the method."""
    from mmseg.models import SegTTAModel

    SegTTAModel.merge_preds = _merge
