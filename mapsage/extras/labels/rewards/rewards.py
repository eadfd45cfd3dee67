"""Rewards that pixel counts cannot express: components found, number of polygons, unbroken lines.

A reward function takes a predicted label map and the truth, both int64 ``(H, W)`` with
``ignore_index`` where the truth has no label, and returns one number; larger is better. It must be
deterministic. Register new reward functions in TASK_UTILS, see ``GroupRewardTuning``.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import cv2
import numpy as np
from mmengine.registry import TASK_UTILS

_WITH_CORNERS = np.ones((3, 3), np.uint8)


def build_rewards(functions: Sequence[Any]) -> List[Callable[[np.ndarray, np.ndarray], Any]]:
    """Return reward functions from configs of TASK_UTILS or callables.

    Raises:
        ValueError: If the list is empty, or an element is neither a config nor callable.
    """
    rewards = [
        TASK_UTILS.build(function) if isinstance(function, dict) else function
        for function in functions
    ]
    for reward in rewards:
        if not callable(reward):
            raise ValueError(
                f'rewards has {reward!r}, expected a config such as '
                f"dict(type='ComponentsFound') or a callable."
            )
    if not rewards:
        raise ValueError(f'rewards={functions!r}, expected one or more reward functions')
    return rewards


def reward_of(
    function: Callable[[np.ndarray, np.ndarray], Any], predicted: np.ndarray, truth: np.ndarray
) -> float:
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
        raise ValueError(
            f'the reward {reward_name(function)} returned {repr(value)[:80]}, expected'
            f' one number for a label map of shape {predicted.shape}.'
        ) from error


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name of a reward function, for messages and metric keys."""
    return str(getattr(function, '__name__', type(function).__name__))


def reward_names(functions: Sequence[Callable[..., Any]]) -> List[str]:
    """Return the names of reward functions; repeated names get their number in the list."""
    names = [reward_name(function) for function in functions]
    return [
        name if names.count(name) == 1 else f'{name}_{number}'
        for number, name in enumerate(names, 1)
    ]


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
        present = [
            int(label)
            for label in np.unique(truth)
            if label != self.ignore_index and (self.classes is None or label in self.classes)
        ]
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
            raise ValueError(
                f'min_iou={min_iou}, expected 0.5 or more, below 1: with less, a '
                'piece has several matches'
            )
        self.min_iou, self.min_pixels = min_iou, min_pixels

    def _score_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        predicted_numbers, predicted_sizes = self._label_components(predicted)
        true_numbers, true_sizes = self._label_components(truth)
        counted = np.count_nonzero(predicted_sizes) + np.count_nonzero(true_sizes)
        if not counted:
            return 1.0
        both = predicted & truth
        pairs, intersection = np.unique(
            true_numbers[both].astype(np.int64) * len(predicted_sizes) + predicted_numbers[both],
            return_counts=True,
        )
        sizes_of_true = true_sizes[pairs // len(predicted_sizes)]
        sizes_of_predicted = predicted_sizes[pairs % len(predicted_sizes)]
        union = sizes_of_true + sizes_of_predicted - intersection
        matches = (
            (intersection > self.min_iou * union) & (sizes_of_true > 0) & (sizes_of_predicted > 0)
        )
        return 2 * int(matches.sum()) / counted

    def _label_components(self, mask: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the component number of every pixel, ``(H, W)``, and the components' sizes.

        The size is 0 for the background (number 0) and for components that are too small to count.
        """
        _, numbers, statistics, _ = cv2.connectedComponentsWithStats(
            mask.astype(np.uint8), connectivity=4
        )
        sizes = statistics[:, cv2.CC_STAT_AREA].astype(np.int64)
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
            return int(cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)[0]) - 1
        # The padding joins everything outside of the class into one component, which is no hole;
        # the function counts the pixels of the class as one more.
        background = np.pad(~mask, 1, constant_values=True).astype(np.uint8)
        return int(cv2.connectedComponents(background, connectivity=8)[0]) - 2


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
        count, roads, boxes, _ = cv2.connectedComponentsWithStats(
            truth.astype(np.uint8), connectivity=8
        )
        covered = 0
        for number in range(1, count):
            # A piece on the road lies in the road's box, enlarged by the tolerance.
            left, top, width, height, length = boxes[number]
            box = (
                slice(max(0, top - self.tolerance), top + height + self.tolerance),
                slice(max(0, left - self.tolerance), left + width + self.tolerance),
            )
            road = (roads[box] == number).astype(np.uint8)
            near = (
                cv2.dilate(road, _WITH_CORNERS, iterations=self.tolerance)
                if self.tolerance
                else road
            )
            _, _, pieces, _ = cv2.connectedComponentsWithStats(
                near & predicted[box], connectivity=8
            )
            longest = pieces[1:, cv2.CC_STAT_AREA].max(initial=0)
            covered += min(int(longest), int(length))
        # A piece predicted between two close roads may count for both.
        return min(1.0, float(2 * covered / (truth.sum() + predicted.sum())))
