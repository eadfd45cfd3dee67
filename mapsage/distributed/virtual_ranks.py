"""Virtual ranks: the shares of a run's work, which do not change with the number of processes.

A run has V virtual ranks from its start to its end. Every random number, micro-batch and position
in the data order belongs to a virtual rank. A process runs a contiguous block of virtual ranks, one
after the other. Example: with 8 virtual ranks, each of 2 processes runs 4.

Sums over virtual ranks are added along one fixed binary tree (:func:`split`), so they depend on
neither the number of processes nor the buckets of a tensor. ``ordered_sum.py`` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from mapsage.base.errors import UserError


class VirtualRanksError(UserError, ValueError):
    """The virtual ranks of a run do not suit its processes, its config or its checkpoint."""

    on_every_rank = True


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a run and the processes that run them.

    Attributes:
        count: Number of virtual ranks, V.
        processes: Number of processes, at most ``count``.

    Raises:
        VirtualRanksError: If there are more processes than virtual ranks, or no process.

    Example:
        >>> VirtualRanks(8, 3).blocks
        [range(0, 3), range(3, 6), range(6, 8)]
    """

    count: int
    processes: int

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.count:
            raise VirtualRanksError(
                f'{self.processes} processes for {self.count} virtual rank(s): expected at most '
                f'one process for each virtual rank. Start {self.count} or fewer; '
                f'{_format_divisors(self.count)} divide the work evenly. (The number of virtual '
                f'ranks is env_cfg.virtual_ranks at the first start of a run.)'
            )

    def block(self, rank: int) -> range:
        """Return the virtual ranks of process ``rank``. The lengths of blocks differ by 1 at most."""
        size, longer = divmod(self.count, self.processes)
        start = rank * size + min(rank, longer)
        return range(start, start + size + (rank < longer))

    @property
    def blocks(self) -> List[range]:
        """The blocks of all processes, in the order of ranks."""
        return [self.block(rank) for rank in range(self.processes)]

    @property
    def one_each(self) -> bool:
        """Whether every process runs a single virtual rank."""
        return self.count == self.processes

    def describe(self) -> str:
        """Return a line for the log: the sizes of the blocks, and the cost of uneven blocks."""
        if self.one_each:
            return f'{self.count} virtual rank(s), one in each process'
        sizes = [len(block) for block in self.blocks]
        listed = ' or '.join(map(str, sorted(set(sizes))))
        text = f'{self.count} virtual ranks in {self.processes} process(es), {listed} each'
        if sizes[0] != sizes[-1]:
            cost = sizes[0] * self.processes / self.count - 1
            text += (
                f': the others wait for those with {sizes[0]}, a step takes {cost:.0%} longer '
                f'than with even blocks ({_format_divisors(self.count)} processes)'
            )
        return text


def _format_divisors(count: int) -> str:
    return ', '.join(str(n) for n in range(1, count + 1) if count % n == 0)


def split(ranks: range) -> Tuple[range, range]:
    """Return the two subtrees of the node that adds the virtual ranks ``ranks``. Pure.

    The size of the left subtree is the largest power of two below ``len(ranks)``. Example: 6 ranks
    are split into 4 and 2.

    Args:
        ranks: At least two virtual ranks.
    """
    left = 1 << (len(ranks) - 1).bit_length() - 1
    return ranks[:left], ranks[left:]


def subtrees(count: int, block: range) -> List[range]:
    """Return the largest subtrees that lie completely in a block, in order. Pure.

    A process adds these subtrees without other processes. With 8 virtual ranks and 1, 2, 4 or 8
    processes, every block is a single subtree.

    Args:
        count: Number of virtual ranks of the run.
        block: Virtual ranks of one process.
    """
    complete: List[range] = []

    def descend(ranks: range) -> None:
        if ranks.stop <= block.start or block.stop <= ranks.start:
            return
        if block.start <= ranks.start and ranks.stop <= block.stop:
            complete.append(ranks)
            return
        for half in split(ranks):
            descend(half)

    descend(range(count))
    return complete
