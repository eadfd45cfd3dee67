"""The encoder's side: encodes what heads ask for, and sends what they have blocks for."""
from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from mapsage.features.source import Encode
from mapsage.features.wire.header import Header, Kind
from mapsage.features.wire.link import Link, LinkError, Receiver
from mapsage.features.wire.payload import Layout, Payload, split

# Number of encoded items that may wait until their head has blocks for them. Two keep the head
# busy; more of them only fill memory.
_WAITING = 2
_CLOSE_SECONDS = 10.0
_MAX_TEXT = 4000  # bytes of an error text that are sent

_Key = Tuple[int, int]  # item, attempt


@dataclass
class _Request:
    header: Header
    images: torch.Tensor


@dataclass
class _Head:
    """The requests of one head, and the encoded items that it has not received in full."""

    requests: Dict[_Key, _Request] = field(default_factory=dict)
    waiting: Dict[_Key, Payload] = field(default_factory=dict)
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
        return key if sum(each < key for each in self.waiting) < _WAITING else None


def serve(links: Sequence[Link], encode: Encode, device: torch.device, digest: int = 0,
          heartbeat: float = 1.0) -> Dict[str, float]:
    """Encode for heads until all of them have closed their links or gone away.

    Heads take turns. If ``encode`` raises an exception, its text is sent to the head, which asks
    another encoder; the next item is encoded normally. Heartbeats are sent between items, and while
    there is no item, by the thread that encodes. So an encoder that hangs sends none, and neither
    does an encoder that takes long for a single item.

    Args:
        links: Links to the heads, one per head, not started.
        encode: Frozen encoder, called without autograd on the images that the head sent.
        device: Device on which ``encode`` wants the images.
        digest: Digest of the encoder's weights, 0 to 2**63 - 1, which heads compare with theirs.
        heartbeat: Seconds between heartbeats; a small part of the links' ``peer_timeout``.

    Returns:
        ``items`` that were encoded, items that ``failed``, ``bytes`` of features offered,
        ``encode_seconds``, and ``lost`` links.

    Raises:
        LinkError: If every head went away without closing its link, with the reasons.
    """
    encoder = _Encoder(links, encode, device, digest, heartbeat)
    for link in links:
        link.start(encoder)
    try:
        return encoder.run()
    finally:
        for link in links:
            link.close(_CLOSE_SECONDS)


class _Encoder(Receiver):
    def __init__(self, links: Sequence[Link], encode: Encode, device: torch.device, digest: int,
                 heartbeat: float) -> None:
        self._encode, self._device, self._digest = encode, device, digest
        self._heartbeat = heartbeat
        self._heads: Mapping[Link, _Head] = {link: _Head() for link in links}
        self._turns: Deque[Link] = deque(links)
        self._changed = threading.Condition()
        self._last_beat = 0.0
        self._counts = dict(items=0., failed=0., bytes=0., encode_seconds=0.)

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        return None

    def received(self, link: Link, header: Header, payload: torch.Tensor,
                 damage: Optional[str]) -> None:
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
                head.requests.pop(key, None)
                head.waiting.pop(key, None)
            elif header.kind != Kind.HEARTBEAT:
                raise LinkError(f'{header.kind.name} of item {header.item} came to an encoder.')
            self._changed.notify_all()

    def lost(self, link: Link, reason: Optional[str]) -> None:
        with self._changed:
            head = self._heads[link]
            head.requests.clear()
            head.waiting.clear()
            head.gone, head.reason = True, reason
            self._changed.notify_all()

    def run(self) -> Dict[str, float]:
        while True:
            self._beat()
            with self._changed:
                if all(head.gone for head in self._heads.values()):
                    return self._end()
                chosen = self._choose()
                if chosen is None:
                    self._changed.wait(self._heartbeat)
                    continue
            self._work_on(*chosen)

    def _end(self) -> Dict[str, float]:
        reasons = [f'{link.peer}: {head.reason}' for link, head in self._heads.items()
                   if head.reason is not None]
        if reasons and len(reasons) == len(self._heads):
            raise LinkError(f"all heads went away without closing: {'; '.join(reasons)}. Look at "
                            f'their logs.')
        return dict(self._counts, lost=float(len(reasons)))

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= self._heartbeat:
            self._last_beat = now
            for link in self._heads:
                link.send(Header(Kind.HEARTBEAT))

    def _choose(self) -> Optional[Tuple[Link, _Key, _Request]]:
        """Return the next request to encode; the heads take turns."""
        for link in list(self._turns):
            head = self._heads[link]
            key = head.next_request()
            if key is not None:
                self._turns.remove(link)
                self._turns.append(link)
                return link, key, head.requests[key]
        return None

    def _work_on(self, link: Link, key: _Key, request: _Request) -> None:
        start = time.monotonic()
        try:
            layout, data = self._encoded(request)
        except Exception as error:  # sent to the head, which may ask another encoder
            with self._changed:
                self._refuse(link, key, f'encoding raised {type(error).__name__}: {error}')
            self._counts['failed'] += 1
            return
        self._counts['items'] += 1
        self._counts['bytes'] += len(data)
        self._counts['encode_seconds'] += time.monotonic() - start
        with self._changed:
            head = self._heads[link]
            if head.requests.pop(key, None) is None:
                return  # the head canceled it meanwhile
            if len(data):
                head.waiting[key] = data
            link.send(Header(Kind.OFFER, key[0], key[1], total=len(data), layout=layout,
                             digest=self._digest))

    def _encoded(self, request: _Request) -> Tuple[Layout, Payload]:
        assert request.header.layout is not None
        images, = request.header.layout.unpack(request.images, self._device)
        with torch.no_grad():
            return split(self._encode(images), request.header.wire)

    def _send_granted(self, link: Link, credit: Header, payload: torch.Tensor) -> None:
        """Queue the bytes that a credit allows, one message per block."""
        key = credit.item, credit.attempt
        data = self._heads[link].waiting.get(key)
        if data is None:
            return  # the head canceled the item while this credit was on its way
        blocks = np.frombuffer(payload.numpy(), np.int64).reshape(-1, 2).tolist()
        stop = credit.offset + credit.span
        if stop > len(data) or len(blocks) * credit.block_bytes < credit.span:
            raise LinkError(f'a credit for bytes {credit.offset} to {stop} in {len(blocks)} '
                            f'block(s) of {credit.block_bytes}, for item {credit.item} of '
                            f'{len(data)} bytes.')
        for (block, generation), begin in zip(blocks, range(credit.offset, stop,
                                                            credit.block_bytes)):
            piece = data.read(begin, min(begin + credit.block_bytes, stop))
            link.send(Header(Kind.DATA, *key, total=len(data), offset=begin, block=block,
                             generation=generation), piece)
        if stop == len(data):
            del self._heads[link].waiting[key]

    def _refuse(self, link: Link, key: _Key, why: str) -> None:
        head = self._heads[link]
        head.requests.pop(key, None)
        head.waiting.pop(key, None)
        text = torch.tensor(list(why.encode()[:_MAX_TEXT]), dtype=torch.uint8)
        link.send(Header(Kind.FAILED, *key), text)
