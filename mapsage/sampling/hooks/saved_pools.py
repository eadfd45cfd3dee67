"""The pools of dynamic sampling in a checkpoint: indices and seeds in place of the samples.

A sample is drawn again from its index in the dataset and the seed of its augmentation. A sample
without these, such as one of a user's own loader, cannot be restored and is counted as lost.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from mapsage.host.runner import KeyedSamples
from mapsage.sampling import Candidate

# Groups of samples as dicts: `found_at`, `at_random`, and the samples or their keys.
Pool = List[Dict[str, Any]]


class RestoredPools(NamedTuple):
    """Pools whose samples were loaded again.

    Attributes:
        pools: One pool for each virtual rank of this process.
        lost_groups: Number of groups that could not be restored.
        lost_samples: Number of samples in these groups.
    """

    pools: List[Pool]
    lost_groups: int
    lost_samples: int


def replace_samples_by_keys(pool: Sequence[Dict[str, Any]]) -> Pool:
    """Return a pool as what JSON can hold: each sample as index, seed and score."""
    return [
        dict(
            found_at=group['found_at'],
            at_random=group['at_random'],
            keys=[
                [candidate.index, list(candidate.seed), candidate.score]
                for candidate in group['samples']
            ],
        )
        for group in pool
    ]


def deal_out(pools: Sequence[Pool], ranks: int) -> List[Pool]:
    """Distribute the groups of all pools over another number of virtual ranks."""
    groups = [group for pool in pools for group in pool]
    return [groups[rank::ranks] for rank in range(ranks)]


def load_pools(
    pools: Sequence[Pool], samples: Optional[KeyedSamples], group_size: int
) -> RestoredPools:
    """Load the samples of saved pools.

    Args:
        pools: One pool for each virtual rank of this process, with keys in place of samples.
        samples: Samples of the training loader; None if it cannot load a sample by its key. Then
            all groups are lost.
        group_size: Number of samples in a group. Groups of another size are lost.
    """
    restored: List[Pool] = []
    lost_groups = lost_samples = 0
    for pool in pools:
        groups: Pool = []
        for group in pool:
            keys = group['keys']
            has_keys = all(index >= 0 and seed for index, seed, _ in keys)
            if samples is not None and has_keys and len(keys) == group_size:
                groups.append(
                    dict(
                        found_at=group['found_at'],
                        at_random=group.get('at_random', False),
                        samples=[_load(samples, *key) for key in keys],
                    )
                )
            else:
                lost_groups, lost_samples = lost_groups + 1, lost_samples + len(keys)
        restored.append(groups)
    return RestoredPools(restored, lost_groups, lost_samples)


def _load(samples: KeyedSamples, index: int, seed: Sequence[int], score: float) -> Candidate:
    candidate: Candidate = samples.load(index, tuple(seed))
    candidate.score = score
    return candidate
