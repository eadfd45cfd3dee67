"""Features from encoder ranks, over links, for one head."""
from __future__ import annotations

import time
from typing import Dict, Optional, Sequence

import torch

from mapsage.features.source import Encode, Features, FeatureSource, Item, StreamingError
from mapsage.features.wire.link import Link
from mapsage.features.wire.payload import DTYPES

from .arriving import Arriving
from .blocks import BlockPool
from .inbox import Inbox
from .state import State

_CLOSE_SECONDS = 10.0


class Streamed(FeatureSource):
    """Asks encoder ranks for items and receives their features in blocks of host memory.

    An item goes to the least busy encoder. Where that fails, dies, or is overdue, it goes to the
    next, each encoder once, and at last it is encoded in place. Features have the bytes that
    ``encode`` gives in place, unless ``wire`` rounds them; then both are rounded.

    Args:
        links: To the encoders, as :func:`~mapsage.features.wire.link.open_links` made them. Their
            ``peer_timeout`` must be longer than an encoder computes at one item.
        device: Where the head wants the features.
        encode: The frozen encoder on ``device``, for items no encoder is left for; they fail when
            None.
        digest: Of the encoder's weights, 0 to 2**63 - 1, as encoders give it to ``serve``.
        pool_bytes: Host memory for features on their way. An item that needs more is an error;
            items beyond it wait, and one that finds too little room comes in parts.
        block_bytes: What one message carries at most. ``pool_bytes`` is cut to a multiple of it.
        timeout: Seconds that one attempt may take while the head waits for it.
        wire: Dtype in which features travel, for example ``torch.bfloat16``; as computed when None.
            They arrive in the dtype that was computed.
        ahead: Items worth requesting before the first is needed; two an encoder when None.

    Raises:
        ValueError: If a size, a time or ``wire`` is not usable, or links are missing.
    """

    def __init__(self, links: Sequence[Link], device: torch.device,
                 encode: Optional[Encode] = None, digest: int = 0, pool_bytes: int = 256 * 2**20,
                 block_bytes: int = 4 * 2**20, timeout: float = 600.,
                 wire: Optional[torch.dtype] = None, ahead: Optional[int] = None) -> None:
        if not links:
            raise ValueError('links=[], expected a link to one encoder or more.')
        if not timeout > 0:
            raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds.')
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool)
                                  or ahead < 0):
            raise ValueError(f'ahead={ahead!r}, expected a number of batches, 0 or more, or None.')
        if wire is not None and (wire not in DTYPES or not wire.is_floating_point):
            raise ValueError(f'wire={wire!r}, expected None or a floating-point dtype of '
                             f'{", ".join(map(str, DTYPES))}.')
        if not 0 < block_bytes <= pool_bytes:
            raise ValueError(f'pool_bytes={pool_bytes}, block_bytes={block_bytes}, expected a '
                             f'positive block that fits the pool.')
        self.ahead = 2 * len(links) if ahead is None else ahead
        self._device = device
        self._inbox = Inbox(links, BlockPool(pool_bytes // block_bytes, block_bytes), encode,
                            device, digest, timeout, wire)
        self._items: Dict[int, Arriving] = {}
        self._waited, self._closed = 0.0, False
        self._inbox.start()

    def request(self, item: Item) -> None:
        """Ask an encoder for an item. Returns once its images are in host memory.

        Raises:
            ValueError: If its number is not larger than those before.
        """
        self._items[item.number] = self._inbox.request(item.number, item.images)

    def arriving(self, number: int) -> Arriving:
        """Return an item that was requested as it comes, for who delivers it to several ranks.

        :meth:`release` it in the end.

        Raises:
            StreamingError: If it was not requested, or is released.
        """
        if number not in self._items:
            raise StreamingError(f'item {number} was not requested, or its features were taken: '
                                 f'request each item once, then take its features once.')
        return self._items[number]

    def release(self, number: int) -> None:
        """Give back what an item holds that is READY or FAILED.

        Raises:
            StreamingError: If it is neither, was not requested, or is released.
        """
        arriving = self.arriving(number)
        if arriving.state not in (State.READY, State.FAILED):
            raise StreamingError(f'item {number} is {arriving.state.name}, expected READY or '
                                 f'FAILED to release it.')
        del self._items[number]
        self._inbox.release(arriving)

    def drop(self, number: int) -> None:
        """Give up an item, whatever became of it; nothing happens if it was released."""
        arriving = self._items.pop(number, None)
        if arriving is not None:
            self._inbox.drop(arriving)

    def features(self, item: Item) -> Features:
        """Return the features of an item that was requested, on the head's device, detached.

        Raises:
            StreamingError: If they cannot be had, with the cause at every encoder that was asked.
        """
        arriving, begin = self.arriving(item.number), time.monotonic()
        while arriving.state not in (State.READY, State.FAILED):
            arriving.wait(1.0)
        self._waited += time.monotonic() - begin
        try:
            if arriving.state == State.FAILED:
                raise StreamingError(f'{arriving.error} Look at the logs of the encoders.')
            assert arriving.layout is not None and arriving.total is not None
            return arriving.layout.unpack(arriving.read(0, arriving.total), self._device)
        finally:
            self.release(item.number)

    def report(self) -> Dict[str, float]:
        """Return what happened since the last report.

        Returns:
            ``waited``: seconds the head stood still for features. What occurred of: ``bytes`` that
            came, ``items from <encoder>``, ``failovers`` to another encoder, ``local`` items,
            ``partial`` grants, ``duplicates`` that were dropped, ``lost`` links.
        """
        waited, self._waited = self._waited, 0.0
        return dict(self._inbox.counts(), waited=waited)

    def close(self) -> None:
        """Close the links and check that all blocks came back. May be called twice.

        Raises:
            BlockError: Naming what kept a block.
        """
        if not self._closed:
            self._closed = True
            self._items.clear()
            self._inbox.close(_CLOSE_SECONDS)
