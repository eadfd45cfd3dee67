"""A score of a tile that depends on its labels alone and is computed where the tile is loaded."""
from __future__ import annotations

import math
from typing import Any, Dict, Optional, Sequence

import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.registry import TASK_UTILS, TRANSFORMS

METRICS = ('class_entropy', 'rare_classes', 'valid_pixels')


@TASK_UTILS.register_module()
@TRANSFORMS.register_module()
class LabelScore(BaseTransform):
    """Score of a tile, computed from its label map without a forward pass of the model.

    As ``score`` of :class:`DynamicSamplingHook` it runs at the end of the pipeline, in the loader's
    workers. As the last transform of a pipeline it writes its score into the data sample's
    metainfo, as ``label_score``.

    Args:
        metric: Name of the score. ``'class_entropy'`` is the entropy of the classes' shares in
            nats: 0 for one class, 0.69 for two of equal size, ``ln C`` for C of equal size.
            ``'rare_classes'`` is the share of the labeled pixels that belong to ``classes``.
            ``'valid_pixels'`` is the share of all pixels that are labeled.
        classes: Class indices, required for ``'rare_classes'`` only.
        ignore_index: Label of pixels without a class.

    Raises:
        ValueError: If ``metric`` is none of these, or ``classes`` does not suit it.
    """

    def __init__(self, metric: str = 'class_entropy', classes: Optional[Sequence[int]] = None,
                 ignore_index: int = 255) -> None:
        if metric not in METRICS:
            raise ValueError(f'metric={metric!r}, expected one of {", ".join(METRICS)}.')
        if (metric == 'rare_classes') != bool(classes):
            raise ValueError(f'metric={metric!r} with classes={classes}: rare_classes needs class '
                             f'indices, for example classes=[1, 3], and nothing else takes them.')
        self.metric, self.classes, self.ignore_index = metric, list(classes or ()), ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the score to the metainfo of a packed sample, and return the sample."""
        results['data_samples'].set_metainfo(dict(label_score=self.score(results)))
        return results

    def score(self, sample: Dict[str, Any]) -> float:
        """Return the score of a packed sample; 0 for one without a labeled pixel.

        Raises:
            ValueError: If the sample has no label map.
        """
        labels = label_map(sample)
        if labels is None:
            raise ValueError('LabelScore: a sample has no gt_sem_seg of one channel. Load labels '
                             'in the training pipeline, and pack them (PackSegInputs).')
        known = labels[labels != self.ignore_index]
        if not known.size:
            return 0.0
        if self.metric == 'valid_pixels':
            return known.size / labels.size
        counts = np.bincount(known.ravel())
        if self.metric == 'rare_classes':
            return float(sum(counts[c] for c in self.classes if c < len(counts))) / known.size
        shares = counts[counts > 0] / known.size
        # Adding 0.0 turns the -0.0 of a single class into 0.0.
        return min(math.log(len(counts)), float(-(shares * np.log(shares)).sum())) + 0.0

    def __repr__(self) -> str:
        which = f', classes={self.classes}' if self.classes else ''
        return f'LabelScore(metric={self.metric!r}{which})'


def label_map(sample: Any) -> Optional[np.ndarray]:
    """Return the label map of a packed sample, integers (height, width), or None without one."""
    truth = getattr(sample.get('data_samples') if isinstance(sample, dict) else None,
                    'gt_sem_seg', None)
    if truth is None:
        return None
    labels = truth.data
    labels = labels.cpu().numpy() if hasattr(labels, 'cpu') else np.asarray(labels)
    plane = labels.shape[-2:]
    return labels.reshape(plane) if labels.size == np.prod(plane) else None
