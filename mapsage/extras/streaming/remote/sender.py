"""The encoder's side: encodes the items that heads request, and sends their features.

An encoded item waits until its head grants blocks for it. So the memory of an encoder is bounded by
the number of items that may wait per head, and the memory of a head by its blocks.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from mapsage.distributed import error_text
from mapsage.extras.streaming.source import Encode, check_finite
from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.link import Link, LinkError, Receiver
from mapsage.extras.streaming.wire.payload import Layout, Payload, split

from .notices import Log, cause_of, log_plainly

# Number of encoded items that may wait until their head has blocks for them. Two keep the head
# busy; more of them only fill memory.
_WAITING = 2
_CLOSE_SECONDS = 10.0
# Most bytes of an error text that are sent.
_MAX_TEXT = 4000

# Number and attempt of an item.
_Key = Tuple[int, int]


@dataclass
class _Request:
    header: Header
    images: torch.Tensor


@dataclass
class _Head:
    """The requests of one head, and the encoded items that it has not received in full."""

    requests: Dict[_Key, _Request] = field(default_factory=dict)
    waiting: Dict[_Key, Payload] = field(default_factory=dict)
    # Items whose cancelation is to be answered.
    canceled: List[_Key] = field(default_factory=list)
    reason: Optional[str] = None
    gone: bool = False

    def next_request(self) -> Optional[_Key]:
        """Return the request with the lowest number, unless too many items wait before it.

        A head gives blocks in the order of items. So only encoded items with a lower number count:
        an item that failed on another encoder must be encoded however many later items wait, or
        none of them would ever get a block.
        """
        if not self.requests:
            return None
        key = min(self.requests)
        return key if sum(waiting < key for waiting in self.waiting) < _WAITING else None


def serve(
    links: Sequence[Link],
    encode: Encode,
    device: torch.device,
    digest: int = 0,
    log: Log = log_plainly,
) -> Dict[str, float]:
    """Encode for heads until all of them have closed their links or disappeared.

    Requests of the heads are served in rotation. If ``encode`` raises an exception or returns
    features that are not finite, the text of the error is sent to the head, which asks another
    encoder; the next item is encoded normally. The thread that encodes answers each request, so
    that a head learns whether it still works. Heartbeats of the links prove that the process lives,
    however long an item takes.

    If a head disappears without closing its link, the encoder waits ``peer_timeout`` seconds for
    it. An encoder without heads ends; the logs of the heads say why they ended.

    Args:
        links: Links to the heads, one per head, not started.
        encode: Frozen encoder, called without autograd on the images that the head sent.
        device: Device on which ``encode`` wants the images.
        digest: Digest of the encoder's weights, 0 to 2**63 - 1, which heads compare with theirs.
        log: Function that logs a text at a level of :mod:`logging`.

    Returns:
        ``items`` that were encoded, items that ``failed``, ``bytes`` of features offered,
        ``encode_seconds``, and ``lost`` links, which were not opened again.
    """
    encoder = _Encoder(links, encode, device, digest, log)
    for link in links:
        link.start(encoder)
    try:
        return encoder.run()
    finally:
        for link in links:
            link.close(_CLOSE_SECONDS)


class _Encoder(Receiver):
    def __init__(
        self, links: Sequence[Link], encode: Encode, device: torch.device, digest: int, log: Log
    ) -> None:
        self._encode, self._device, self._digest = encode, device, digest
        self._log = log
        self._logged: Set[str] = set()
        self._heads: Mapping[Link, _Head] = {link: _Head() for link in links}
        self._queue: Deque[Link] = deque(links)
        self._changed = threading.Condition()
        self._counts = dict(items=0.0, failed=0.0, bytes=0.0, encode_seconds=0.0)

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        return None

    def received(
        self, link: Link, header: Header, payload: torch.Tensor, damage: Optional[str]
    ) -> None:
        key = header.item, header.attempt
        head = self._heads[link]
        with self._changed:
            if damage is not None:
                self._refuse(link, key, f'{header.kind.name}: {damage}')
            elif header.kind == Kind.REQUEST:
                head.requests[key] = _Request(header, payload)
            elif header.kind == Kind.CREDIT:
                self._send_granted(link, header, payload)
            elif header.kind == Kind.FAILED:
                if head.requests.pop(key, None) is not None:
                    head.canceled.append(key)
                head.waiting.pop(key, None)
            else:
                raise LinkError(f'{header.kind.name} of item {header.item} came to an encoder.')
            self._changed.notify_all()

    def lost(self, link: Link, reason: Optional[str]) -> None:
        with self._changed:
            head = self._heads[link]
            head.requests.clear()
            head.waiting.clear()
            head.canceled.clear()
            if head.reason is None and reason is not None:
                self._log(logging.WARNING, f'the connection to {link.peer} is lost: {reason}')
            head.gone, head.reason = not link.reopens or reason is None, reason
            self._changed.notify_all()

    def opened(self, link: Link) -> None:
        with self._changed:
            self._heads[link].gone, self._heads[link].reason = False, None
            self._log(logging.WARNING, f'the connection to {link.peer} is open again')

    def run(self) -> Dict[str, float]:
        while True:
            with self._changed:
                self._answer_canceled()
                if all(head.gone for head in self._heads.values()):
                    return self._end()
                chosen = self._choose()
                if chosen is None:
                    self._changed.wait()
                    continue
            self._work_on(*chosen)

    def _end(self) -> Dict[str, float]:
        reasons = [
            f'{link.peer}: {head.reason}'
            for link, head in self._heads.items()
            if head.reason is not None
        ]
        if reasons:
            self._log(
                logging.WARNING,
                f'{len(reasons)} of {len(self._heads)} head(s) went away without closing: '
                f'{"; ".join(reasons)}. Look at their logs.',
            )
        return dict(self._counts, lost=float(len(reasons)))

    def _answer_canceled(self) -> None:
        for link, head in self._heads.items():
            for key in head.canceled:
                link.send(Header(Kind.FAILED, *key))
            head.canceled.clear()

    def _choose(self) -> Optional[Tuple[Link, _Key, _Request]]:
        """Return the next request to encode; the heads take turns."""
        for link in list(self._queue):
            head = self._heads[link]
            key = head.next_request()
            if key is not None:
                self._queue.remove(link)
                self._queue.append(link)
                return link, key, head.requests[key]
        return None

    def _work_on(self, link: Link, key: _Key, request: _Request) -> None:
        start = time.monotonic()
        try:
            layout, data = self._encode_request(request)
        except Exception as error:
            # The head gets the error, and may ask another encoder.
            self._log_once(error)
            with self._changed:
                self._refuse(link, key, f'encoding raised {error_text(error)}')
            self._counts['failed'] += 1
            return
        self._counts['items'] += 1
        self._counts['bytes'] += len(data)
        self._counts['encode_seconds'] += time.monotonic() - start
        with self._changed:
            head = self._heads[link]
            if head.requests.pop(key, None) is None:
                # The head canceled it meanwhile; _answer_canceled answers.
                return
            if len(data):
                head.waiting[key] = data
            link.send(
                Header(
                    Kind.OFFER, key[0], key[1], total=len(data), layout=layout, digest=self._digest
                )
            )

    def _log_once(self, error: Exception) -> None:
        """Log an exception of the encoder with its traceback, once for each cause."""
        cause = cause_of(error_text(error))
        if cause not in self._logged:
            self._logged.add(cause)
            trace = ''.join(traceback.format_exception(type(error), error, error.__traceback__))
            self._log(
                logging.WARNING,
                f'encoding an item raised an exception, which is logged '
                f'once and sent to the head each time:\n{trace}',
            )

    def _encode_request(self, request: _Request) -> Tuple[Layout, Payload]:
        assert request.header.layout is not None
        (images,) = request.header.layout.unpack(request.images, self._device)
        with torch.no_grad():
            features = self._encode(images)
        check_finite(features, images)
        return split(features, request.header.wire)

    def _send_granted(self, link: Link, credit: Header, payload: torch.Tensor) -> None:
        """Queue the bytes that a credit allows, one message per block."""
        key = credit.item, credit.attempt
        data = self._heads[link].waiting.get(key)
        if data is None:
            # The head canceled the item while this credit was on its way.
            return
        blocks = np.frombuffer(payload.numpy(), np.int64).reshape(-1, 2).tolist()
        stop = credit.offset + credit.span
        if stop > len(data) or len(blocks) * credit.block_bytes < credit.span:
            raise LinkError(
                f'a credit for bytes {credit.offset} to {stop} in {len(blocks)} '
                f'block(s) of {credit.block_bytes}, for item {credit.item} of '
                f'{len(data)} bytes.'
            )
        for (block, generation), begin in zip(
            blocks, range(credit.offset, stop, credit.block_bytes)
        ):
            piece = data.read(begin, min(begin + credit.block_bytes, stop))
            link.send(
                Header(
                    Kind.DATA,
                    *key,
                    total=len(data),
                    offset=begin,
                    block=block,
                    generation=generation,
                ),
                piece,
            )
        if stop == len(data):
            del self._heads[link].waiting[key]

    def _refuse(self, link: Link, key: _Key, reason: str) -> None:
        head = self._heads[link]
        head.requests.pop(key, None)
        head.waiting.pop(key, None)
        text = torch.tensor(
            list(reason.encode('utf-8', 'backslashreplace')[:_MAX_TEXT]), dtype=torch.uint8
        )
        link.send(Header(Kind.FAILED, *key), text)
