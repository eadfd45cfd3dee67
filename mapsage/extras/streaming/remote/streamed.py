"""The feature source of a head whose features other ranks compute.

:class:`Streamed` is the interface to the training; `inbox.py` does the work.
"""

from __future__ import annotations

import time
from typing import Dict, Optional, Sequence

import torch

from mapsage.extras.streaming.source import Encode, Features, FeatureSource, Item, StreamingError
from mapsage.extras.streaming.wire.link import Link
from mapsage.extras.streaming.wire.payload import DTYPES

from .blocks import BlockPool
from .inbox import Inbox
from .item import RemoteItem
from .notices import Log, log_plainly
from .state import State

_CLOSE_SECONDS = 10.0
# Without pool_bytes, a pool has at most this many bytes, but at least the blocks of this many
# items.
_POOL_BYTES, _POOL_ITEMS = 256 * 2**20, 4


def check_settings(
    pool_bytes: Optional[int],
    block_bytes: int,
    timeout: float,
    wire: Optional[torch.dtype],
    ahead: Optional[int],
) -> None:
    """Check the settings of :class:`Streamed` before links exist.

    Raises:
        ValueError: If a size, a time or ``wire`` is out of range.
    """
    if not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds.')
    if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
        raise ValueError(f'ahead={ahead!r}, expected a number of batches, 0 or more, or None.')
    if wire is not None and (wire not in DTYPES or not wire.is_floating_point):
        raise ValueError(
            f'wire={wire!r}, expected None or a floating-point dtype of '
            f'{", ".join(map(str, DTYPES))}.'
        )
    if not 0 < block_bytes <= (block_bytes if pool_bytes is None else pool_bytes):
        raise ValueError(
            f'pool_bytes={pool_bytes}, block_bytes={block_bytes}, expected a '
            f'positive block that fits the pool.'
        )


class Streamed(FeatureSource):
    """Asks encoder ranks for items and receives their features in blocks of host memory.

    An item goes to the least busy encoder. If that encoder fails, dies or takes too long, the item
    goes to the next one, once to each encoder, and in the end it is encoded locally. Features have
    the bytes that ``encode`` computes locally; if ``wire`` rounds them, local ones are rounded too.

    Args:
        links: Links to the encoders, from :func:`~mapsage.extras.streaming.wire.opening.open_links`.
        device: Device on which the head wants the features.
        encode: Frozen encoder on ``device``, for items for which no encoder rank is left. Without
            it these items fail.
        digest: Digest of the encoder's weights, 0 to 2**63 - 1, as encoders give it to ``serve``.
        pool_bytes: Host memory for features on their way. An item that needs more is an error. If
            too little of it is free, an item arrives in parts, and the next items wait. If None,
            the pool is made for the first item, and grows if a later one is larger.
        block_bytes: Most bytes that one message carries; ``pool_bytes`` is cut to a multiple of it.
        timeout: Seconds that the head waits for an encoder. The item then goes to another one, and
            after as long again it is encoded locally.
        wire: Dtype in which features travel, for example ``torch.bfloat16``; the computed dtype
            when None. They become the computed dtype again when they have arrived.
        ahead: Number of items to request before the first is needed; two per encoder when None.
        log: Function that logs a text at a level of :mod:`logging`.

    Raises:
        ValueError: If a size, a time or ``wire`` is out of range, or ``links`` is empty.
    """

    def __init__(
        self,
        links: Sequence[Link],
        device: torch.device,
        encode: Optional[Encode] = None,
        digest: int = 0,
        pool_bytes: Optional[int] = None,
        block_bytes: int = 4 * 2**20,
        timeout: float = 600.0,
        wire: Optional[torch.dtype] = None,
        ahead: Optional[int] = None,
        log: Log = log_plainly,
    ) -> None:
        if not links:
            raise ValueError('links=[], expected a link to one encoder or more.')
        check_settings(pool_bytes, block_bytes, timeout, wire, ahead)
        self.ahead = 2 * len(links) if ahead is None else ahead
        self._device = device
        blocks = 1 if pool_bytes is None else pool_bytes // block_bytes
        self._inbox = Inbox(
            links,
            BlockPool(blocks, block_bytes),
            encode,
            device,
            digest,
            timeout,
            wire,
            log,
            self._blocks_for if pool_bytes is None else None,
        )
        self._block_bytes = block_bytes
        self._items: Dict[int, RemoteItem] = {}
        self._waited, self._closed = 0.0, False
        self._inbox.start()

    def request(self, item: Item) -> None:
        """Ask an encoder for an item; return once its images are in host memory.

        Raises:
            ValueError: If its number is not larger than those requested before.
        """
        self._items[item.number] = self._inbox.request(item.number, item.images)

    def arriving(self, number: int) -> RemoteItem:
        """Return a requested item while it arrives, for the caller that delivers it to many ranks.

        The caller must :meth:`release` or :meth:`drop` the item in the end.

        Raises:
            StreamingError: If the item was not requested, or was released.
        """
        if number not in self._items:
            raise StreamingError(
                f'item {number} was not requested, or its features were taken: '
                f'request each item once, then take its features once.'
            )
        return self._items[number]

    def release(self, number: int) -> None:
        """Free the blocks of a READY or FAILED item.

        Raises:
            StreamingError: If the item is in another state, was not requested, or was released.
        """
        item = self.arriving(number)
        if item.state not in (State.READY, State.FAILED):
            raise StreamingError(
                f'item {number} is {item.state.name}, expected READY or FAILED to release it.'
            )
        del self._items[number]
        self._inbox.release(item)

    def drop(self, number: int) -> None:
        """Cancel an item in any state and free its blocks. Does nothing if it was released."""
        item = self._items.pop(number, None)
        if item is not None:
            self._inbox.drop(item)

    def features(self, item: Item) -> Features:
        """Return the features of a requested item, on the head's device, detached.

        Raises:
            StreamingError: If there are none, with the cause at every encoder that was asked.
        """
        remote, begin = self.arriving(item.number), time.monotonic()
        while remote.state not in (State.READY, State.FAILED):
            remote.wait(1.0)
        self._waited += time.monotonic() - begin
        try:
            if remote.state == State.FAILED:
                raise StreamingError(
                    f'{remote.error} Look at the logs of the encoders.', remote.failed_encoders
                )
            assert remote.layout is not None and remote.total is not None
            return remote.layout.unpack(remote.read(0, remote.total), self._device)
        finally:
            self.release(item.number)

    def _blocks_for(self, item: int) -> int:
        """Return how many blocks a pool without pool_bytes needs for items of ``item`` blocks."""
        most = _POOL_BYTES // self._block_bytes
        return max(min((self.ahead + 1) * item, most), _POOL_ITEMS * item)

    def report(self) -> Dict[str, float]:
        """Return what happened since the last report.

        Returns:
            ``waited``: seconds for which the head stood still until features arrived. And each of
            these that is not 0: ``bytes`` that arrived, ``items from <encoder>``, ``failovers`` to
            another encoder, ``local`` items, ``partial`` grants, ``duplicates`` that were dropped,
            ``lost`` connections and those that were ``reopened``.
        """
        waited, self._waited = self._waited, 0.0
        return dict(self._inbox.counts(), waited=waited)

    def close(self) -> None:
        """Close the links and check that all blocks came back. May be called twice.

        Raises:
            BlockError: Naming the items whose blocks were not given back.
        """
        if not self._closed:
            self._closed = True
            self._items.clear()
            self._inbox.close(_CLOSE_SECONDS)
