"""Rewards that pixel counts cannot express: components found, number of polygons, unbroken lines.

A reward function takes a predicted label map and the truth, both int64 ``(H, W)`` with
``ignore_index`` where the truth has no label, and returns one number; larger is better. It must be
deterministic. Register new reward functions in TASK_UTILS, see ``GroupRewardTuning``.
"""
from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
from mmengine.registry import TASK_UTILS
from scipy import ndimage

_WITH_CORNERS = np.ones((3, 3), int)


def build_rewards(functions: Sequence[Any]) -> List[Callable[[np.ndarray, np.ndarray], Any]]:
    """Return reward functions from configs of TASK_UTILS or callables.

    Raises:
        ValueError: If the list is empty, or an element is neither a config nor callable.
    """
    rewards = [TASK_UTILS.build(function) if isinstance(function, dict) else function
               for function in functions]
    for reward in rewards:
        if not callable(reward):
            raise ValueError(f'rewards has {reward!r}, expected a config such as '
                             f"dict(type='ComponentsFound') or a callable.")
    if not rewards:
        raise ValueError(f'rewards={functions!r}, expected one or more reward functions')
    return rewards


def reward_of(function: Callable[[np.ndarray, np.ndarray], Any], predicted: np.ndarray,
              truth: np.ndarray) -> float:
    """Return the reward of a label map.

    The function gets copies, so it may write into its arguments.

    Args:
        function: Reward function.
        predicted: Label map, int64 ``(H, W)``.
        truth: True labels, int64 ``(H, W)``.

    Raises:
        ValueError: If the function does not return a number.
    """
    value = function(predicted.copy(), truth.copy())
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError('text')
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f'the reward {reward_name(function)} returned {repr(value)[:80]}, expected'
                         f' one number for a label map of shape {predicted.shape}.') from error


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name of a reward function, for messages and metric keys."""
    return str(getattr(function, '__name__', type(function).__name__))


class _ClassReward:
    """Mean of a reward by class over the classes in the truth; 1 without such a class.

    Args:
        classes: Classes that count; None for all.
        ignore_index: Label of pixels without a class.
    """

    def __init__(self, classes: Optional[Sequence[int]] = None, ignore_index: int = 255) -> None:
        self.classes = None if classes is None else list(classes)
        self.ignore_index = ignore_index

    def __call__(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        """Return the reward of a label map, 0 to 1.

        Args:
            predicted: Labels, integers ``(H, W)``.
            truth: Labels, integers ``(H, W)``.
        """
        present = [int(label) for label in np.unique(truth) if label != self.ignore_index
                   and (self.classes is None or label in self.classes)]
        values = [self._score_class(predicted == label, truth == label) for label in present]
        return float(np.mean(values)) if values else 1.0

    def _score_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        """Return the reward of a class from its masks, bool ``(H, W)``; truth is not empty."""
        raise NotImplementedError


@TASK_UTILS.register_module()
class ComponentsFound(_ClassReward):
    """F1 score of connected components by class: 2 TP / (2 TP + FP + FN).

    A predicted and a true component match if their IoU is above ``min_iou``. From 0.5 on, no
    component can have two matches, and the score is the recognition quality of the panoptic score
    (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868). Pixels connect by edges.

    Args:
        min_iou: IoU of a match, 0.5 to 1.
        min_pixels: Smaller components do not count.
        **kwargs: ``classes``, ``ignore_index``.

    Raises:
        ValueError: If ``min_iou`` is out of range.
    """

    def __init__(self, min_iou: float = 0.5, min_pixels: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0.5 <= min_iou < 1:
            raise ValueError(f'min_iou={min_iou}, expected 0.5 or more, below 1: with less, a '
                             'piece has several matches')
        self.min_iou, self.min_pixels = min_iou, min_pixels

    def _score_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        predicted_numbers, predicted_sizes = self._label_components(predicted)
        true_numbers, true_sizes = self._label_components(truth)
        if not predicted_sizes.any() and not true_sizes.any():
            return 1.0
        overlaps = np.zeros((len(true_sizes), len(predicted_sizes)))
        np.add.at(overlaps, (true_numbers.ravel(), predicted_numbers.ravel()), 1)
        intersection = overlaps[1:, 1:]
        union = true_sizes[1:, None] + predicted_sizes[None, 1:] - intersection
        counted = (true_sizes[1:, None] > 0) & (predicted_sizes[None, 1:] > 0)
        matches = int(((intersection > self.min_iou * union) & counted).sum())
        return 2 * matches / (np.count_nonzero(predicted_sizes) + np.count_nonzero(true_sizes))

    def _label_components(self, mask: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the component number of every pixel, ``(H, W)``, and the components' sizes.

        The size is 0 for the background (number 0) and for components that are too small to count.
        """
        numbers, count = ndimage.label(mask)
        sizes = np.bincount(numbers.ravel(), minlength=count + 1)
        sizes[sizes < self.min_pixels] = 0
        sizes[0] = 0
        return numbers, sizes


@TASK_UTILS.register_module()
class PolygonCount(_ClassReward):
    """1 - |n - t| / max(n, t), with n predicted and t true polygons.

    It notices fragments and merged polygons, which hardly change an IoU, and nothing else: any map
    with the right number of polygons is perfect. Add it to another reward with a small weight.

    Args:
        holes: Whether to count holes instead of polygons: areas of other labels inside a class.
            (Pixels of polygons connect by edges; pixels of holes also by corners.)
        **kwargs: ``classes``, ``ignore_index``.
    """

    def __init__(self, holes: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holes = holes

    def _score_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        count, expected = self._count(predicted), self._count(truth)
        return 1 - abs(count - expected) / max(count, expected, 1)

    def _count(self, mask: np.ndarray) -> int:
        if not self.holes:
            return int(ndimage.label(mask)[1])
        # The padding joins everything outside of the class into one component, which is no hole.
        background = np.pad(~mask, 1, constant_values=True)
        return int(ndimage.label(background, _WITH_CORNERS)[1]) - 1


@TASK_UTILS.register_module()
class UnbrokenLength(_ClassReward):
    """Dice score of roads that counts only the longest unbroken piece of a road: 2 L / (T + P).

    L is the sum over the true roads of the largest connected predicted piece on the road, in
    pixels; T and P are the true and predicted pixels. One missing pixel across a road halves its
    share of L, and hardly changes an IoU; predicting wider roads gains nothing. Pixels stand for
    length, which is exact if all roads have the same width. Pixels of roads also connect by
    corners. Use it for classes such as roads, rivers, and hedges.

    Args:
        tolerance: Distance in pixels at which a predicted pixel still lies on the road.
        **kwargs: ``classes``, ``ignore_index``.
    """

    def __init__(self, tolerance: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tolerance = tolerance

    def _score_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        roads, count = ndimage.label(truth, _WITH_CORNERS)
        covered = 0
        for number in range(1, count + 1):
            road = roads == number
            near = ndimage.binary_dilation(road, _WITH_CORNERS, self.tolerance) \
                if self.tolerance else road
            pieces, _ = ndimage.label(predicted & near, _WITH_CORNERS)
            longest = np.bincount(pieces[near], minlength=2)[1:].max()
            covered += min(int(longest), int(road.sum()))
        # A piece predicted between two close roads may count for both.
        return min(1.0, float(2 * covered / (truth.sum() + predicted.sum())))
