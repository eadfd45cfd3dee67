"""Weights that travel with the samples of a plan."""
from __future__ import annotations

from typing import List, Sequence

import torch

from mapsage.distributed import Channel
from mapsage.distributed.virtual_ranks import VirtualRanks

from .plan import ExchangePlan


def exchange_weights(channel: Channel, plan: ExchangePlan, mine: Sequence[Sequence[float]],
                     ranks: VirtualRanks) -> List[List[float]]:
    """Return the weight of each sample in the batches of this process's virtual ranks. Collective.

    Args:
        channel: Channel to the processes, in order.
        plan: Plan of the exchange between virtual ranks, equal on every process.
        mine: For each virtual rank of this process the weight of each of its samples,
            ``plan.valid_counts[rank]`` of them.
        ranks: Virtual ranks and the processes that carry them out.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    block = ranks.block(channel.ranks.index(channel.rank))
    table = gather_rows(channel, ranks, mine, max(plan.valid_counts), 0.0)
    weights = [table[rank][:plan.kept(rank)] + [0.0] * (plan.targets[rank] - plan.kept(rank))
               for rank in block]
    for move in plan.moves:
        if move.destination_rank in block:
            weights[move.destination_rank - block.start][move.destination_index] = \
                table[move.source_rank][move.source_index]
    return weights


def gather_rows(channel: Channel, ranks: VirtualRanks, mine: Sequence[Sequence[float]],
                length: int, padding: float) -> List[List[float]]:
    """Return the numbers of every virtual rank, in order, each filled up to a length. Collective.

    Args:
        channel: Channel to the processes, in order.
        ranks: Virtual ranks and the processes that carry them out.
        mine: Numbers of each virtual rank of this process, ``length`` at most.
        length: Length of the longest row of all.
        padding: Number that stands where a row is shorter.
    """
    rows = torch.full((len(ranks.block(0)), length), padding, dtype=torch.float64)
    for row, numbers in zip(rows, mine):
        row[:len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
    return [row for table, block in zip(channel.gather(rows), ranks.blocks)
            for row in table[:len(block)].tolist()]
