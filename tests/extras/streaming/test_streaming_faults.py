"""A fault on the way ends in the right features or in one named error, and no block is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from forked import DIED
from link_pairs import damage_sent
from streaming_ranks import (
    BLOCK,
    CPU,
    encode,
    fetch,
    first_encoder,
    image,
    item,
    run_job,
    serve_well,
    tampered,
)
from support import main_leg

from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import StreamingError
from mapsage.extras.streaming.wire.header import Header, Kind, encode_header
from mapsage.extras.streaming.wire.link import Link

pytestmark = main_leg
COUNT = 8  # items


class Damaging:
    """Changes one byte of the part that :meth:`chosen` chooses, as a bad cable would.

    Args:
        link: Link whose sent parts pass through here.
        payloads: Whether payloads are chosen, or headers.
        size: Least number of elements of a part that is chosen.
    """

    def __init__(self, link: Link, payloads: bool, size: int) -> None:
        self._payloads, self._size, self._hits = payloads, size, 0
        damage_sent(link, self.part)

    def chosen(self, part: torch.Tensor) -> bool:
        fits = (part.dtype == torch.uint8) == self._payloads and part.numel() >= self._size
        self._hits += fits
        return fits and self._hits == 5

    def part(self, part: torch.Tensor) -> torch.Tensor:
        if self.chosen(part):
            part = part.clone()
            part.numpy().view('u1')[part.numel() // 2] ^= 4
        return part


def take(
    links: List[Link],
    local: bool = True,
    timeout: float = 60,
    count: int = COUNT,
    pool_bytes: int = 30 * BLOCK,
) -> Dict[str, float]:
    source = Streamed(
        links,
        CPU,
        encode if local else None,
        block_bytes=BLOCK,
        pool_bytes=pool_bytes,
        timeout=timeout,
    )
    fetch(source, [item(number) for number in range(count)])
    report = source.report()
    source.close()  # raises where a block did not come back
    return report


def take_error(links: List[Link], timeout: float = 60) -> str:
    """Return the error of the first item that no encoder gives, where there is no other way."""
    source = Streamed(links, CPU, None, block_bytes=BLOCK, pool_bytes=30 * BLOCK, timeout=timeout)
    with pytest.raises(StreamingError) as error:
        fetch(source, [item(number) for number in range(COUNT)])
    source.close()
    return str(error.value)


def die_in_a_block(links: List[Link]) -> Any:
    """The first encoder dies between a header and its payload."""

    class Dying(Damaging):
        def part(self, part: torch.Tensor) -> torch.Tensor:
            if self.chosen(part):
                sock = link._connection.sock  # type: ignore[union-attr]
                sock.sendall(encode_header(Header(Kind.DATA, nbytes=len(part))).numpy())
                time.sleep(0.3)  # the head has the header and waits for the payload
                os.kill(os.getpid(), signal.SIGKILL)
            return part

    if first_encoder(links):
        for link in links:
            Dying(link, True, 64)
    return serve_well(links)


def test_an_encoder_killed_in_a_block(tmp_path):
    report, died, other = run_job(take, die_in_a_block, 1, 2, tmp_path / 'two')
    assert died == DIED and report['lost'] == 1 and report['failovers'] >= 1
    assert report['items from encoder rank 2'] + report.get('items from encoder rank 1', 0) == COUNT
    report, died = run_job(take, die_in_a_block, 1, 1, tmp_path / 'one')
    assert died == DIED and report['local'] >= COUNT - 2
    error, died = run_job(take_error, die_in_a_block, 1, 1, tmp_path / 'none')
    assert 'has no features: no encoder is left; encoder rank 1: it went away' in error


def take_or_die(links: List[Link]) -> Any:
    if os.environ['RANK'] == '0':
        return take(links)
    source = Streamed(links, CPU, encode, block_bytes=BLOCK, pool_bytes=30 * BLOCK)
    for number in range(2):
        source.request(item(number))
    source.features(item(0))
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_head_killed(tmp_path):
    report, died, served = run_job(take_or_die, serve_well, 2, 1, tmp_path)
    assert died == DIED and report['items from encoder rank 2'] == COUNT
    assert served['lost'] == 1


def damage(links: List[Link], tag: int, size: int) -> Any:
    if first_encoder(links):
        for link in links:
            Damaging(link, bool(tag), size)
    return serve_well(links)


def take_after(links: List[Link], *args: Any) -> Any:
    return take(links)


@pytest.mark.parametrize(('tag', 'lost'), [(0, 1), (1, 0)], ids=['header', 'payload'])
def test_damage_on_the_way(tag, lost, tmp_path):
    report, *_ = run_job(take_after, damage, 1, 2, tmp_path / 'two', tag, 50)
    assert report['failovers'] >= 1 and report.get('lost', 0) == lost
    assert 'local' not in report
    if lost:  # the connection is opened again, and the item comes over the next one
        report, _ = run_job(take_remotely, damage, 1, 1, tmp_path / 'one', tag, 50)
        assert (report['lost'], report['reopened'], report.get('local')) == (1, 1, None)
    else:
        error, _ = run_job(take_error_after, damage, 1, 1, tmp_path / 'one', tag, 50)
        assert 'encoder rank 1: ' in error and 'damaged on their way' in error


def take_remotely(links: List[Link], *args: Any) -> Any:
    return take(links, local=False)


def take_error_after(links: List[Link], *args: Any) -> str:
    return take_error(links)


def deliver_oddly(links: List[Link], how: str) -> Any:
    """The first encoder sends blocks twice, or first for a generation that is over."""

    def tamper(header: Header, payload: torch.Tensor) -> Any:
        if how == 'twice':
            return [(header, payload)] * 2
        garbage = torch.full_like(payload, 255)
        old = (
            replace(header, generation=header.generation + 1)
            if how == 'generation'
            else replace(header, attempt=header.attempt + 1)
            if how == 'attempt'
            else replace(header, block=(header.block + 1) % 30)
        )
        return [(old, garbage), (header, payload)]

    return serve_well([tampered(link, tamper) for link in links])


@pytest.mark.parametrize('how', ['twice', 'generation', 'attempt', 'block'])
def test_what_comes_twice_or_for_another_owner_is_dropped(how, tmp_path):
    report, served = run_job(take_after, deliver_oddly, 1, 1, tmp_path, how)
    blocks = sum(-(-nbytes // BLOCK) for nbytes in item_bytes())
    assert report['duplicates'] in (blocks - 1, blocks)  # the last may come behind the report
    assert report['bytes'] == served['bytes'] and 'failovers' not in report


def item_bytes() -> List[int]:
    return [sum(level.numel() for level in encode(image(number))) * 4 for number in range(COUNT)]


def stall(links: List[Link], behind_header: bool, goes_on: Path) -> Any:
    """The first encoder stops at a block, before or behind its header, until a file exists."""

    class Stalling(Damaging):
        def part(self, part: torch.Tensor) -> torch.Tensor:
            stops = self.chosen(part)
            while stops and not goes_on.exists():
                time.sleep(0.01)
            return part

    if first_encoder(links):
        for link in links:
            Stalling(link, behind_header, 64 if behind_header else 0)
    return serve_well(links)


def take_soon(links: List[Link], behind_header: bool, goes_on: Path) -> Any:
    source = Streamed(links, CPU, encode, block_bytes=BLOCK, pool_bytes=14 * BLOCK, timeout=0.8)
    fetch(source, [item(number) for number in range(4)])
    goes_on.touch()
    time.sleep(1)  # what is late comes, into blocks that others have had meanwhile
    fetch(source, [item(number) for number in range(4, COUNT)])
    report = source.report()
    source.close()
    return report


@pytest.mark.parametrize('behind_header', [False, True])
def test_a_block_reused_while_an_old_write_is_under_way(behind_header, tmp_path):
    report, *_ = run_job(take_soon, stall, 1, 2, tmp_path, behind_header, tmp_path / 'goes on')
    assert report['failovers'] >= 1 and 'lost' not in report


LATE = 9.0  # seconds by which an encoder is late


def serve_slowly(links: List[Link], late: float = 2.0) -> Any:
    def slow(images: torch.Tensor) -> Any:
        time.sleep(late if not slow_once else 0)
        slow_once.append(1)
        return encode(images)

    slow_once: List[int] = []
    return serve(links, slow if first_encoder(links) else encode, CPU)


def serve_late(links: List[Link]) -> Any:
    return serve_slowly(links, LATE)


def take_patiently(links: List[Link]) -> Dict[str, float]:
    return take(links, timeout=60)


@pytest.mark.long
def test_an_encoder_that_is_slower_than_peer_timeout_is_not_lost(tmp_path):
    report, served, _ = run_job(take_patiently, serve_late, 1, 2, tmp_path, peer_timeout=3.0)
    assert report['waited'] > LATE / 2 and not {'failovers', 'lost', 'local'} & set(report)
    assert served['lost'] == 0


def serve_raising(links: List[Link]) -> Any:
    def raising(images: torch.Tensor) -> Any:
        if images.shape == image(3).shape:
            raise ZeroDivisionError('no such tile')
        return encode(images)

    return serve(links, raising, CPU)


def test_an_encoder_that_raises(tmp_path):
    report, *served = run_job(take, serve_raising, 1, 2, tmp_path / 'place')
    assert report['local'] == 1 and report['failovers'] == 2 and 'lost' not in report
    assert [each['failed'] for each in served] == [1, 1]
    error, *_ = run_job(take_error, serve_raising, 1, 2, tmp_path / 'error')
    assert error.startswith('item 3 has no features: no encoder is left; encoder rank ')
    assert error.count('encoding raised ZeroDivisionError: no such tile') == 2


LEAK_ITEMS = 1000


def take_thousand(links: List[Link]) -> Dict[str, float]:
    source = Streamed(links, CPU, encode, block_bytes=256, pool_bytes=256 * 7, timeout=60)
    fetch(source, [item(n, image(n)[:1, :, : 3 + n % 4, :5]) for n in range(LEAK_ITEMS)])
    report = source.report()
    assert source._inbox._pool.free == source._inbox._pool.total
    source.close()
    report['threads'] = sum(
        thread.name in ('feature-links', 'liveness') for thread in threading.enumerate()
    )
    return report


def serve_badly(links: List[Link]) -> Any:
    """Raise, damage, repeat and, on the first encoder, die in the end."""
    draw = random.Random(int(os.environ['RANK']))
    encoded: List[int] = []

    def unsure(images: torch.Tensor) -> Any:
        encoded.append(1)
        if first_encoder(links) and len(encoded) == 300:
            os.kill(os.getpid(), signal.SIGKILL)
        if draw.random() < 0.05:
            raise ValueError('bad luck')
        return encode(images)

    class Unsure(Damaging):
        def chosen(self, part: torch.Tensor) -> bool:
            return part.dtype == torch.uint8 and part.numel() > 0 and draw.random() < 0.03

    for link in links:
        Unsure(link, True, 0)
        tampered(link, lambda *message: [message] * (1 + (draw.random() < 0.05)))
    return serve(links, unsure, CPU)


@pytest.mark.long
def test_a_thousand_items_with_random_failures_leave_no_block_behind(tmp_path):
    report, died, served = run_job(take_thousand, serve_badly, 1, 2, tmp_path)
    assert died == DIED and report['lost'] == 1 and report['threads'] == 0
    assert report['failovers'] > 50 and report['local'] > 3 and report['duplicates'] > 50
    assert report['partial'] > 0
    came = sum(n for name, n in report.items() if name.startswith('items from'))
    assert came + report['local'] == LEAK_ITEMS


def take_after_giving_up(links: List[Link]) -> Any:
    """Give items up as soon as they have blocks, then take one."""
    source = Streamed(links, CPU, None, block_bytes=BLOCK, pool_bytes=20 * BLOCK, timeout=60)
    pool = source._inbox._pool
    for number in range(20):
        source.request(item(number))
        while number % 3 and source.arriving(number).state == State.NEW:
            source.arriving(number).wait(0.01)
        source.drop(number)
        source.drop(number)
        with pytest.raises(StreamingError, match='was not requested, or its features were taken'):
            source.arriving(number)
    fetch(source, [item(20)])
    free = pool.free
    source.close()
    return free == pool.total


def test_an_item_that_is_given_up_leaves_no_block_behind(tmp_path):
    assert run_job(take_after_giving_up, serve_well, 1, 1, tmp_path)[0]
