"""The rewards of predicted label maps as figures of a validation."""
from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Sequence

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from .rewards import build_rewards, reward_name, reward_of


@METRICS.register_module()
class MeanReward(BaseMetric):
    """Mean of each reward over the images, of the label maps that users get.

    A reward that label maps drawn for training gain need not be gained by the most likely labels:
    look at this one. The keys are the names of the rewards, with their numbers in the list where
    a name is there twice; figures are in percent. As in training, an image whose reward is not
    finite is left out of its mean.

    Args:
        rewards: Reward functions, as of ``GroupRewardTuning``: configs of TASK_UTILS or callables.
        ignore_index: Label of the truth that does not count.
        **kwargs: ``prefix`` and ``collect_device`` of MMEngine's ``BaseMetric``.

    Raises:
        ValueError: If there is no reward, or one is no function or returns no number.
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
            self.results.append([reward_of(each, predicted, truth) for each in self._rewards])

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the mean of each reward, in percent; NaN where it is finite for no image."""
        names = [reward_name(each) for each in self._rewards]
        figures: Dict[str, float] = {}
        for at, (name, values) in enumerate(zip(names, np.asarray(results, np.float64).T)):
            finite = values[np.isfinite(values)]
            key = name if names.count(name) == 1 else f'{name}_{at + 1}'
            figures[key] = round(100 * float(finite.mean()), 2) if len(finite) else math.nan
            if len(finite) < len(values):
                print_log(f'the reward {name} is not finite for {len(values) - len(finite)} of '
                          f'{len(values)} images, which are left out of its mean',
                          logger='current', level=logging.WARNING)
        return figures
