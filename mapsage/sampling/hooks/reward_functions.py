"""The sum of users' reward functions, with errors that name the function.

Ranks must not use different rewards, but functions cannot be compared. So every rank describes its
rewards by their values on two fixed label maps, and the ranks compare the descriptions.
"""
from __future__ import annotations

from typing import Any, Optional, Sequence, Set

import numpy as np
from mmengine.logging import print_log

from mapsage.evaluation.rewards import build_rewards, reward_name, reward_of

# Side in pixels of the label maps by which ranks compare their rewards.
_SIDE = 24


class Rewards:
    """A weighted sum of reward functions of single label maps.

    Args:
        functions: Configs of TASK_UTILS, or callables.
        weights: Weight of each function; 1 for all when None.

    Raises:
        ValueError: If there is no function, an element is not a function, or a weight is missing or
            not finite.
    """

    def __init__(self, functions: Sequence[Any], weights: Optional[Sequence[float]] = None
                 ) -> None:
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self._weights) != len(functions) or not np.isfinite(self._weights).all():
            raise ValueError(f'{len(functions)} reward function(s) and the weights '
                             f'{self._weights}, expected a number for each.')
        self._functions = build_rewards(functions)
        self._warned: Set[str] = set()

    def __call__(self, predicted: np.ndarray, truth: np.ndarray, tile: str) -> float:
        """Return the sum for a label map.

        If a reward is not finite, the sum is NaN, and the function's first such reward is logged.

        Args:
            predicted: Label map, int64 ``(H, W)``.
            truth: True labels, int64 ``(H, W)``.
            tile: Name of the tile, for messages.

        Raises:
            ValueError: If a function does not return a number.
        """
        total = 0.0
        for function, weight in zip(self._functions, self._weights):
            value = reward_of(function, predicted, truth)
            if not np.isfinite(value) and reward_name(function) not in self._warned:
                self._warned.add(reward_name(function))
                print_log(f'[GroupRewards] the reward {reward_name(function)} is {value} for '
                          f'{tile}: the tile is left out and counted as not_finite. Further such '
                          f'tiles are treated alike, without a message.', logger='current',
                          level=30)
            total += weight * value if np.isfinite(value) else np.nan
        return total

    def describe(self) -> str:
        """Return names, weights, and the rewards of two label maps, as a text.

        Raises:
            ValueError: If a function does not return a number.
        """
        rows, columns = np.indices((_SIDE, _SIDE))
        truth = (rows // 9 + columns // 7) % 3
        maps = [truth, np.where((rows * 5 + columns * 3) % 11 == 0, (truth + 1) % 3, truth)]
        return ', '.join(
            f'{weight:g} {reward_name(function)} '
            f'{[reward_of(function, label_map, truth) for label_map in maps]}'
            for function, weight in zip(self._functions, self._weights))
