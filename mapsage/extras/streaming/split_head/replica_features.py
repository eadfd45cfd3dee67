"""One item's features on every rank of a head replica, from the one rank that receives the data.

A head replica is the group of ranks that train one copy of the head together. One of them talks to
the encoders. The others receive no data from encoders and still take part in every step: in each
tick all ranks send the facts that they know and read the same numbers, and only these numbers
decide which collective comes next.
"""

from __future__ import annotations

import time
from typing import Dict, List, NoReturn, Optional, Tuple

import torch
import torch.distributed as dist

from mapsage.distributed import Consensus, Facts, error_text, open_channel, raise_together
from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.source import Features, StreamingError
from mapsage.extras.streaming.wire.payload import checksum, host_bytes

from .replica_facts import FIELDS, Agreed, ArrivingItem, facts_of, fault_of, read_agreed

# While nothing changes, the rank with the data ticks at this interval, so that the others know that
# it is alive. The interval is long because a tick costs all ranks time.
_POLL_SECONDS = 1.0
# Reported as the checksum of an item that is broken on a rank; real checksums are not negative.
_BROKEN = -1


class ReplicaFeatures:
    """Delivers items to all ranks of a head replica. Making one is collective over its ranks.

    While an item arrives, each rank receives it piece by piece into the blocks of its pool. If the
    pool has fewer blocks than the item needs, the rank empties the blocks and continues from the
    byte that it has reached.

    One tick per step is enough if the next item is named: the tick that compares the checksums of
    one item also says how far the next one is.

    Args:
        group: Process group of the replica, over gloo; all ranks when None.
        pool: Blocks of this rank. The ids of the blocks may differ between ranks; ``block_bytes``
            must be equal.
        device: Device on which the features are wanted.
        timeout: Seconds that a rank may be late, and that an item may make no progress; equal on
            all ranks. A rank that trains longer than this between two deliveries counts as lost.

    Raises:
        ValueError: On every rank, if ``block_bytes`` differs; if ``timeout`` is not positive.
        RankLostError: Naming the ranks that did not take part.
    """

    def __init__(
        self,
        group: Optional[dist.ProcessGroup],
        pool: BlockPool,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._pool, self._device, self._timeout = pool, device, timeout
        self._channel = open_channel(group, timeout)
        self._ranks = self._channel.ranks
        self._me = self._ranks.index(self._channel.rank)
        sizes = Consensus(('block_bytes',), group, timeout).tick(block_bytes=pool.block_bytes)
        if not sizes.agree('block_bytes'):
            values = sizes.by_rank('block_bytes')
            raise ValueError(
                f'block_bytes={pool.block_bytes} on this rank, expected the same on '
                f'every rank of a head replica, got {values} by rank. Give all ranks '
                f'the same feature_source.'
            )
        self._consensus = Consensus(FIELDS, group, timeout)
        # Facts of the last tick.
        self._facts: Optional[Facts] = None
        self._announced: Optional[Agreed] = None
        self._error: Optional[Exception] = None
        self._counts: Dict[str, float] = {}

    def deliver(
        self, arriving: Optional[ArrivingItem] = None, following: Optional[ArrivingItem] = None
    ) -> Features:
        """Return an item's features on every rank. Collective over the replica.

        Args:
            arriving: Item to deliver, on the one rank that holds its data; None on the others.
            following: Item of the next call, on the same rank, if it is known; None on the others.

        Returns:
            One tensor (n, channels, height, width) per level on this rank's device, detached, with
            the same bytes on every rank.

        Raises:
            StreamingError: On every rank with the same text, if the item failed on any of them,
                made no progress, or arrived with different bytes. All blocks are free again and the
                next item may be delivered.
            RankLostError: Naming the ranks that did not take part. The replica cannot be used any
                more.
        """
        agreed, self._announced, self._error = self._announced, None, None
        assembly = _Assembly(self._pool)
        try:
            if agreed is None:
                agreed = self._tick(arriving)
            else:
                self._check_announced(agreed, arriving)
            agreed = self._bring_all(assembly, agreed, arriving)
            local_checksum = _BROKEN if self._error else checksum(assembly.finish())
            announced = self._compare(local_checksum, agreed, arriving, following)
        finally:
            assembly.release()
        self._announced = announced if announced.owner is not None else None
        # fault_of would have reported a missing layout.
        assert agreed.layout is not None
        return agreed.layout.unpack(assembly.host, self._device)

    def report(self) -> Dict[str, float]:
        """Return what this rank has counted since the last report.

        Returns:
            ``items``, ``ticks`` and ``bytes``, and the time spent: ``tick_seconds``, which
            includes waiting for late ranks, ``broadcast_seconds``, and ``wait_seconds`` for data.
        """
        counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """Check that all blocks of this rank were given back. May be called twice.

        Raises:
            BlockError: Naming the owner of a block that was not given back.
        """
        self._pool.close()

    def _bring_all(
        self, assembly: _Assembly, agreed: Agreed, arriving: Optional[ArrivingItem]
    ) -> Agreed:
        """Tick and receive until all ranks hold the item; return the last agreement."""
        since = time.monotonic()
        while True:
            self._raise_if_failed(agreed, assembly.last, arriving)
            progress = assembly.begin(agreed)
            since = time.monotonic() if progress else since
            self._receive(assembly, agreed, arriving)
            if agreed.ready:
                return agreed
            if arriving is not None and not self._error:
                self._await_change(arriving, agreed, since)
            agreed = self._tick(arriving)

    def _tick(self, arriving: Optional[ArrivingItem]) -> Agreed:
        return read_agreed(self._ask(arriving, self._error is not None))

    def _ask(
        self, arriving: Optional[ArrivingItem], failed: bool, local_checksum: Optional[int] = None
    ) -> Facts:
        facts: Dict[str, int] = {}
        if arriving is not None:
            facts = dict(owner=self._me)
            try:
                facts = facts_of(arriving, self._me)
            except Exception:
                # Every rank raises the error after this tick: _reason reads the item again for its
                # text.
                failed = True
        if failed:
            facts['state'] = int(State.FAILED)
        if local_checksum is not None:
            facts['checksum'] = local_checksum
        start = time.perf_counter()
        self._facts = self._consensus.tick(**facts)
        self._count(ticks=1, tick_seconds=time.perf_counter() - start)
        return self._facts

    def _check_announced(self, agreed: Agreed, arriving: Optional[ArrivingItem]) -> None:
        """Remember an error if the item delivered is not the one that was announced."""
        is_owner = agreed.owner == self._me
        if is_owner != (arriving is not None) or (
            arriving is not None and arriving.number != agreed.item
        ):
            brought = 'none' if arriving is None else f'item {arriving.number}'
            self._error = StreamingError(
                f'rank {self._ranks[agreed.owner or 0]} announced item {agreed.item} as following, '
                f'and this rank brings {brought}. Deliver items in the order announced.'
            )

    def _raise_if_failed(
        self, agreed: Agreed, last: Agreed, arriving: Optional[ArrivingItem]
    ) -> None:
        """Raise the same error on all ranks if any of them failed. Collective in that case only."""
        if agreed.has_many_owners:
            # agreed was read from these facts.
            assert self._facts is not None
            ranks = list(self._facts.by_rank('owner'))
            raise StreamingError(
                f'ranks {ranks} of one head replica all hold an item, expected '
                f'one rank: the others bring None.'
            )
        if agreed.state == State.FAILED:
            self._fail_together(agreed, self._reason(arriving))
        fault = fault_of(agreed, last)
        if fault is not None:
            source = '' if agreed.owner is None else f' of rank {self._ranks[agreed.owner]}'
            raise StreamingError(
                f'item {agreed.item}{source} cannot be delivered: {fault}. This '
                f'is a fault of what brings it.'
            )

    def _reason(self, arriving: Optional[ArrivingItem]) -> str:
        """Return the reason why this rank failed; empty if it did not."""
        if self._error is not None:
            return _text(self._error)
        if arriving is None:
            return ''
        if arriving.state == State.FAILED:
            return arriving.error or 'no reason was given'
        try:
            facts_of(arriving, self._me)
        except Exception as error:
            # The error is handed to all ranks, which raise it with this text.
            return _text(error)
        return ''

    def _fail_together(self, agreed: Agreed, reason: str) -> NoReturn:
        """Raise the reasons of all ranks on all ranks. Collective."""
        item = f'item {agreed.item}'
        raise_together(
            self._channel,
            self._error,
            item,
            text=reason,
            everywhere=lambda texts: StreamingError(
                f'{item} failed on '
                + '; '.join(f'rank {rank}: {text}' for rank, text in texts.items())
            ),
        )

    def _receive(
        self, assembly: _Assembly, agreed: Agreed, arriving: Optional[ArrivingItem]
    ) -> None:
        """Give all ranks the bytes that the owner has reported. Collective, in agreed pieces."""
        start = time.perf_counter()
        self._count(bytes=agreed.arrived - assembly.count)
        size = self._pool.block_bytes
        for begin in range(assembly.count, agreed.arrived, size):
            stop = min(begin + size, agreed.arrived)
            piece = self._piece(assembly, agreed, arriving, begin, stop)
            self._channel.broadcast(piece, self._ranks[agreed.owner or 0])
        assembly.count = agreed.arrived
        self._count(broadcast_seconds=time.perf_counter() - start)

    def _piece(
        self,
        assembly: _Assembly,
        agreed: Agreed,
        arriving: Optional[ArrivingItem],
        begin: int,
        stop: int,
    ) -> torch.Tensor:
        """Return bytes to send, or where to receive them.

        This never raises: an error is remembered, and the next tick reports it to all ranks.
        """
        try:
            if self._error is None:
                if self._me != agreed.owner:
                    return assembly.next_piece(begin, stop)
                assert arriving is not None
                data = arriving.read(begin, stop)
                if data.shape != (stop - begin,) or data.dtype != torch.uint8:
                    raise ValueError(f'read({begin}, {stop}) gave {tuple(data.shape)} {data.dtype}')
                assembly.host[begin:stop] = data
                return assembly.host[begin:stop]
        except Exception as error:
            # The error is handed to all ranks, which raise it in the next tick. If another attempt
            # has begun since the last tick, it is not an error: all ranks begin again.
            if arriving is None or arriving.attempt == agreed.attempt:
                self._error = error
        # The other ranks have entered a collective of this size.
        return torch.zeros(stop - begin, dtype=torch.uint8)

    def _await_change(self, arriving: ArrivingItem, reported: Agreed, since: float) -> None:
        """Return when the item has changed enough for a tick, or when the poll interval is over.

        In the second case the tick shows the other ranks that this one is alive.
        """
        start = time.monotonic()
        end = start + min(_POLL_SECONDS, self._timeout / 4)
        while self._error is None and not self._is_worth_a_tick(arriving, reported):
            now = time.monotonic()
            if now - since > self._timeout:
                total = 'an unknown number' if reported.total is None else reported.total
                self._error = StreamingError(
                    f'nothing came for {self._timeout:g} s; it is {arriving.state.name} with '
                    f'{reported.arrived} of {total} bytes. Look at the log of the encoders, or '
                    f'raise the timeout of the feature source.'
                )
            if now >= end or self._error is not None:
                break
            try:
                arriving.wait(end - now)
            except Exception as error:
                # The error is handed to all ranks, which raise it in the next tick.
                self._error = error
        self._count(wait_seconds=time.monotonic() - start)

    def _is_worth_a_tick(self, arriving: ArrivingItem, reported: Agreed) -> bool:
        state = arriving.state
        if arriving.attempt != reported.attempt or state != reported.state:
            return True
        return arriving.arrived - reported.arrived >= self._pool.block_bytes

    def _compare(
        self,
        local_checksum: int,
        agreed: Agreed,
        arriving: Optional[ArrivingItem],
        following: Optional[ArrivingItem],
    ) -> Agreed:
        """Check that all ranks hold the same bytes; return the agreement about the next item."""
        facts = self._ask(following, False, local_checksum)
        if facts.min('checksum') == _BROKEN:
            self._fail_together(agreed, self._reason(arriving))
        if not facts.agree('checksum'):
            sums = facts.by_rank('checksum')
            raise StreamingError(
                f'item {agreed.item} arrived differently on the ranks: checksums '
                f'by rank {sums}. Memory or network of one of them is at fault.'
            )
        self._count(items=1)
        return read_agreed(facts)

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._counts[name] = self._counts.get(name, 0.0) + value


class _Assembly:
    """The bytes of one item, assembled on this rank in order. Some may still be in blocks.

    Args:
        pool: Blocks of this rank.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._owner = (-1, 0)
        self._unused: List[int] = []
        # Full blocks: block, first byte, end.
        self._full: List[Tuple[int, int, int]] = []
        self.last = Agreed(None)
        self.host = torch.empty(0, dtype=torch.uint8)
        self.count = 0

    def begin(self, agreed: Agreed) -> bool:
        """Prepare for the bytes of this tick; return whether anything has changed."""
        last, self.last = self.last, agreed
        # A new attempt makes the bytes of the previous one invalid.
        if agreed.attempt != last.attempt:
            self.release()
            self.count = 0
        if agreed.total is not None and len(self.host) != agreed.total:
            self.host = host_bytes(agreed.total)
        self._owner = (agreed.item, agreed.attempt)
        return last != agreed

    def next_piece(self, begin: int, stop: int) -> torch.Tensor:
        """Return the first bytes of a block, into which the item's bytes are to be received.

        Raises:
            StreamingError: If the pool has no free block.
        """
        if not self._unused:
            if not self._pool.free:
                self._empty()
            needed = -(-(len(self.host) - begin) // self._pool.block_bytes)
            count = min(needed, self._pool.free)
            if not count:
                raise StreamingError(
                    'no block of the pool is free on this rank, and none of them '
                    'holds this item: something else keeps them.'
                )
            self._unused = list(self._pool.alloc(count, self._owner))
        block = self._unused.pop(0)
        self._full.append((block, begin, stop))
        return self._pool.data(block, self._owner)[: stop - begin]

    def finish(self) -> torch.Tensor:
        """Copy what is still in blocks; return all bytes, uint8 (total,)."""
        self._empty()
        return self.host

    def release(self) -> None:
        """Free all blocks that are still taken."""
        blocks = self._unused + [block for block, _, _ in self._full]
        self._unused, self._full = [], []
        if blocks:
            self._pool.release(blocks, self._owner)

    def _empty(self) -> None:
        for block, begin, stop in self._full:
            self.host[begin:stop] = self._pool.data(block, self._owner)[: stop - begin]
        full, self._full = self._full, []
        if full:
            self._pool.release([block for block, _, _ in full], self._owner)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StreamingError) else error_text(error)
