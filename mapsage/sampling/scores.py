"""Combine scores: weighted sums of reward functions, and moving averages per tile."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from mapsage.distributed import Channel

from .pool import Candidate
from .scorer import as_scorer
from .validity import to_float64

# Takes samples and returns one number per sample, on any device. Every Scorer is one.
ScoreFunction = Callable[[Sequence[Any]], Any]


class WeightedRewards:
    """The weighted sum of reward functions: the raw reward, before any shaping.

    Each function gets the samples of a batch, group after group, and returns one number per sample,
    on any device. A reward that is NaN makes the sum NaN, so that the group is dropped and
    counted.

    Args:
        functions: Reward functions.
        weights: Weight of each function; 1 for all when None.

    Raises:
        ValueError: If there is no function, or a different number of weights.
    """

    def __init__(
        self, functions: Sequence[ScoreFunction], weights: Optional[Sequence[float]] = None
    ) -> None:
        self._functions = [as_scorer(function) for function in functions]
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        if not functions or len(self._weights) != len(functions):
            raise ValueError(
                f'{len(functions)} reward function(s) and {len(self._weights)} '
                f'weight(s), expected one weight for each of one or more.'
            )

    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """Return float64 rewards of shape ``(len(samples),)`` in host memory.

        Raises:
            ValueError: If a function returns a different number of rewards.
        """
        total = torch.zeros(len(samples), dtype=torch.float64)
        for function, weight in zip(self._functions, self._weights):
            rewards = to_float64(function(samples))
            if len(rewards) != len(samples):
                raise ValueError(
                    f'{function.name} returned {len(rewards)} rewards for '
                    f'{len(samples)} samples, expected one per sample.'
                )
            total += weight * rewards
        return total


class TileHistory:
    """Moving averages of the tiles' scores, so that recently scored tiles are not scored again.

    Scores since the last :meth:`share` are known to a single virtual rank; earlier ones are equal
    on all ranks. Tiles of unknown index are always scored.

    Args:
        scorer: Function that scores the tiles without a recent score.
        momentum: Weight of the old average when a new score comes, from 0 to less than 1.
        recheck: Number of calls after which a tile is scored again.
        turns: Number of virtual ranks of this process.

    Raises:
        ValueError: For a setting out of range.
    """

    def __init__(
        self, scorer: ScoreFunction, momentum: float = 0.5, recheck: int = 200, turns: int = 1
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f'momentum={momentum}, expected a share from 0 to less than 1.')
        if recheck < 1:
            raise ValueError(f'recheck={recheck}, expected 1 call or more.')
        self._scorer, self._momentum, self._recheck = scorer, momentum, recheck
        self._shared: Dict[int, Tuple[float, int]] = {}  # index -> average, number of the call
        # The same since the last share, by virtual rank of this process.
        self._unshared: List[Dict[int, Tuple[float, int]]] = [{} for _ in range(turns)]
        self._calls = [0] * turns
        # Number of samples that the scorer got.
        self.looks = 0

    def __call__(self, candidates: Sequence[Candidate], slot: int = 0) -> List[float]:
        """Return one score per candidate.

        Args:
            candidates: Candidates of one virtual rank.
            slot: Position of the virtual rank in the block of this process.
        """
        self._calls[slot] += 1
        stale = [
            position
            for position, candidate in enumerate(candidates)
            if not self._is_fresh(candidate.index, slot)
        ]
        fresh: Dict[int, float] = {}
        if stale:
            self.looks += len(stale)
            scores = to_float64(self._scorer([candidates[position].sample for position in stale]))
            if len(scores) != len(stale):
                raise ValueError(
                    f'{len(scores)} scores for {len(stale)} samples, expected one per sample.'
                )
            fresh = dict(zip(stale, scores.tolist()))
        return [
            self._observe(candidate.index, fresh[position], slot)
            if position in fresh
            else self._known(candidate.index, slot)[0]
            for position, candidate in enumerate(candidates)
        ]

    def share(self, channel: Channel) -> None:
        """Make the scores of every rank known to all ranks. Collective.

        Args:
            channel: Channel to the ranks that sample together.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        gathered = _gather_rows(channel, torch.cat([_as_rows(scores) for scores in self._unshared]))
        self._unshared = [{} for _ in self._unshared]
        newest: Dict[int, Tuple[float, int]] = {}
        for index, score, when in torch.cat(gathered).tolist():
            if int(index) not in newest or when > newest[int(index)][1]:
                newest[int(index)] = score, int(when)
        self._shared.update(newest)

    def shared_state(self) -> torch.Tensor:
        """Return the part that is equal on all ranks: float64 rows of index, average, call."""
        return _as_rows(self._shared)

    def rank_state(self, slot: int = 0) -> Dict[str, Any]:
        """Return the part that only one virtual rank has, as plain numbers."""
        return dict(calls=self._calls[slot], rows=_as_rows(self._unshared[slot]).tolist())

    def load_state(self, shared: torch.Tensor, *rank_states: Dict[str, Any]) -> None:
        """Continue from :meth:`shared_state` and the :meth:`rank_state` of each virtual rank."""
        self._calls = [state['calls'] for state in rank_states]
        self._shared = _from_rows(shared.tolist())
        self._unshared = [_from_rows(state['rows']) for state in rank_states]

    def _known(self, index: int, slot: int) -> Tuple[float, int]:
        known = self._unshared[slot].get(index)
        return self._shared[index] if known is None else known

    def _is_fresh(self, index: int, slot: int) -> bool:
        if index not in self._unshared[slot] and index not in self._shared:
            return False
        return self._calls[slot] - self._known(index, slot)[1] < self._recheck

    def _observe(self, index: int, score: float, slot: int) -> float:
        if index < 0:
            return score
        known = self._unshared[slot].get(index, self._shared.get(index))
        average = self._mix(known, score)
        self._unshared[slot][index] = average, self._calls[slot]
        return average

    def _mix(self, known: Optional[Tuple[float, int]], score: float) -> float:
        # An average that is NaN would stay NaN.
        if known is None or known[0] != known[0]:
            return score
        return self._momentum * known[0] + (1 - self._momentum) * score


def _as_rows(table: Dict[int, Tuple[float, int]]) -> torch.Tensor:
    return torch.tensor(
        [[index, *entry] for index, entry in table.items()], dtype=torch.float64
    ).reshape(-1, 3)


def _from_rows(rows: Sequence[Sequence[float]]) -> Dict[int, Tuple[float, int]]:
    return {int(index): (score, int(when)) for index, score, when in rows}


def _gather_rows(channel: Channel, local_rows: torch.Tensor) -> List[torch.Tensor]:
    """Return every rank's rows, after one collective for the longest table."""
    count = torch.tensor([len(local_rows)])
    channel.max(count)
    padded = torch.full((int(count), 3), -1.0, dtype=torch.float64)
    padded[: len(local_rows)] = local_rows
    return [rows[rows[:, 0] >= 0] for rows in channel.gather(padded)]
