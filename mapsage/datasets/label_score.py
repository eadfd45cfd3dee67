"""Score of a tile that is computed from its labels only.

Such a score needs no model, so it is computed in the loader's worker that loads the tile. The hook
that selects tiles by it is in `mapsage/sampling/hooks/`.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Sequence

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.registry import TASK_UTILS, TRANSFORMS

METRICS = ('class_entropy', 'rare_classes', 'valid_pixels')


@TASK_UTILS.register_module()
@TRANSFORMS.register_module()
class LabelScore(BaseTransform):
    """Score of a tile, computed from its label map without a forward pass of the model.

    Two uses: as ``score`` of :class:`DynamicSamplingHook` it runs at the end of the pipeline, in
    the loader's workers. As the last transform of a pipeline it writes the score into the data
    sample's metainfo, under ``label_score``.

    Args:
        metric: Name of the score. ``'class_entropy'`` is the entropy of the classes' shares in
            nats: 0 for one class, 0.69 for two of equal size, ``ln C`` for C of equal size.
            ``'rare_classes'`` is the share of the labeled pixels that belong to ``classes``.
            ``'valid_pixels'`` is the share of all pixels that are labeled.
        classes: Class indices, required for ``'rare_classes'`` only.
        ignore_index: Label of pixels without a class.

    Raises:
        ValueError: If ``metric`` is unknown, or ``classes`` is missing or superfluous for it.
    """

    def __init__(
        self,
        metric: str = 'class_entropy',
        classes: Optional[Sequence[int]] = None,
        ignore_index: int = 255,
    ) -> None:
        if metric not in METRICS:
            raise ValueError(f'metric={metric!r}, expected one of {", ".join(METRICS)}.')
        if (metric == 'rare_classes') != bool(classes):
            raise ValueError(
                f'metric={metric!r} with classes={classes}: rare_classes needs class '
                f'indices, for example classes=[1, 3]; the other metrics take none.'
            )
        self.metric, self.classes, self.ignore_index = metric, list(classes or ()), ignore_index

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the score to the metainfo of a packed sample, and return the sample."""
        results['data_samples'].set_metainfo(dict(label_score=self.score(results)))
        return results

    def score(self, sample: Dict[str, Any]) -> float:
        """Return the score of a packed sample, which is 0 if no pixel is labeled.

        Raises:
            ValueError: If the sample has no label map.
        """
        labels = label_map(sample)
        if labels is None:
            raise ValueError(
                'LabelScore: a sample has no gt_sem_seg of one channel. Load labels '
                'in the training pipeline, and pack them (PackSegInputs).'
            )
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
        classes = f', classes={self.classes}' if self.classes else ''
        return f'LabelScore(metric={self.metric!r}{classes})'


def label_map(sample: object) -> Optional[np.ndarray]:
    """Return the label map of a packed sample, integers (height, width).

    Returns None if the sample has no label map, or one with several channels.
    """
    # A user's dataset may return samples of any type.
    data_sample = sample.get('data_samples') if isinstance(sample, dict) else None
    truth = getattr(data_sample, 'gt_sem_seg', None)
    if truth is None:
        return None
    labels = truth.data
    labels = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    plane = labels.shape[-2:]
    return labels.reshape(plane) if labels.size == np.prod(plane) else None
