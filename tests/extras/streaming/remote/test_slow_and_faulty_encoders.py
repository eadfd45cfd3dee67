"""An encoder that is slow, raises or loses its link serves on, and the log says what happened."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from link_pairs import TIMEOUT, PeerTime, both, cut, damage_sent, open_job

from mapsage.extras.streaming.remote import item as item_module
from mapsage.extras.streaming.remote.item import RemoteItem
from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import Item, StreamingError
from mapsage.extras.streaming.wire.header import Header, Kind

CPU = torch.device('cpu')
Encoder = Callable[[torch.Tensor], Tuple[torch.Tensor, ...]]


def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    return images / 7, images.flip(-1).sqrt()[..., ::2].contiguous()


def item(number: int, size: int = 8) -> Item:
    generator = torch.Generator().manual_seed(number)
    return Item(number, (), torch.randint(0, 256, (2, 3, size, 9), generator=generator).float())


class Job:
    """Heads, and encoders that serve them in threads until the heads' sources are closed."""

    def __init__(
        self,
        *encoders: Encoder,
        heads: int = 1,
        peer_timeout: float = TIMEOUT,
        local: Optional[Encoder] = encode,
        **settings: Any,
    ) -> None:
        opened = open_job(heads, len(encoders), peer_timeout)
        self.links, self.encoder_links = opened[:heads], opened[heads:]
        self.served: List[Any] = [None] * len(encoders)
        self.log: List[str] = []
        self.encoder_log: List[str] = []
        self._threads = [
            threading.Thread(target=self._serve, args=each, daemon=True)
            for each in zip(range(len(encoders)), self.encoder_links, encoders)
        ]
        for thread in self._threads:
            thread.start()
        self.sources = [
            Streamed(links, CPU, local, log=lambda level, text: self.log.append(text), **settings)
            for links in self.links
        ]
        self.source = self.sources[0]

    def _serve(self, at: int, links: Sequence[Any], encoder: Encoder) -> None:
        self.served[at] = serve(
            links, encoder, CPU, log=lambda level, text: self.encoder_log.append(text)
        )

    def take(self, *numbers: int, source: Optional[Streamed] = None) -> None:
        source = source or self.source
        for number in numbers:
            source.request(item(number))
        for number in numbers:
            features = source.features(item(number))
            assert all(map(torch.equal, features, encode(item(number).images)))

    def close(self) -> List[Dict[str, float]]:
        for source in self.sources:
            source.close()  # raises if a block was not given back
        for thread in self._threads:
            thread.join(TIMEOUT)
        assert not any(thread.is_alive() for thread in self._threads)
        return self.served

    def said(self, words: str) -> List[str]:
        return [line for line in self.log if words in line]


