"""Scores that are made of other scores: sums of rewards, and what is remembered of a tile."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from mapsage.distributed import Channel

from .candidate import Candidate
from .validity import to_float64

Scorer = Callable[[Sequence[Any]], Any]  # samples -> one number a sample, on any device


class WeightedRewards:
    """The weighted sum of reward functions: the raw reward, before any shaping.

    Each function gets the samples of a batch, whole groups one after the other, and returns one
    number a sample; they may lie on different devices. A reward that is NaN makes the sum NaN, so
    that the group is dropped and counted.

    Args:
        functions: The reward functions.
        weights: One a function; 1 for each when None.

    Raises:
        ValueError: If there is no function, or another number of weights.
    """

    def __init__(self, functions: Sequence[Scorer],
                 weights: Optional[Sequence[float]] = None) -> None:
        self._functions = list(functions)
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        if not functions or len(self._weights) != len(functions):
            raise ValueError(f'{len(functions)} reward function(s) and {len(self._weights)} '
                             f'weight(s), expected one weight for each of one or more.')

    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """Return float64 rewards of shape ``(len(samples),)`` in host memory.

        Raises:
            ValueError: If a function returns another number of rewards.
        """
        total = torch.zeros(len(samples), dtype=torch.float64)
        for function, weight in zip(self._functions, self._weights):
            rewards = to_float64(function(samples))
            if len(rewards) != len(samples):
                name = getattr(function, '__name__', type(function).__name__)
                raise ValueError(f'{name} returned {len(rewards)} rewards for {len(samples)} '
                                 f'samples, expected one a sample.')
            total += weight * rewards
        return total


class TileHistory:
    """Scores by a moving average a tile, so that tiles seen lately need no second look.

    What a rank has seen since the last :meth:`share` is its own; everything before is equal on all
    ranks. Tiles of unknown index are always looked at.

    Args:
        scorer: Scores what must be looked at.
        momentum: Share of the old average that a new score leaves, 0 to 1 (1 excluded).
        recheck: Calls after which a tile is looked at again.

    Raises:
        ValueError: For a setting out of range.
    """

    def __init__(self, scorer: Scorer, momentum: float = 0.5, recheck: int = 200) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f'momentum={momentum}, expected a share from 0 to less than 1.')
        if recheck < 1:
            raise ValueError(f'recheck={recheck}, expected 1 call or more.')
        self._scorer, self._momentum, self._recheck = scorer, momentum, recheck
        self._shared: Dict[int, Tuple[float, int]] = {}  # index -> average, when it was seen
        self._mine: Dict[int, Tuple[float, int]] = {}  # likewise, since the last share
        self._calls = 0
        self.looks = 0  # samples given to the scorer

    def __call__(self, candidates: Sequence[Candidate]) -> List[float]:
        """Return one score a candidate."""
        self._calls += 1
        unknown = [place for place, each in enumerate(candidates) if not self._is_fresh(each.index)]
        fresh: Dict[int, float] = {}
        if unknown:
            self.looks += len(unknown)
            seen = to_float64(self._scorer([candidates[place].sample for place in unknown]))
            if len(seen) != len(unknown):
                raise ValueError(f'{len(seen)} scores for {len(unknown)} samples, expected one a '
                                 f'sample.')
            fresh = dict(zip(unknown, seen.tolist()))
        return [self._observe(each.index, fresh[place]) if place in fresh else
                self._known(each.index)[0] for place, each in enumerate(candidates)]

    def share(self, channel: Channel) -> None:
        """Tell all ranks what this one has seen. Collective.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        mine = _as_rows(self._mine)
        every = _gather_rows(channel, mine)
        self._mine = {}
        newest: Dict[int, Tuple[float, int]] = {}
        for rows in every:
            for index, entry in _from_rows(rows.tolist()).items():
                if index not in newest or entry[1] > newest[index][1]:
                    newest[index] = entry
        self._shared.update(newest)

    def shared_state(self) -> torch.Tensor:
        """Return what all ranks have alike: float64 rows of index, average, call."""
        return _as_rows(self._shared)

    def own_state(self) -> Dict[str, Any]:
        """Return what only this rank has, as plain numbers."""
        return dict(calls=self._calls, rows=_as_rows(self._mine).tolist())

    def load_state(self, shared: torch.Tensor, own: Dict[str, Any]) -> None:
        """Continue from :meth:`shared_state` and :meth:`own_state`."""
        self._calls = own['calls']
        self._shared = _from_rows(shared.tolist())
        self._mine = _from_rows(own['rows'])

    def _known(self, index: int) -> Tuple[float, int]:
        known = self._mine.get(index)
        return self._shared[index] if known is None else known

    def _is_fresh(self, index: int) -> bool:
        if index not in self._mine and index not in self._shared:
            return False
        return self._calls - self._known(index)[1] < self._recheck

    def _observe(self, index: int, score: float) -> float:
        if index < 0:
            return score
        known = self._mine.get(index, self._shared.get(index))
        average = self._mix(known, score)
        self._mine[index] = average, self._calls
        return average

    def _mix(self, known: Optional[Tuple[float, int]], score: float) -> float:
        if known is None or known[0] != known[0]:  # a NaN would stay for ever
            return score
        return self._momentum * known[0] + (1 - self._momentum) * score


def _as_rows(table: Dict[int, Tuple[float, int]]) -> torch.Tensor:
    return torch.tensor([[index, *entry] for index, entry in table.items()],
                        dtype=torch.float64).reshape(-1, 3)


def _from_rows(rows: Sequence[Sequence[float]]) -> Dict[int, Tuple[float, int]]:
    return {int(index): (score, int(when)) for index, score, when in rows}


def _gather_rows(channel: Channel, mine: torch.Tensor) -> List[torch.Tensor]:
    """Return every rank's rows: one collective for the longest, one for all."""
    count = torch.tensor([len(mine)])
    channel.max(count)
    padded = torch.full((int(count), 3), -1.0, dtype=torch.float64)
    padded[:len(mine)] = mine
    return [rows[rows[:, 0] >= 0] for rows in channel.gather(padded)]
