"""The rewards of predicted label maps as figures of a validation."""
from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS, TASK_UTILS


@METRICS.register_module()
class MeanReward(BaseMetric):
    """Mean of each reward over the images, of the label maps that users get.

    A reward that label maps drawn for training gain need not be gained by the most likely labels:
    look at this one. The keys are the names of the rewards; figures are in percent.

    Args:
        rewards: Reward functions, as of ``GroupRewardTuning``: configs of TASK_UTILS or callables.
        ignore_index: Label of the truth that does not count.
        **kwargs: ``prefix`` and ``collect_device`` of MMEngine's ``BaseMetric``.

    Raises:
        ValueError: If there is no reward.
    """

    def __init__(self, rewards: Sequence[Any], ignore_index: int = 255, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not rewards:
            raise ValueError(f'rewards={rewards!r}, expected one or more reward functions')
        self.ignore_index = ignore_index
        self._rewards = [TASK_UTILS.build(each) if isinstance(each, dict) else each
                         for each in rewards]

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Reward a batch of dicts with ``(1, H, W)`` labels in pred_sem_seg and gt_sem_seg."""
        for sample in data_samples:
            truth = sample['gt_sem_seg']['data'].cpu().numpy().squeeze(0).astype(np.int64)
            predicted = sample['pred_sem_seg']['data'].cpu().numpy().squeeze(0).astype(np.int64)
            predicted = np.where(truth == self.ignore_index, self.ignore_index, predicted)
            self.results.append([float(each(predicted, truth)) for each in self._rewards])

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the mean of each reward, in percent."""
        means = 100 * np.mean(results, axis=0)
        return {str(getattr(each, '__name__', type(each).__name__)): round(float(mean), 2)
                for each, mean in zip(self._rewards, means)}
