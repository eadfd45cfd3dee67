"""Samples before a step uses them: one by one, in groups, and in the pool for the next steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple


@dataclass
class Candidate:
    """A sample with its origin and score.

    Attributes:
        sample: Sample that the dataset returned.
        index: Index in the dataset, -1 if unknown.
        seed: Seed of its random augmentation. Index and seed together reproduce the sample.
        score: Score by which it was judged; None before that.
    """

    sample: Any
    index: int = -1
    seed: Tuple[int, ...] = ()
    score: Optional[float] = None


@dataclass
class Group:
    """Samples that stay together.

    Attributes:
        samples: List of ``group_size`` samples.
        found_at: Number of the step that judged them.
        reason: Reason why they are not valid; ``''`` if they are valid or kept at random.
        at_random: Whether they are kept at random although they are not valid.
        scores: Scores of all members of the group, also on other ranks; empty unless groups have
            keys.
    """

    samples: List[Any]
    found_at: int
    reason: str = ''
    at_random: bool = False
    scores: Tuple[float, ...] = ()


class DatedSample(NamedTuple):
    """A sample on its way to a batch.

    Attributes:
        sample: The sample.
        found_at: Number of the step that judged it.
        group_scores: Scores of all members of its group; empty unless groups have keys.
    """

    sample: Any
    found_at: int
    group_scores: Tuple[float, ...] = ()


class SurplusPool:
    """This rank's surplus, oldest first.

    Args:
        max_age: Number of steps after the step that judged a group in which it may be used.

    Raises:
        ValueError: If ``max_age`` is negative.
    """

    def __init__(self, max_age: int) -> None:
        if max_age < 0:
            raise ValueError(f'max_age={max_age}, expected a number of steps, 0 for no pool.')
        self.max_age = max_age
        self._groups: List[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, step: int) -> Tuple[List[Group], List[Group]]:
        """Empty the pool; return the groups that may be used in this step, and the expired."""
        groups, self._groups = self._groups, []
        young = [group for group in groups if step - group.found_at <= self.max_age]
        return young, [group for group in groups if step - group.found_at > self.max_age]

    def put(self, groups: Sequence[Group]) -> List[Group]:
        """Store groups for the next step; return the refused ones, which is all if max_age is 0."""
        if not self.max_age:
            return list(groups)
        self.restore(groups)
        return []

    def restore(self, groups: Sequence[Group]) -> None:
        """Store the groups of a step that an error interrupted, for the next attempt."""
        self._groups += groups

    def state_dict(self) -> List[Dict[str, Any]]:
        """Return samples, step and reason of every group."""
        return [
            dict(
                samples=list(group.samples),
                found_at=group.found_at,
                at_random=group.at_random,
                scores=list(group.scores),
            )
            for group in self._groups
        ]

    def load_state_dict(self, state: Sequence[Dict[str, Any]]) -> None:
        """Replace the groups by the ones that :meth:`state_dict` returned."""
        self._groups = [
            Group(
                list(group['samples']),
                group['found_at'],
                at_random=group.get('at_random', False),
                scores=tuple(group.get('scores', ())),
            )
            for group in state
        ]
