"""The metric `MeanReward`: rewards of the predicted label maps in a validation.

Training with group rewards samples label maps; this metric rewards the most likely labels, which
are what a user gets. The reward functions are in `rewards.py`.

:func:`reward_variance` computes the variance of a tile's IoU over label maps sampled from a model, without
sampling. Dynamic sampling uses it as a score: a tile without variance gives group rewards nothing to learn
from.

Shapes:
    probabilities  (C, P)     of the P labeled pixels
    truth          (P,)       class indices
    changes        (C, C, C)  change of the reward if one pixel of truth g goes from label a to b,
                              as [a, g, b]
"""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Sequence

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from .rewards import build_rewards, reward_names, reward_of


def reward_variance(
    probabilities: torch.Tensor, labels: torch.Tensor, ignore_index: int = 255
) -> torch.Tensor:
    """Return the variance of a tile's mean IoU if the pixels' labels are sampled independently.

    Var R = sum over pixels of Var_b D[y, g, b], where R is the mean IoU over the classes in the
    labels, and D is the change of R when one pixel of truth g goes from its most likely label y to
    a sampled label b. Sums over all pixels stay close to their expectations, so R is linear in a
    single pixel, one table D of C x C x C numbers holds for the whole tile, and the variances of
    independent pixels add up. The result needs a single forward pass; a group of sampled label maps
    would only estimate it.

    Args:
        probabilities: Probabilities of the classes, ``(C, H, W)``.
        labels: Class indices or ``ignore_index``, integers ``(H, W)``.
        ignore_index: Label of pixels that do not count.

    Returns:
        Scalar of float64 on the host; 0 without a labeled pixel.
    """
    labeled = labels != ignore_index
    probabilities = probabilities.detach().cpu().double()[:, labeled.cpu()]
    truth = labels.cpu()[labeled.cpu()].long()
    classes = len(probabilities)
    true_pixels = torch.bincount(truth, minlength=classes).double()
    if not len(truth):
        return torch.zeros((), dtype=torch.float64)
    # Expected intersection and predicted pixels by class.
    of_truth = probabilities.gather(0, truth[None])[0]
    intersection = torch.zeros(classes, dtype=torch.float64).index_add_(0, truth, of_truth)
    changes = _changes(intersection, probabilities.sum(1), true_pixels)
    # (C, P): change of the reward for every label that may be sampled.
    differences = changes[probabilities.argmax(0), truth].T
    mean = (probabilities * differences).sum(0)
    return (probabilities * (differences - mean) ** 2).sum()


def _changes(
    intersection: torch.Tensor, predicted: torch.Tensor, true_pixels: torch.Tensor
) -> torch.Tensor:
    """Return the table D[a, g, b], ``(C, C, C)``: one pixel of truth g goes from label a to b.

    Args:
        intersection, predicted, true_pixels: Expected pixels by class, ``(C,)``.
    """
    classes = len(true_pixels)
    # [label, truth]: a pixel is in the intersection if its label is its truth.
    hits = torch.eye(classes, dtype=torch.float64)

    def iou(intersection: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        union = predicted + true_pixels[:, None] - intersection
        return torch.where(
            true_pixels[:, None] > 0, intersection / union.clamp(min=1e-12), torch.zeros_like(union)
        )

    intersection, predicted = intersection[:, None], predicted[:, None]
    now = iou(intersection, predicted)
    removed = iou((intersection - hits).clamp(min=0), (predicted - 1).clamp(min=0)) - now
    added = iou(intersection + hits, predicted + 1) - now
    # [a, g, 1] + [1, g, b]
    table = removed[:, :, None] + added.T[None]
    same = torch.eye(classes, dtype=torch.bool)[:, None, :].expand_as(table)
    return table.masked_fill(same, 0) / (true_pixels > 0).sum()


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
