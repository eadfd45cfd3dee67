"""Blocks of virtual ranks and the tree of their sums, against plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError, split, subtrees

SIZES = st.integers(1, 300).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, v)))


@given(SIZES)
def test_blocks_cover_the_virtual_ranks_in_order(sizes: tuple) -> None:
    ranks = VirtualRanks(*sizes)
    blocks = ranks.blocks
    assert [v for block in blocks for v in block] == list(range(ranks.count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert ranks.one_each == all(len(block) == 1 for block in blocks)


@given(SIZES)
def test_subtrees_cover_a_block_and_are_nodes_of_the_tree(sizes: tuple) -> None:
    count, nodes = sizes[0], set()

    def walk(ranks: range) -> None:
        nodes.add(ranks)
        if len(ranks) > 1:
            for part in split(ranks):
                walk(part)

    walk(range(count))
    assert len(nodes) == 2 * count - 1
    for block in VirtualRanks(*sizes).blocks:
        parts = subtrees(count, block)
        assert [v for part in parts for v in part] == list(block)
        assert nodes.issuperset(parts)
        assert len(parts) <= 2 * count.bit_length()


@pytest.mark.parametrize(
    'count, processes, parts',
    [
        (8, 1, [1]),
        (8, 2, [1, 1]),
        (8, 4, [1] * 4),
        (8, 8, [1] * 8),
        (8, 3, [2, 2, 1]),
        (12, 3, [1, 1, 1]),
        (256, 256, [1] * 256),
    ],
)
def test_number_of_partial_sums(count: int, processes: int, parts: list) -> None:
    blocks = VirtualRanks(count, processes).blocks
    assert [len(subtrees(count, block)) for block in blocks] == parts


def test_more_processes_than_virtual_ranks_are_refused_with_the_numbers_that_divide() -> None:
    with pytest.raises(VirtualRanksError, match=r'8 processes for 6 .*fewer; 1, 2, 3, 6 '):
        VirtualRanks(6, 8)


def test_the_cost_of_uneven_blocks_is_said() -> None:
    assert 'a step takes 12% longer' in VirtualRanks(8, 3).describe()
    assert VirtualRanks(8, 4).describe() == '8 virtual ranks in 4 process(es), 2 each'
    assert VirtualRanks(1, 1).describe() == '1 virtual rank(s), one in each process'
