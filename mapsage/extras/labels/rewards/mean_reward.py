"""The metric `MeanReward`: rewards of the predicted label maps in a validation.

Training with group rewards samples label maps; this metric rewards the most likely labels, which
are what a user gets. The reward functions are in `rewards.py`.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Sequence

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from .rewards import build_rewards, reward_names, reward_of


@METRICS.register_module()
class MeanReward(BaseMetric):
    """Mean of every reward over the images, for the most likely labels.

    Label maps sampled in training may gain a reward that the most likely labels do not gain, so
    watch this metric. Keys are the names of the rewards; a name that occurs twice gets its number
    in the list. Values are in percent. As in training, an image with a reward that is not finite is
    left out of that reward's mean.

    Args:
        rewards: Reward functions as in ``GroupRewardTuning``: configs of TASK_UTILS or callables.
        ignore_index: Label of the truth that does not count.
        **kwargs: ``prefix`` and ``collect_device`` of MMEngine's ``BaseMetric``.

    Raises:
        ValueError: If there is no reward, a reward is not callable, or it returns no number.
    """

    def __init__(self, rewards: Sequence[Any], ignore_index: int = 255, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self._rewards = build_rewards(rewards)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Reward a batch of dicts with ``(1, H, W)`` labels in pred_sem_seg and gt_sem_seg."""
        for sample in data_samples:
            truth = sample['gt_sem_seg']['data'].cpu().numpy().squeeze(0).astype(np.int64)
            predicted = sample['pred_sem_seg']['data'].cpu().numpy().squeeze(0).astype(np.int64)
            predicted = np.where(truth == self.ignore_index, self.ignore_index, predicted)
            self.results.append([reward_of(reward, predicted, truth) for reward in self._rewards])

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the mean of every reward in percent; NaN if it is not finite for any image."""
        means: Dict[str, float] = {}
        for name, values in zip(reward_names(self._rewards), np.asarray(results, np.float64).T):
            finite = values[np.isfinite(values)]
            means[name] = round(100 * float(finite.mean()), 2) if len(finite) else math.nan
            if len(finite) < len(values):
                print_log(
                    f'the reward {name} is not finite for {len(values) - len(finite)} of '
                    f'{len(values)} images, which are left out of its mean',
                    logger='current',
                    level=logging.WARNING,
                )
        return means
