"""Send the weights of samples along the moves of an exchange plan."""
from __future__ import annotations

from typing import List, Sequence

import torch

from mapsage.distributed import Channel
from mapsage.distributed.virtual_ranks import VirtualRanks

from .plan import ExchangePlan


def exchange_weights(channel: Channel, plan: ExchangePlan, local_weights: Sequence[Sequence[float]],
                     ranks: VirtualRanks) -> List[List[float]]:
    """Return the weight of each sample in the batches of this process's virtual ranks. Collective.

    Args:
        channel: Channel to the processes, in order.
        plan: Plan of the exchange between virtual ranks, equal on every process.
        local_weights: Weights of the samples of every virtual rank of this process,
            ``plan.valid_counts[rank]`` of them.
        ranks: Virtual ranks, and the process that runs each.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    block = ranks.block(channel.ranks.index(channel.rank))
    table = gather_rows(channel, ranks, local_weights, max(plan.valid_counts), 0.0)
    weights = [table[rank][:plan.kept(rank)] + [0.0] * (plan.targets[rank] - plan.kept(rank))
               for rank in block]
    for move in plan.moves:
        if move.destination_rank in block:
            weights[move.destination_rank - block.start][move.destination_index] = \
                table[move.source_rank][move.source_index]
    return weights


def gather_rows(channel: Channel, ranks: VirtualRanks, local_rows: Sequence[Sequence[float]],
                length: int, padding: float) -> List[List[float]]:
    """Return the numbers of every virtual rank, in order, padded to a length. Collective.

    Args:
        channel: Channel to the processes, in order.
        ranks: Virtual ranks, and the process that runs each.
        local_rows: Numbers of every virtual rank of this process, at most ``length``.
        length: Length of the longest row of all ranks.
        padding: Number that fills shorter rows.
    """
    rows = torch.full((len(ranks.block(0)), length), padding, dtype=torch.float64)
    for row, numbers in zip(rows, local_rows):
        row[:len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
    return [row for table, block in zip(channel.gather(rows), ranks.blocks)
            for row in table[:len(block)].tolist()]
