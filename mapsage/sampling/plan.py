"""Plan which rank sends which samples to which rank, so that every batch is full.

A plan follows from counts that are equal on all ranks, so every rank computes the same one.
`exchange.py` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, NamedTuple, Sequence, Tuple, Union


class Move(NamedTuple):
    """One sample that changes its rank; indices count samples, ranks are positions in the group."""

    source_rank: int
    source_index: int
    destination_rank: int
    destination_index: int


@dataclass(frozen=True)
class ExchangePlan:
    """The samples that every rank keeps, gives and gets.

    The global pool of the log is the concatenation of the ranks' batches in rank order:
    slice ``[16:32]`` is the batch of rank 1 when every batch has 16 samples. A batch begins with
    the samples that the rank drew, in that order; arrivals follow, by source rank and index.

    Attributes:
        valid_counts: Number of samples each rank has.
        targets: Number of samples each rank will have.
        given: Number of samples each rank gives away, from index ``targets[rank]`` on.
        moves: Moves of all samples that change their rank, by destination rank and index.
    """

    valid_counts: Tuple[int, ...]
    targets: Tuple[int, ...]
    given: Tuple[int, ...]
    moves: Tuple[Move, ...]

    def kept(self, rank: int) -> int:
        """Return how many samples a rank keeps; it keeps the first ones."""
        return min(self.valid_counts[rank], self.targets[rank])

    def leftover(self, rank: int) -> range:
        """Return the indices of a rank's samples that no rank uses: the last ones."""
        return range(self.kept(rank) + self.given[rank], self.valid_counts[rank])

    def slice_of(self, rank: int) -> Tuple[int, int]:
        """Return where a rank's batch begins and ends in the global pool."""
        begin = sum(self.targets[:rank])
        return begin, begin + self.targets[rank]


def plan_exchange(
    valid_counts: Sequence[int], target: Union[int, Sequence[int]], group_size: int = 1
) -> ExchangePlan:
    """Plan the smallest number of moves after which every rank has its target. Pure.

    A rank keeps its first samples, up to its target, in their order. Ranks with the largest surplus
    give first, so that the remaining surplus is as even as possible: no rank sends for everybody,
    and the next step begins with an even surplus. Whole groups move, in order.

    Args:
        valid_counts: Number of samples each rank has, in group order.
        target: Number of samples each rank will have: one number for all ranks, or one per rank.
        group_size: Number of samples that stay together; divides every count and target.

    Raises:
        ValueError: If a count or target is negative or not a multiple of ``group_size``, or if
            there are fewer samples than the targets add up to.

    Example:
        >>> plan = plan_exchange([3, 1], target=2)
        >>> plan.moves
        (Move(source_rank=0, source_index=2, destination_rank=1, destination_index=1),)
        >>> plan.slice_of(1)
        (2, 4)
    """
    targets = [target] * len(valid_counts) if isinstance(target, int) else list(target)
    _check(valid_counts, targets, group_size)
    have = [count // group_size for count in valid_counts]
    want = [count // group_size for count in targets]
    lacking = sum(max(0, w - h) for h, w in zip(have, want))
    gift_counts = _level([max(0, h - w) for h, w in zip(have, want)], lacking)
    gifts = ((rank, want[rank] + k) for rank, count in enumerate(gift_counts) for k in range(count))
    slots = ((rank, k) for rank, (h, w) in enumerate(zip(have, want)) for k in range(h, w))
    return ExchangePlan(
        tuple(valid_counts),
        tuple(targets),
        tuple(count * group_size for count in gift_counts),
        tuple(_moves(gifts, slots, group_size)),
    )


def _moves(
    gifts: Iterator[Tuple[int, int]], slots: Iterator[Tuple[int, int]], group_size: int
) -> Iterator[Move]:
    for (source, gift), (destination, slot) in zip(gifts, slots):
        for k in range(group_size):
            yield Move(source, gift * group_size + k, destination, slot * group_size + k)


def _level(surplus: Sequence[int], needed: int) -> List[int]:
    """Return how much each rank gives, ``needed`` in total, so that the rest is even."""
    # Search the surplus that a rank may keep; it gives what is above.
    low, high = 0, max(surplus, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(0, count - middle) for count in surplus) >= needed:
            low = middle
        else:
            high = middle - 1
    gifts = [max(0, count - low) for count in surplus]
    too_many = sum(gifts) - needed
    for rank in range(len(gifts) - 1, -1, -1):
        if too_many and gifts[rank]:
            gifts[rank] -= 1
            too_many -= 1
    return gifts


def _check(valid_counts: Sequence[int], targets: Sequence[int], group_size: int) -> None:
    if group_size < 1:
        raise ValueError(f'group_size={group_size}, expected 1 or more.')
    if len(targets) != len(valid_counts):
        raise ValueError(
            f'{len(valid_counts)} counts and {len(targets)} targets, expected one '
            f'count and one target per rank.'
        )
    for name, numbers in (('valid_counts', valid_counts), ('target', targets)):
        wrong = [number for number in numbers if number < 0 or number % group_size]
        if wrong:
            raise ValueError(
                f'{name} has {wrong[0]}, expected whole groups: a multiple of '
                f'group_size={group_size} that is not negative.'
            )
    if sum(valid_counts) < sum(targets):
        raise ValueError(
            f'{sum(valid_counts)} valid samples for targets of {sum(targets)}: decide '
            f'the shortfall first, see mapsage.sampling.decide_shortfall.'
        )
