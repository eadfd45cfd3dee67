"""The metric `SingleClassBaseline`: mIoU of a model that predicts one class everywhere.

It is the baseline that a trained model has to exceed, and depends only on the labels.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Union

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class SingleClassBaseline(BaseMetric):
    """Metric that reports the mIoU of always predicting the most frequent class, in percent.

    Use it together with ``IoUMetric``, which also reports percent: ``val_evaluator =
    [dict(type='IoUMetric'), dict(type='SingleClassBaseline')]``.
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Count the labels of every sample; labels outside the classes are ignored."""
        num_classes = len(self.dataset_meta['classes'])  # type: ignore[index]
        for sample in data_samples:
            labels = sample['gt_sem_seg']['data'].reshape(-1).cpu()
            labels = labels[(labels >= 0) & (labels < num_classes)].long()
            self.results.append(torch.bincount(labels, minlength=num_classes).numpy())

    def score_names(self) -> List[str]:
        """Return the keys of the scores, without the prefix."""
        return ['single_class_mIoU']

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return ``single_class_mIoU`` over all samples, in percent."""
        return {'single_class_mIoU': round(100 * single_class_miou(sum(results)), 2)}


def single_class_miou(class_pixel_counts: Union[np.ndarray, Sequence[int]]) -> float:
    """Return the mIoU (0..1) of always predicting the most frequent class.

    The most frequent class has intersection n_max and union N; all other classes that occur have
    intersection 0. Classes that do not occur have no union and are left out, as in MMSeg's
    ``IoUMetric``.

    Args:
        class_pixel_counts: Labeled pixels by class, ``(num_classes,)``.

    Raises:
        ValueError: If no pixel is labeled.
    """
    counts = np.asarray(class_pixel_counts, np.float64)
    if counts.sum() <= 0:
        raise ValueError(
            f'class_pixel_counts={counts.tolist()} holds no labeled pixel; '
            'check the folder of masks and reduce_zero_label'
        )
    return float(counts.max() / counts.sum() / np.count_nonzero(counts))
