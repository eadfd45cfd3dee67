"""Host memory for arriving features, divided into blocks that have at most one owner each.

A head announces blocks to encoders, and bytes for a block may arrive after the head has given it to
another item. The generation number of a block reveals such late bytes. `inbox.py` gives blocks to
items.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Deque, List, NamedTuple, Optional, Sequence, Set

import torch

from mapsage.extras.streaming.source import StreamingError
from mapsage.extras.streaming.wire.payload import host_bytes


class BlockError(StreamingError):
    """A block was used by an item that does not own it, or was not given back."""


class Owner(NamedTuple):
    """The owner of a block.

    Attributes:
        item: Number of the item.
        attempt: Number of the item's attempt.
    """

    item: int
    attempt: int


class BlockPool:
    """Blocks of host memory. Safe to use from several threads.

    A block's generation number grows each time the block is freed, so that bytes sent for an
    earlier owner can be recognized. A block that is freed during a write becomes free, with the
    next generation number, only when the write has ended.

    Args:
        blocks: Number of blocks.
        block_bytes: Bytes per block.

    Raises:
        ValueError: If either is not a positive integer.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        for name, value in (('blocks', blocks), ('block_bytes', block_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f'{name}={value!r}, expected an integer, 1 or more.')
        self.total, self.block_bytes = 0, block_bytes
        # Memory by block.
        self._memory: List[torch.Tensor] = []
        self._free: Deque[int] = deque()
        self._owners: List[Optional[Owner]] = []
        self._generations: List[int] = []
        self._writing: Set[int] = set()
        self._lock = threading.Lock()
        self.grow(blocks)

    @property
    def free(self) -> int:
        """Number of blocks without an owner and without a write."""
        return len(self._free)

    def grow(self, blocks: int) -> None:
        """Add blocks. Existing blocks keep their memory."""
        memory = host_bytes(blocks * self.block_bytes)
        with self._lock:
            self._memory += memory.split(self.block_bytes)
            self._free.extend(range(self.total, self.total + blocks))
            self._owners += [None] * blocks
            self._generations += [0] * blocks
            self.total += blocks

    def alloc(self, count: int, owner: Sequence[int]) -> List[int]:
        """Return the ids of ``count`` free blocks, which ``owner`` owns from now on.

        Args:
            count: Number of blocks, at most :attr:`free`.
            owner: Number and attempt of an item.

        Raises:
            BlockError: If fewer blocks are free. Then no block is taken.
        """
        with self._lock:
            if not 0 <= count <= len(self._free):
                raise BlockError(
                    f'item {owner[0]} asks for {count} block(s), and '
                    f'{len(self._free)} of {self.total} are free: ask for at most '
                    f'those.'
                )
            blocks = [self._free.popleft() for _ in range(count)]
            for block in blocks:
                self._owners[block] = Owner(*owner)
            return blocks

    def generation(self, block: int, owner: Sequence[int]) -> int:
        """Return the generation number of a block that ``owner`` owns.

        Raises:
            BlockError: If ``owner`` does not own the block.
        """
        with self._lock:
            self._check(block, owner, 'asks for the generation of')
            return self._generations[block]

    def data(self, block: int, owner: Sequence[int]) -> torch.Tensor:
        """Return the bytes of a block, uint8 (block_bytes,), not a copy.

        Raises:
            BlockError: If ``owner`` does not own the block.
        """
        with self._lock:
            self._check(block, owner, 'reads')
            return self._memory[block]

    def begin_write(self, block: int, generation: int, owner: Sequence[int]) -> torch.Tensor:
        """Return the bytes of a block to write into until :meth:`end_write`.

        Raises:
            BlockError: If ``owner`` does not own the block, if the block has another generation
                number, or if another write has not ended.
        """
        with self._lock:
            self._check(block, owner, 'writes')
            if generation != self._generations[block]:
                raise BlockError(
                    f'item {owner[0]} writes generation {generation} of block '
                    f'{block}, which is in generation {self._generations[block]}: it '
                    f'was freed since.'
                )
            if block in self._writing:
                raise BlockError(f'item {owner[0]} writes block {block} twice at once.')
            self._writing.add(block)
            return self._memory[block]

    def end_write(self, block: int) -> None:
        """End the write that :meth:`begin_write` began; the block may have been freed meanwhile.

        Raises:
            BlockError: If no write has begun.
        """
        with self._lock:
            if block not in self._writing:
                raise BlockError(f'block {block} is not being written: a write ended twice.')
            self._writing.remove(block)
            if self._owners[block] is None:
                self._free.append(block)

    def release(self, blocks: Sequence[int], owner: Sequence[int]) -> None:
        """Free blocks, all or none of them.

        Raises:
            BlockError: If ``owner`` does not own one of the blocks, or one is named twice.
        """
        with self._lock:
            for block in blocks:
                self._check(block, owner, 'frees')
            if len(set(blocks)) != len(blocks):
                raise BlockError(f'item {owner[0]} frees a block twice: {list(blocks)}.')
            for block in blocks:
                self._owners[block] = None
                self._generations[block] += 1
                if block not in self._writing:
                    self._free.append(block)

    def close(self) -> None:
        """Check that all blocks were given back.

        Raises:
            BlockError: If blocks were not given back, with their owners.
        """
        with self._lock:
            if len(self._free) == self.total:
                return
            owners = {block: tuple(owner) for block, owner in enumerate(self._owners) if owner}
            raise BlockError(
                f'{len(self._free)} of {self.total} blocks are free at the end. By '
                f'block, the (item, attempt) that kept it: {owners}; being written: '
                f'{sorted(self._writing)}.'
            )

    def _check(self, block: int, owner: Sequence[int], action: str) -> None:
        if not 0 <= block < self.total:
            raise BlockError(
                f'item {owner[0]} {action} block {block}, and the pool has 0 to {self.total - 1}.'
            )
        actual = self._owners[block]
        if actual is None or tuple(actual) != tuple(owner):
            name = 'nobody' if actual is None else f'item {actual.item} attempt {actual.attempt}'
            raise BlockError(
                f'item {owner[0]} attempt {owner[1]} {action} block {block}, which {name} owns.'
            )
