"""The sum of users' reward functions, with errors that name the function."""
from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import numpy as np
from mmengine.logging import print_log
from mmengine.registry import TASK_UTILS

_SIDE = 24  # pixels of the maps by which ranks compare their rewards


class Rewards:
    """A weighted sum of reward functions of single label maps.

    Args:
        functions: Configs of TASK_UTILS, or callables.
        weights: Weight of each; 1 for all when None.

    Raises:
        ValueError: If there is no function, a different number of weights, or one is no function.
    """

    def __init__(self, functions: Sequence[Any], weights: Optional[Sequence[float]] = None
                 ) -> None:
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        if not functions or len(self._weights) != len(functions):
            raise ValueError(f'{len(functions)} reward function(s) and {len(self._weights)} '
                             f'weight(s), expected one weight for each of one or more.')
        self._functions: List[Callable[[np.ndarray, np.ndarray], Any]] = [
            TASK_UTILS.build(each) if isinstance(each, dict) else each for each in functions]
        for each in self._functions:
            if not callable(each):
                raise ValueError(f'rewards has {each!r}, expected a config such as '
                                 f"dict(type='ComponentsFound') or a callable.")
        self._warned = set()  # type: ignore[var-annotated]

    def __call__(self, predicted: np.ndarray, truth: np.ndarray, tile: str) -> float:
        """Return the sum for a label map; NaN, with a warning at the first, if a reward is.

        Args:
            predicted: Label map, int64 ``(H, W)``.
            truth: True labels, int64 ``(H, W)``.
            tile: Name of the tile, for messages.

        Raises:
            ValueError: If a function returns no number.
        """
        total = 0.0
        for function, weight in zip(self._functions, self._weights):
            value = _number(function, predicted, truth)
            if not np.isfinite(value) and _name(function) not in self._warned:
                self._warned.add(_name(function))
                print_log(f'[GroupRewards] the reward {_name(function)} is {value} for {tile}: the '
                          f'tile is left out and counted as not_finite, and so is each further one '
                          f'without a word.', logger='current', level=30)
            total += weight * value if np.isfinite(value) else np.nan
        return total

    def describe(self) -> str:
        """Return names, weights, and the rewards of two label maps, as a text.

        Raises:
            ValueError: If a function returns no number.
        """
        rows, columns = np.indices((_SIDE, _SIDE))
        truth = (rows // 9 + columns // 7) % 3
        maps = [truth, np.where((rows * 5 + columns * 3) % 11 == 0, (truth + 1) % 3, truth)]
        return ', '.join(
            f'{weight:g} {_name(function)} '
            f'{[_number(function, each.copy(), truth.copy()) for each in maps]}'
            for function, weight in zip(self._functions, self._weights))


def _number(function: Callable[[np.ndarray, np.ndarray], Any], predicted: np.ndarray,
            truth: np.ndarray) -> float:
    found = function(predicted, truth)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = repr(found)
        raise ValueError(f'the reward {_name(function)} returned {shown[:80]}, expected one number '
                         f'for a label map of shape {predicted.shape}.') from error


def _name(function: Any) -> str:
    return str(getattr(function, '__name__', type(function).__name__))
