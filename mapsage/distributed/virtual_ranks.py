"""Virtual ranks: which of them a process carries out, and the order in which their sums are added.

A run has V virtual ranks for its whole life. Everything that is random, every micro-batch and
every position in the data order belongs to a virtual rank; a process carries out a contiguous block
of them, one after the other. Sums over the virtual ranks are added along one fixed binary tree, so
that they depend neither on the number of processes nor on how a tensor is divided into buckets.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from mapsage.errors import UserError


class VirtualRanksError(UserError, ValueError):
    """The virtual ranks of a run do not suit its processes, its config or its checkpoint."""

    on_every_rank = True


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a run and the processes that carry them out.

    Attributes:
        count: Number of virtual ranks, V.
        processes: Number of processes, at most ``count``.

    Raises:
        VirtualRanksError: If there are more processes than virtual ranks, or none.
    """

    count: int
    processes: int

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.count:
            raise VirtualRanksError(
                f'{self.processes} processes for {self.count} virtual rank(s): expected at most '
                f'one process for each virtual rank. Start {self.count} or fewer; '
                f'{_divisors_text(self.count)} divide the work evenly. (The number of virtual '
                f'ranks is env_cfg.virtual_ranks at the first start of a run.)')

    def block(self, rank: int) -> range:
        """Return the virtual ranks of process ``rank``; blocks differ by one at most."""
        size, longer = divmod(self.count, self.processes)
        start = rank * size + min(rank, longer)
        return range(start, start + size + (rank < longer))

    @property
    def blocks(self) -> List[range]:
        """The blocks of all processes, in the order of ranks."""
        return [self.block(rank) for rank in range(self.processes)]

    @property
    def one_each(self) -> bool:
        """Whether every process carries out one virtual rank."""
        return self.count == self.processes

    def describe(self) -> str:
        """Return a sentence for the log: the blocks, and what uneven ones cost."""
        if self.one_each:
            return f'{self.count} virtual rank(s), one in each process'
        sizes = [len(block) for block in self.blocks]
        text = f"{self.count} virtual ranks in {self.processes} process(es), {_runs(sizes)} each"
        if sizes[0] != sizes[-1]:
            cost = sizes[0] * self.processes / self.count - 1
            text += (f': the others wait for those with {sizes[0]}, a step takes {cost:.0%} longer '
                     f'than with even blocks ({_divisors_text(self.count)} processes)')
        return text


def _runs(sizes: List[int]) -> str:
    return f'{sizes[0]}' if sizes[0] == sizes[-1] else f'{sizes[-1]} or {sizes[0]}'


def _divisors_text(count: int) -> str:
    return ', '.join(str(n) for n in range(1, count + 1) if count % n == 0)


def split(ranks: range) -> Tuple[range, range]:
    """Return the two subtrees below a node of the tree that adds up ``ranks``. Pure.

    The left one has the largest power of two below ``len(ranks)``.

    Args:
        ranks: At least two virtual ranks.
    """
    left = 1 << (len(ranks) - 1).bit_length() - 1
    return ranks[:left], ranks[left:]


def subtrees(count: int, block: range) -> List[range]:
    """Return the largest subtrees that a block holds whole, in order. Pure.

    A process adds up each of them by itself. At 1, 2, 4 and 8 processes of 8 virtual ranks there
    is one for each process.

    Args:
        count: Number of virtual ranks of the run.
        block: Virtual ranks of one process.
    """
    found: List[range] = []

    def descend(ranks: range) -> None:
        if ranks.stop <= block.start or block.stop <= ranks.start:
            return
        if block.start <= ranks.start and ranks.stop <= block.stop:
            found.append(ranks)
            return
        for part in split(ranks):
            descend(part)

    descend(range(count))
    return found
