"""The channel of one process answers as a channel over a process group of one rank does."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator, List

import pytest
import torch
import torch.distributed as dist

from mapsage.distributed import SerialChannel
from mapsage.distributed.channels.group_channel import GroupChannel
from mapsage.distributed.channels.open_channels import roll_call

TEXTS = ['', 'tile 17', 'Düsseldorf 影像', b'\xb5\xd8.tif'.decode('utf-8', 'surrogateescape')]


@pytest.fixture(params=['serial', 'group'])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == 'serial':
        yield SerialChannel()
        return
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        group = dist.new_group([0], timeout=timedelta(seconds=30))
        yield GroupChannel(group, [0], 30.0, 'test', roll_call())
    finally:
        dist.destroy_process_group()


def test_ranks(channel: Any) -> None:
    assert (channel.ranks, channel.rank) == ([0], 0)


@pytest.mark.parametrize('timeout', [None, 5.0])
def test_max_and_broadcast_leave_the_tensor(channel: Any, timeout: Any) -> None:
    tensor = torch.tensor([3, -2])
    channel.max(tensor, timeout)
    channel.broadcast(tensor, 0)
    assert tensor.tolist() == [3, -2]


def test_gather_returns_a_copy(channel: Any) -> None:
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    (answer,) = channel.gather(tensor)
    tensor.zero_()
    assert answer.dtype == torch.float64 and answer.tolist() == [[1.0, 2.0]]


def test_trade_returns_the_own_row(channel: Any) -> None:
    tensor = torch.tensor([[4, 5]])
    answer = channel.trade(tensor)
    tensor.zero_()
    assert answer.tolist() == [[4, 5]]


@pytest.mark.parametrize('rows', [0, 3])
def test_all_to_all_copies_the_part(channel: Any, rows: int) -> None:
    sent = torch.arange(rows, dtype=torch.uint8)
    received = torch.full_like(sent, 9)
    channel.all_to_all(received, sent, [rows], [rows])
    assert received.tolist() == list(range(rows))


@pytest.mark.parametrize('text', TEXTS)
def test_a_text_arrives_whatever_it_holds(channel: Any, text: str) -> None:
    expected = text.encode('utf-8', 'backslashreplace').decode()
    assert channel.gather_texts(text) == [expected]


def test_the_first_text_published_stays(channel: Any) -> None:
    assert channel.published('block') is None
    published: List[bool] = [channel.publish('block', text) for text in (TEXTS[3], 'later')]
    assert published == [True, False]
    assert channel.published('block') == TEXTS[3].encode('utf-8', 'backslashreplace').decode()
    assert channel.published('other') is None


def test_numbers_count_up(channel: Any) -> None:
    assert [channel.next_number() for _ in range(3)] == [0, 1, 2]
