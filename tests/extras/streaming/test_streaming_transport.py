"""Features come over links bit-equal to those computed locally, whatever their size and number."""

from __future__ import annotations

import time
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from streaming_ranks import BLOCK, CPU, check, encode, fetch, image, item, run_job, serve_well
from support import main_leg

from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import StreamingError
from mapsage.extras.streaming.wire.link import Link, LinkError
from mapsage.extras.streaming.wire.opening import open_links

pytestmark = main_leg


def stream_items(links: List[Link], count: int, pool_bytes: int) -> Dict[str, float]:
    source = Streamed(links, CPU, block_bytes=BLOCK, pool_bytes=pool_bytes, timeout=60)
    fetch(source, [item(number) for number in range(count)])
    report = source.report()
    source.close()
    return report


@pytest.mark.parametrize(('heads', 'encoders'), [(4, 1), (1, 4), (2, 3)])
def test_more_and_fewer_encoders_than_heads(heads, encoders, tmp_path):
    answers = run_job(stream_items, serve_well, heads, encoders, tmp_path, 12, 64 * BLOCK)
    for report in answers[:heads]:
        assert sum(n for name, n in report.items() if name.startswith('items from')) == 12
        assert not {'failovers', 'duplicates', 'lost', 'local'} & set(report)
    assert sum(each['items'] for each in answers[heads:]) == 12 * heads
    assert all(each['items'] for each in answers[heads:])  # none stood idle
    assert sum(each['bytes'] for each in answers[heads:]) == sum(
        report['bytes'] for report in answers[:heads]
    )


def test_a_pool_smaller_than_several_items(tmp_path):
    # 14 blocks, of which an item needs up to 13: it comes in parts and continues where it stopped
    report, served = run_job(stream_items, serve_well, 1, 1, tmp_path, 10, 14 * BLOCK)
    assert report['partial'] > 0 and report['items from encoder rank 1'] == 10
    assert report['bytes'] == served['bytes']  # nothing was sent twice


def odd_items(links: List[Link], wire: Any) -> Any:
    source = Streamed(links, CPU, block_bytes=1000, pool_bytes=40000, timeout=60, wire=wire)
    fetch(
        source,
        [
            item(0, torch.rand(1, 3, 1, 1)),
            item(1, torch.zeros(0, 3, 8, 8)),
            item(2, torch.rand(3, 3, 5, 7, dtype=torch.float64)),
            item(3, torch.zeros(1, 3, 0, 4)),
            item(4, torch.full((1, 3, 9, 11), 256.0)),
            item(5, torch.arange(300.0).reshape(1, 3, 10, 10) / 2),
        ],
        wire,
    )
    source.close()
    return source.report()['bytes']


def test_items_of_any_size_and_the_wire_dtype(tmp_path):
    whole, _ = run_job(odd_items, serve_well, 1, 1, tmp_path / 'whole', None)
    rounded, _ = run_job(odd_items, serve_well, 1, 1, tmp_path / 'rounded', torch.bfloat16)
    doubles = sum(level.numel() for level in encode(torch.zeros(3, 3, 5, 7))) * 8
    assert rounded == (whole - doubles) / 2 + doubles / 4


def too_large(links: List[Link]) -> Any:
    source = Streamed(links, CPU, encode, block_bytes=1000, pool_bytes=41500, timeout=60)
    source.request(item(0, torch.zeros(8, 3, 32, 32)))
    source.request(item(1))
    with pytest.raises(StreamingError) as error:
        source.features(item(0))
    check(source.features(item(1)), image(1))  # the next one is not harmed
    with pytest.raises(StreamingError, match='item 1 was not requested, or its features were'):
        source.features(item(1))
    with pytest.raises(ValueError, match='item 1 was requested after item 1'):
        source.request(item(1))
    source.close()
    source.close()
    return str(error.value)


def test_an_item_larger_than_the_pool_is_an_error_with_the_setting(tmp_path):
    text, _ = run_job(too_large, serve_well, 1, 1, tmp_path)
    total = sum(level.numel() for level in encode(torch.zeros(8, 3, 32, 32))) * 4
    assert f'its features are {total} bytes and the pool holds 41000: raise pool_bytes' in text


def other_weights(links: List[Link]) -> Any:
    source = Streamed(links, CPU, encode, digest=0xABCD, timeout=60)
    source.request(item(0))
    with pytest.raises(StreamingError) as error:
        source.features(item(0))
    source.close()
    return str(error.value)


def serve_others(links: List[Link]) -> Dict[str, float]:
    return serve(links, encode, CPU, digest=0x1234)


def test_features_of_other_weights_are_refused_and_both_are_named(tmp_path):
    text, _ = run_job(other_weights, serve_others, 1, 1, tmp_path)
    assert 'encoder rank 1 has weights 00001234, expected 0000abcd' in text


def watch(links: List[Link]) -> Any:
    """Follow an item as who delivers it to several ranks does."""
    source = Streamed(links, CPU, block_bytes=1000, pool_bytes=39000, timeout=60)
    with source._inbox._changed:  # nothing can come meanwhile
        source.request(item(0))
        with pytest.raises(StreamingError, match='item 0 is NEW, expected READY or FAILED'):
            source.release(0)
    source.request(item(1))
    for number in range(2):
        arriving, seen, data = source.arriving(number), [], torch.empty(0, dtype=torch.uint8)
        is_over = False
        while not is_over:
            arriving.wait(5)
            progress = arriving.progress  # all of it of one moment
            is_over = progress.state in (State.READY, State.FAILED)
            data = torch.cat([data, arriving.read(len(data), progress.arrived)])
            seen.append((progress.attempt, progress.arrived))
        assert seen == sorted(seen) and arriving.error is None
        assert len(data) == arriving.total and torch.equal(data, arriving.read(0, len(data)))
        with pytest.raises(StreamingError, match='bytes 0 to .* were asked for'):
            arriving.read(0, len(data) + 1)
        check(arriving.layout.unpack(data, CPU), image(number))
        source.release(number)
    source.close()
    return True


def test_an_item_can_be_read_while_it_comes(tmp_path):
    assert run_job(watch, serve_well, 1, 1, tmp_path)[0]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / 'store'), -1)
    begin = time.monotonic()
    with pytest.raises(LinkError, match=r'rank 0 waited 0.3 s .* rank\(s\) \[1, 2\] did not come'):
        open_links(store, 0, encoders=[1, 2], heads=[0], timeout=0.3, peer_timeout=5)
    assert time.monotonic() - begin >= 0.3
    with pytest.raises(ValueError, match='rank 3 is in both or neither'):
        open_links(store, 3, encoders=[1, 2], heads=[0], timeout=0.3, peer_timeout=5)