@pytest.fixture
def let_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function after which ten seconds pass each time a job waits for a certain item.

    No other time passes, so that nothing else is late, however slow this machine is.
    """
    now = [0.0]
    monkeypatch.setattr(item_module, 'time', SimpleNamespace(monotonic=lambda: now[0]))

    def let_wait(job: Job, certain: Callable[[RemoteItem], bool]) -> None:
        inbox = job.source._inbox
        wait = type(inbox)._on_wait

        def on_wait(remote: RemoteItem) -> float:
            now[0] += 10.0 if certain(remote) else 0.0
            return wait(inbox, remote)

        inbox._on_wait = on_wait  # type: ignore[method-assign]

    return let_wait


@pytest.mark.parametrize('heads, encoders', [(1, 1), (2, 3)])
def test_a_first_item_far_slower_than_peer_timeout_costs_no_encoder(
    heads: int, encoders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    PeerTime.often(monkeypatch)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        begun.release()
        assert go_on.wait(TIMEOUT)
        return encode(images)

    job = Job(*[slow] * encoders, heads=heads)
    clock = PeerTime(*(link for links in (*job.links, *job.encoder_links) for link in links))
    for source in job.sources:
        for number in range(8):
            source.request(item(number))
    for _ in range(encoders):
        assert begun.acquire(timeout=TIMEOUT)
    clock.go_on(3 * TIMEOUT)
    go_on.set()
    for source in job.sources:
        for number in range(8):
            features = source.features(item(number))
            assert all(map(torch.equal, features, encode(item(number).images)))
    for source in job.sources:
        assert not {'lost', 'failovers', 'local'} & set(source.report())
    assert job.log == []
    assert all(each['lost'] == 0 for each in job.close())


def refuse(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    raise ValueError(f'no such tile {int(images.sum())}')


def test_an_encoder_that_raises_on_every_item_is_named_once_with_the_reason() -> None:
    job = Job(refuse, refuse)
    job.take(*range(20))
    report = job.source.report()
    assert (report['failovers'], report['local']) == (40, 20)
    for peer in ('encoder rank 1', 'encoder rank 2'):
        (line,) = job.said(
            f'{peer} did not encode an item: encoding raised ValueError: no such tile'
        )
        assert 'the head encodes it' in line
    assert len(job.log) == 2
    job.close()
    assert len(job.encoder_log) == 2 and 'Traceback' in job.encoder_log[0]


def test_a_link_that_was_cut_is_used_again_and_nobody_leaves_with_an_error() -> None:
    job = Job(encode)
    job.take(0, 1)
    for number in range(2, 5):
        cut(job.links[0][0])
        while job.links[0][0].alive:
            time.sleep(0.001)
        end = time.monotonic() + TIMEOUT
        while not job.links[0][0].alive and time.monotonic() < end:
            time.sleep(0.01)
        job.take(number)
    report = job.source.report()
    assert report['items from encoder rank 1'] == 5 and 'local' not in report
    assert (report['lost'], report['reopened']) == (3, 3)
    assert len(job.said('is lost: it went away')) == len(job.said('is open again')) == 3
    assert job.close()[0]['lost'] == 0


def test_without_a_local_encoder_an_item_waits_for_its_encoder_to_come_back() -> None:
    job = Job(encode, local=None)
    job.take(0)
    cut(job.links[0][0])
    while job.links[0][0].alive:
        time.sleep(0.001)
    job.take(1, 2)
    assert job.source.report()['items from encoder rank 1'] == 3
    job.close()


def test_heads_that_vanish_are_awaited_and_then_the_encoder_ends_well() -> None:
    job = Job(encode, heads=2, peer_timeout=1.0)  # so long the heads are awaited
    for hub in {
        id(link._hub): link._hub for link in (*job.encoder_links[0], *sum(job.links, []))
    }.values():
        hub.liveness.close()  # so that a busy machine costs no link before
    job.take(0)
    for links in job.links:
        links[0]._hub.stop()  # what the end of its process does to its sockets
    for thread in job._threads:
        thread.join(TIMEOUT)
    assert job.served[0]['lost'] == 2
    assert any('2 of 2 head(s) went away without closing' in line for line in job.encoder_log)


def test_a_late_encoder_is_left_alone_until_it_has_answered(let_wait: Callable[..., None]) -> None:
    go_on = threading.Event()

    def hanging(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        assert go_on.wait(TIMEOUT)
        return encode(images)

    job = Job(hanging, encode, timeout=10)
    let_wait(job, lambda remote: remote.link is job.links[0][0] and not go_on.is_set())
    job.take(*range(6))
    job.take(*range(6, 30))
    # Only items of the first six waited for the time-out; then the encoder was asked for nothing.
    report = job.source.report()
    assert report['items from encoder rank 2'] == 30 and report['failovers'] <= 6
    assert len(job.said('encoder rank 1 did not encode an item: it is NEW with 0 of')) == 1
    go_on.set()
    deadline = time.monotonic() + TIMEOUT
    while job.source._inbox._late and time.monotonic() < deadline:
        time.sleep(0.01)
    job.take(*range(30, 40))
    assert job.source.report()['items from encoder rank 1'] >= 1
    job.close()


def test_encoders_that_all_hang_cost_two_timeouts_and_not_one_each(
    let_wait: Callable[..., None],
) -> None:
    go_on = threading.Event()

    def hanging(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        assert go_on.wait(TIMEOUT)
        return encode(images)

    job = Job(*[hanging] * 5, timeout=10, ahead=1)
    let_wait(job, lambda remote: True)
    job.take(0)
    report = job.source.report()
    assert report['local'] == 1 and report['failovers'] <= 2  # of five encoders
    go_on.set()
    job.close()
    go_on.clear()
    job = Job(hanging, local=None, timeout=10)
    let_wait(job, lambda remote: True)
    job.source.request(item(0))
    with pytest.raises(StreamingError, match='has no features.*after 10 s of waiting'):
        job.source.features(item(0))
    go_on.set()
    job.close()


def test_an_encoder_whose_transfer_is_slow_is_not_late(let_wait: Callable[..., None]) -> None:
    job = Job(encode, timeout=10)
    link, dropped = job.encoder_links[0][0], []
    send = link.send

    def send_later(header: Header, payload: Any = None) -> None:
        if header.kind == Kind.DATA and not dropped:
            dropped.append(header)
        else:
            send(header, payload)

    link.send = send_later  # type: ignore[assignment]
    let_wait(job, lambda remote: remote.number == 0 and bool(dropped))
    job.take(0)
    job.take(1, 2, 3)
    report = job.source.report()
    assert report['items from encoder rank 1'] == 3 and report['local'] == len(dropped) == 1
    job.close()


def test_an_encoder_that_has_closed_its_link_is_not_awaited() -> None:
    encoding, go_on = threading.Event(), threading.Event()

    def hanging(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        encoding.set()
        assert go_on.wait(TIMEOUT)
        return encode(images)

    job = Job(hanging, local=None, timeout=TIMEOUT)
    job.source.request(item(0))
    assert encoding.wait(TIMEOUT)
    assert job.encoder_links[0][0].close(TIMEOUT)
    with pytest.raises(StreamingError, match='no encoder is left; .* it closed its link'):
        job.source.features(item(0))
    assert len(job.said('not opened again, because the encoder has finished')) == 1
    go_on.set()
    job.close()


def test_damage_is_logged_once_whatever_the_checksums() -> None:
    job = Job(encode)
    job.take(0)
    damage_sent(
        job.encoder_links[0][0], lambda part: part + 1 if part.dtype == torch.uint8 else part
    )
    job.take(*range(1, 11))
    assert job.source.report()['local'] == 10
    assert len(job.said('damaged on their way')) == len(job.log) == 1
    job.close()


def test_the_pool_fits_the_first_item_and_grows_for_a_larger_one() -> None:
    job = Job(encode, block_bytes=1000)
    job.take(0)
    pool = job.source._inbox._pool
    per_item = -(-(2 * 3 * 8 * 9 + 2 * 3 * 8 * 5) * 4 // 1000)
    assert pool.total == 4 * per_item
    for number, size in ((1, 64), (2, 8), (3, 640)):
        job.source.request(item(number, size))
    for number, size in ((1, 64), (2, 8), (3, 640)):
        features = job.source.features(item(number, size))
        assert all(map(torch.equal, features, encode(item(number, size).images)))
    assert pool.total > 300 and pool.free == pool.total
    assert 'local' not in job.source.report()
    job.close()


@pytest.mark.parametrize('local', [encode, None], ids=['local', 'remote_only'])
def test_links_that_are_cut_at_random_lose_no_item_and_no_block(local: Any) -> None:
    draw = random.Random(3)

    def flaky(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        if draw.random() < 0.05:
            try:
                cut(draw.choice(draw.choice(job.links)))
            except (OSError, AttributeError):  # it is cut already
                pass
        if local is not None and draw.random() < 0.05:
            raise ValueError('bad luck')
        return encode(images)

    def take_all(source: Streamed) -> None:
        reopened, begin = 0.0, 0
        while begin < 80 or not reopened:
            job.take(*range(begin, begin + 10), source=source)
            reopened, begin = reopened + source.report().get('reopened', 0), begin + 10

    job = Job(flaky, flaky, flaky, heads=2, local=local, block_bytes=300, pool_bytes=60 * 300)
    both(*(lambda source=source: take_all(source) for source in job.sources))
    assert all(each['lost'] == 0 for each in job.close())
