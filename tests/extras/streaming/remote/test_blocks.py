"""A block has one owner at most, and comes back once."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.streaming.remote.blocks import BlockError, BlockPool

ONE, TWO = (1, 0), (2, 0)


def test_blocks_are_given_written_read_and_freed():
    pool = BlockPool(4, 8)
    blocks = pool.alloc(3, ONE)
    assert (pool.free, pool.total, pool.block_bytes) == (1, 4, 8) and len(set(blocks)) == 3
    for value, block in enumerate(blocks):
        pool.begin_write(block, pool.generation(block, ONE), ONE).fill_(value)
        pool.end_write(block)
    for value, block in enumerate(blocks):
        assert torch.equal(pool.data(block, ONE), torch.full((8,), value, dtype=torch.uint8))
    pool.release(blocks, ONE)
    assert pool.free == 4
    pool.close()


def test_what_others_own_cannot_be_touched():
    pool = BlockPool(2, 8)
    (block,) = pool.alloc(1, ONE)
    for other in (TWO, (1, 1)):
        for use, arguments in (
            (pool.data, (block,)),
            (pool.release, ([block],)),
            (pool.generation, (block,)),
            (pool.begin_write, (block, 0)),
        ):
            with pytest.raises(BlockError, match=f'block {block}, which item 1 attempt 0 owns'):
                use(*arguments, other)
    pool.release([block], ONE)
    with pytest.raises(BlockError, match='which nobody owns'):
        pool.release([block], ONE)
    with pytest.raises(BlockError, match='the pool has 0 to 1'):
        pool.data(2, ONE)


def test_a_release_is_whole_or_not_at_all():
    pool = BlockPool(3, 8)
    mine, theirs = pool.alloc(1, ONE), pool.alloc(1, TWO)
    with pytest.raises(BlockError, match='item 2'):
        pool.release(mine + theirs, ONE)
    with pytest.raises(BlockError, match='twice'):
        pool.release(mine * 2, ONE)
    assert pool.free == 1 and len(pool.data(mine[0], ONE)) == 8


def test_more_than_is_free_is_refused_and_nothing_taken():
    pool = BlockPool(2, 8)
    with pytest.raises(BlockError, match='asks for 3 block.s., and 2 of 2 are free'):
        pool.alloc(3, ONE)
    assert pool.free == 2


def test_the_generation_grows_with_each_free():
    pool = BlockPool(1, 8)
    for generation in range(3):
        assert pool.alloc(1, ONE) == [0] and pool.generation(0, ONE) == generation
        with pytest.raises(BlockError, match=f'in generation {generation}: it was freed since'):
            pool.begin_write(0, generation - 1, ONE)
        pool.release([0], ONE)


def test_a_block_freed_while_it_is_written_comes_back_when_the_write_ends():
    pool = BlockPool(1, 8)
    pool.alloc(1, ONE)
    pool.begin_write(0, 0, ONE)
    with pytest.raises(BlockError, match='twice at once'):
        pool.begin_write(0, 0, ONE)
    pool.release([0], ONE)
    assert pool.free == 0
    with pytest.raises(BlockError, match='0 of 1 blocks are free at the end'):
        pool.close()
    pool.end_write(0)
    assert pool.free == 1
    with pytest.raises(BlockError, match='a write ended twice'):
        pool.end_write(0)
    pool.close()


def test_close_names_who_kept_a_block():
    pool = BlockPool(2, 8)
    pool.alloc(1, (7, 3))
    with pytest.raises(BlockError, match=r'1 of 2 blocks .*\{0: \(7, 3\)\}'):
        pool.close()


@pytest.mark.parametrize('sizes', [(0, 1), (1, 0), (1.5, 1), (True, 1)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match='expected an integer, 1 or more'):
        BlockPool(*sizes)
