"""Groups of samples that share a key, of any size, whose parts may lie on several ranks.

Every rank tells the others the key and the scores of the samples that it drew in a round. So all
ranks judge the same groups, and each rank knows all scores of the groups of its samples.
"""

from __future__ import annotations

import hashlib
from typing import Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from mapsage.distributed import Channel
from mapsage.distributed.virtual_ranks import VirtualRanks

from .validity import Validity


class KeyedVerdict(NamedTuple):
    """The decision about a group.

    Attributes:
        reason: Why it is dropped; ``''`` for a valid group.
        mean: Its mean score, NaN where a score is not finite.
        scores: Scores of all its members, by rank and position.
    """

    reason: str
    mean: float
    scores: Tuple[float, ...]


def key_number(key: Hashable) -> int:
    """Return a number of 63 bits for a key, the same in every process.

    Python's own hash of a text differs between processes.

    Raises:
        TypeError: If the key is an object without a text of its own, which has its address.
    """
    if type(key).__repr__ is object.__repr__:
        raise TypeError(
            f'group_key returned {key!r}, whose text differs between processes; '
            f'expected a number, a text, or a tuple of these.'
        )
    digest = hashlib.sha256(repr(key).encode('utf-8', 'backslashreplace')).digest()
    return int.from_bytes(digest[:8], 'little') >> 1


def judge_across_ranks(
    channel: Channel,
    ranks: VirtualRanks,
    validity: Validity,
    keys: Sequence[Sequence[int]],
    scores: Sequence[torch.Tensor],
    drawn: Sequence[int],
    threshold: Optional[float],
) -> Dict[int, KeyedVerdict]:
    """Return the verdict about every group of a round, by key. Collective.

    Args:
        channel: Channel to the processes, in order.
        ranks: Virtual ranks, and the process that runs each.
        validity: Criteria for valid groups.
        keys: Number of the key of each sample, for every virtual rank of this process.
        scores: Scores of the samples, float64 ``(samples, scores per sample)``, for every virtual
            rank of this process.
        drawn: Number of samples that each virtual rank of all processes drew.
        threshold: Quantile of the latest scores, or None.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    longest, width = max(drawn), next((table.shape[1] for table in scores if len(table)), 1)
    widest = torch.tensor([width])
    channel.max(widest)
    width = int(widest)
    # The bits of the scores travel as integers, beside the keys.
    rows = torch.zeros((len(ranks.block(0)), longest, 1 + width), dtype=torch.int64)
    for row, rank_keys, table in zip(rows, keys, scores):
        if len(table):
            row[: len(table), 0] = torch.tensor(list(rank_keys))
            row[: len(table), 1:] = table.contiguous().view(torch.int64)
    members: Dict[int, List[float]] = {}
    rank = 0
    for gathered, block in zip(channel.gather(rows), ranks.blocks):
        for row in gathered[: len(block)]:
            table = row[: drawn[rank], 1:].contiguous().view(torch.float64).tolist()
            for key, sample_scores in zip(row[: drawn[rank], 0].tolist(), table):
                members.setdefault(key, []).extend(sample_scores)
            rank += 1
    verdicts = {}
    for key, group in members.items():
        verdict = validity.judge(group, len(group), threshold)
        verdicts[key] = KeyedVerdict(verdict.reasons[0], float(verdict.means[0]), tuple(group))
    return verdicts
