"""Rewards that counts of pixels cannot express: pieces found, their number, unbroken lines.

A reward is a function of a predicted label map and the truth, both int64 ``(H, W)`` with
``ignore_index`` where the truth has no label, that returns one number; larger is better. It must
give the same number whenever it is called with the same maps. Register your own in TASK_UTILS, see
``GroupRewardTuning``.
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
        ValueError: If there is none, or one is no function.
    """
    built = [TASK_UTILS.build(each) if isinstance(each, dict) else each for each in functions]
    for each in built:
        if not callable(each):
            raise ValueError(f'rewards has {each!r}, expected a config such as '
                             f"dict(type='ComponentsFound') or a callable.")
    if not built:
        raise ValueError(f'rewards={functions!r}, expected one or more reward functions')
    return built


def reward_of(function: Callable[[np.ndarray, np.ndarray], Any], predicted: np.ndarray,
              truth: np.ndarray) -> float:
    """Return what a reward function gives for a label map. It may write into its arguments.

    Args:
        function: Reward function.
        predicted: Label map, int64 ``(H, W)``.
        truth: True labels, int64 ``(H, W)``.

    Raises:
        ValueError: If that is no number.
    """
    found = function(predicted.copy(), truth.copy())
    try:
        if isinstance(found, (str, bytes)):
            raise TypeError('text')
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f'the reward {reward_name(function)} returned {repr(found)[:80]}, expected'
                         f' one number for a label map of shape {predicted.shape}.') from error


def reward_name(function: Any) -> str:
    """Return the name of a reward function, for messages and figures."""
    return str(getattr(function, '__name__', type(function).__name__))


class _ClassReward:
    """Mean of a reward of each class over the classes in the truth; 1 if there is none.

    Args:
        classes: Classes that count; all when None.
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
        present = [int(each) for each in np.unique(truth) if each != self.ignore_index
                   and (self.classes is None or each in self.classes)]
        values = [self._of_class(predicted == each, truth == each) for each in present]
        return float(np.mean(values)) if values else 1.0

    def _of_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        """Return the reward of a class with these masks, bool ``(H, W)``, truth not empty."""
        raise NotImplementedError


@TASK_UTILS.register_module()
class ComponentsFound(_ClassReward):
    """Share of connected pieces that are found: 2 TP / (2 TP + FP + FN), of each class.

    A predicted piece and a true one are a match if their IoU is above ``min_iou``. With 0.5 or
    more no piece can have two matches, and this is the recognition quality of the panoptic score
    (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868). Pieces connect by edges.

    Args:
        min_iou: IoU of a match, 0.5 to 1.
        min_pixels: Number of pixels below which a piece does not count.
        **kwargs: ``classes``, ``ignore_index``.

    Raises:
        ValueError: If ``min_iou`` is out of its range.
    """

    def __init__(self, min_iou: float = 0.5, min_pixels: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0.5 <= min_iou < 1:
            raise ValueError(f'min_iou={min_iou}, expected 0.5 or more, below 1: with less, a '
                             'piece has several matches')
        self.min_iou, self.min_pixels = min_iou, min_pixels

    def _of_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        guesses, guess_sizes = self._pieces(predicted)
        pieces, sizes = self._pieces(truth)
        if not guess_sizes.any() and not sizes.any():
            return 1.0
        pairs = np.zeros((len(sizes), len(guess_sizes)))
        np.add.at(pairs, (pieces.ravel(), guesses.ravel()), 1)
        both = pairs[1:, 1:]
        union = sizes[1:, None] + guess_sizes[None, 1:] - both
        counted = (sizes[1:, None] > 0) & (guess_sizes[None, 1:] > 0)
        matches = int(((both > self.min_iou * union) & counted).sum())
        return 2 * matches / (np.count_nonzero(guess_sizes) + np.count_nonzero(sizes))

    def _pieces(self, mask: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the pieces and their sizes, 0 for those that do not count."""
        numbers, count = ndimage.label(mask)
        sizes = np.bincount(numbers.ravel(), minlength=count + 1)
        sizes[sizes < self.min_pixels] = 0
        sizes[0] = 0
        return numbers, sizes


@TASK_UTILS.register_module()
class PolygonCount(_ClassReward):
    """1 - |n - t| / max(n, t), with the numbers n and t of polygons predicted and true.

    It sees crumbs and pieces that merged, which hardly change an IoU, and nothing else: any map
    with the right number is perfect. Add it to another reward with a small weight.

    Args:
        holes: Whether holes count in place of the polygons: areas of other labels that a class
            surrounds. (Pieces connect by edges, and holes by corners too.)
        **kwargs: ``classes``, ``ignore_index``.
    """

    def __init__(self, holes: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holes = holes

    def _of_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        found, expected = self._count(predicted), self._count(truth)
        return 1 - abs(found - expected) / max(found, expected, 1)

    def _count(self, mask: np.ndarray) -> int:
        if not self.holes:
            return int(ndimage.label(mask)[1])
        around = np.pad(~mask, 1, constant_values=True)  # of which one piece is the outside
        return int(ndimage.label(around, _WITH_CORNERS)[1]) - 1


@TASK_UTILS.register_module()
class UnbrokenLength(_ClassReward):
    """Dice of roads of which only the longest unbroken piece counts: 2 L / (T + P).

    L sums up, over the true roads, the pixels of the longest connected predicted piece that lies
    on the road; T and P are the true and predicted pixels. One missing pixel across a road halves
    what it counts, and hardly changes an IoU; predicting roads wider gains nothing. Pixels stand
    for length, which is exact where roads have one width. Roads connect by corners too. Give it the
    classes of roads, rivers, hedges.

    Args:
        tolerance: Distance in pixels at which a predicted pixel still lies on the road.
        **kwargs: ``classes``, ``ignore_index``.
    """

    def __init__(self, tolerance: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tolerance = tolerance

    def _of_class(self, predicted: np.ndarray, truth: np.ndarray) -> float:
        roads, count = ndimage.label(truth, _WITH_CORNERS)
        covered = 0
        for number in range(1, count + 1):
            road = roads == number
            near = ndimage.binary_dilation(road, _WITH_CORNERS, self.tolerance) \
                if self.tolerance else road
            pieces, _ = ndimage.label(predicted & near, _WITH_CORNERS)
            longest = np.bincount(pieces[near], minlength=2)[1:].max()
            covered += min(int(longest), int(road.sum()))
        # Roads that are near each other may share what is predicted between them.
        return min(1.0, float(2 * covered / (truth.sum() + predicted.sum())))
