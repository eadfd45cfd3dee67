"""Encoders and heads as forked processes, and what all of them compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist
from forked import PATIENT, fork_ranks

from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import Item
from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.link import Link
from mapsage.extras.streaming.wire.opening import open_links

CPU = torch.device('cpu')
BLOCK = 4096  # bytes
PEER_TIMEOUT = 15.0  # seconds; longer than a busy machine stops a process


def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Features of two levels and odd sizes that depend on every pixel."""
    fine = torch.cat([images / 7, images.flip(-1).sqrt()], 1)
    return fine, fine.cumsum(-1)[..., ::2, ::3].contiguous()


def image(number: int, size: int = 24) -> torch.Tensor:
    """The images of an item, of a size of its own."""
    generator = torch.Generator().manual_seed(number)
    height, width = size + number % 5, size + 3 * (number % 3)
    return torch.randint(0, 256, (2, 3, height, width), generator=generator).float()


def item(number: int, images: Any = None) -> Item:
    """Item ``number``."""
    images = image(number) if images is None else images
    return Item(number, tuple((number, (i,)) for i in range(len(images))), images)


def fetch(source: Streamed, items: Sequence[Item], wire: Any = None) -> None:
    """Take items through a source as a hook does, each bit-equal to what is computed here."""
    for position in range(min(source.ahead, len(items))):
        source.request(items[position])
    for position, each in enumerate(items):
        following = position + source.ahead
        if following < len(items):
            source.request(items[following])
        check(source.features(each), each.images, wire)


def check(features: Sequence[torch.Tensor], images: torch.Tensor, wire: Any = None) -> None:
    """Assert that features have the shapes, dtypes and bits of those computed locally."""
    expected = [
        level if wire is None else level.to(wire).to(level.dtype) for level in encode(images)
    ]
    assert [each.shape for each in features] == [each.shape for each in expected]
    for got, right in zip(features, expected):
        assert got.dtype == right.dtype and not got.requires_grad
        assert torch.equal(got, right)


def run_job(
    head: Callable[..., Any],
    encoder: Callable[..., Any],
    heads: int,
    encoders: int,
    folder: Path,
    *args: Any,
    peer_timeout: float = PEER_TIMEOUT,
    timeout: float = PATIENT,
) -> List[Any]:
    """Return what ``head(links, *args)`` and ``encoder(links, *args)`` return, heads first."""
    return fork_ranks(
        _rank,
        heads + encoders,
        folder,
        head,
        encoder,
        heads,
        encoders,
        str(folder / 'store'),
        peer_timeout,
        args,
        timeout=timeout,
    )


def _rank(
    head: Callable[..., Any],
    encoder: Callable[..., Any],
    heads: int,
    encoders: int,
    path: str,
    peer_timeout: float,
    args: Any,
) -> Any:
    rank = int(os.environ['RANK'])
    torch.set_num_threads(1)
    links = open_links(
        dist.FileStore(path, -1),
        rank,
        range(heads, heads + encoders),
        range(heads),
        timeout=60,
        peer_timeout=peer_timeout,
    )
    role = head if rank < heads else encoder
    return role([links[peer] for peer in sorted(links)], *args)


def serve_well(links: List[Link], *args: Any) -> Dict[str, float]:
    """An encoder without a fault."""
    return serve(links, encode, CPU)


def first_encoder(links: Sequence[Link], heads: int = 1) -> bool:
    """Whether this process is the first encoder of a job."""
    return int(os.environ['RANK']) == heads


def tampered(link: Link, tamper: Callable[[Header, torch.Tensor], Any]) -> Link:
    """Let ``tamper`` see each message of DATA before it is sent; it returns what is sent instead.

    It returns a list of (header, payload).
    """
    send = link.send

    def instead(header: Header, payload: Any = None) -> None:
        if header.kind == Kind.DATA:
            for each in tamper(header, payload):
                send(*each)
        else:
            send(header, payload)

    link.send = instead  # type: ignore[assignment]
    return link
