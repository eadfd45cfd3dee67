"""Pools of dynamic sampling as indices and seeds, and loaded again from them."""

from __future__ import annotations

import json
from typing import Any, List, Tuple

from mapsage.sampling import Candidate
from mapsage.sampling.hooks.saved_pools import (
    deal_out,
    load_pools,
    replace_samples_by_keys,
)


class Loaded:
    """Samples of a loader, which notes what was loaded."""

    def __init__(self) -> None:
        self.keys: List[Tuple[int, Tuple[int, ...]]] = []

    def load(self, index: int, seed: Tuple[int, ...]) -> Candidate:
        self.keys.append((index, seed))
        return Candidate(f'sample {index}', index, seed)


def pool_of(*groups: List[Candidate]) -> List[Any]:
    return [
        dict(found_at=number, at_random=number > 0, samples=group)
        for number, group in enumerate(groups)
    ]


def test_a_pool_comes_back_from_json() -> None:
    pool = pool_of([Candidate('a', 3, (1, 2), 0.5)], [Candidate('b', 4, (5,), 0.25)])
    loaded: Any = Loaded()
    saved = json.loads(json.dumps(replace_samples_by_keys(pool)))
    restored = load_pools([saved, []], loaded, group_size=1)
    assert loaded.keys == [(3, (1, 2)), (4, (5,))]
    first, second = restored.pools[0]
    assert first == dict(
        found_at=0, at_random=False, samples=[Candidate('sample 3', 3, (1, 2), 0.5)]
    )
    assert second['at_random'] and second['samples'][0].score == 0.25
    assert restored.pools[1] == [] and restored.lost_groups == restored.lost_samples == 0


def test_groups_without_keys_or_of_another_size_are_counted_as_lost() -> None:
    whole, no_index = [Candidate('a', 0, (1,)), Candidate('b', 1, (1,))], [Candidate('c')] * 2
    saved = replace_samples_by_keys(pool_of(whole, no_index, whole[:1]))
    loaded: Any = Loaded()
    restored = load_pools([saved], loaded, group_size=2)
    assert len(restored.pools[0]) == 1 and (restored.lost_groups, restored.lost_samples) == (2, 3)
    # A loader that cannot load by key restores nothing.
    assert load_pools([saved], None, group_size=2).lost_samples == 5


def test_groups_are_dealt_out_to_another_number_of_ranks() -> None:
    pools: Any = [[dict(group=0), dict(group=1)], [dict(group=2)]]
    assert deal_out(pools, 2) == [[dict(group=0), dict(group=2)], [dict(group=1)]]
    assert deal_out(pools, 4)[3] == []
