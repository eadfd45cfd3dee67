"""The split of a job's ranks into encoders and heads."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, Dict, List

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mapsage.extras.streaming.remote import roles as module
from mapsage.extras.streaming.remote.roles import (
    RoleError,
    check_ranks_per_head,
    connect_store,
    split_ranks,
)


def launched(nodes: int, per_node: int) -> List[Dict[str, str]]:
    """Return the variables torchrun sets on each rank."""
    return [
        dict(
            RANK=str(rank),
            WORLD_SIZE=str(nodes * per_node),
            LOCAL_RANK=str(rank % per_node),
            LOCAL_WORLD_SIZE=str(per_node),
        )
        for rank in range(nodes * per_node)
    ]


def test_two_of_four_on_one_machine() -> None:
    roles = [split_ranks(2, environ, separate_devices=False) for environ in launched(1, 4)]
    assert [(role.name, role.index) for role in roles] == [
        ('head', 0),
        ('head', 1),
        ('encoder', 0),
        ('encoder', 1),
    ]
    assert roles[1].environ == dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
    assert roles[3].environ == dict(LOCAL_RANK='3', LOCAL_WORLD_SIZE='4')


def test_encoders_on_devices_of_their_own_count_from_0() -> None:
    roles = [split_ranks(2, environ, separate_devices=True) for environ in launched(1, 4)]
    assert [role.environ.get('LOCAL_RANK') for role in roles] == [None, None, '0', '1']
    assert roles[3].environ['LOCAL_WORLD_SIZE'] == '2'


@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_every_device_has_one_process(nodes: int, per_node: int, data: st.DataObject) -> None:
    world = nodes * per_node
    if world < 2:
        return
    encoders = data.draw(st.integers(1, world - 1))
    own = data.draw(st.booleans())
    jobs = launched(nodes, per_node)
    roles = [split_ranks(encoders, environ, own) for environ in jobs]
    assert [role.index for role in roles] == [*range(world - encoders), *range(encoders)]
    seen = set()
    heads_on = [0] * nodes
    for rank, (role, environ) in enumerate(zip(roles, jobs)):
        node = rank // per_node
        after = {**environ, **role.environ}
        device = int(after['LOCAL_RANK'])
        assert 0 <= device < int(after['LOCAL_WORLD_SIZE'])
        place = (node, role.name if own else '', device)
        assert place not in seen
        seen.add(place)
        heads_on[node] += role.name == 'head'
    for rank, role in enumerate(roles):
        if role.name == 'head':
            assert role.environ == dict(
                WORLD_SIZE=str(world - encoders), LOCAL_WORLD_SIZE=str(heads_on[rank // per_node])
            )


@pytest.mark.parametrize(
    'encoders, words',
    [
        (4, 'encoders=4 of 4 rank'),
        (5, 'start at least 6'),
        (0, '1 or more'),
        (-1, '1 or more'),
        (True, '1 or more'),
        ('2', '1 or more'),
        (None, '1 or more'),
    ],
)
def test_no_rank_left_or_no_number(encoders: object, words: str) -> None:
    with pytest.raises(RoleError, match=words):
        split_ranks(encoders, launched(1, 4)[0], False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    'ranks_per_head, words',
    [
        (2, '=2 does not divide the 3 rank.s. .* multiple of 2'),
        (4, '=4 does not divide the 3'),
        (0, '=0, expected a number'),
        (True, '=True, expected a number'),
        ('2', "='2', expected a"),
    ],
)
def test_heads_that_form_no_whole_replicas(ranks_per_head: object, words: str) -> None:
    check_ranks_per_head(1, 3)
    check_ranks_per_head(3, 3)
    with pytest.raises(RoleError, match=words):
        check_ranks_per_head(ranks_per_head, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    'rounds, counts, meet',
    [
        (('3', '3'), ('0', '2'), True),
        (('3', '4'), ('0', '0'), False),
        (('', ''), ('1', '1'), True),
        (('', ''), ('0', '1'), False),
    ],
)
def test_machines_that_restarted_unequally_often_share_their_keys(
    rounds: Any, counts: Any, meet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dist.TCPStore(
        '127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', str(job.port))
    monkeypatch.setenv('GROUP_WORLD_SIZE', '2')
    stores = []
    for place, count in zip(rounds, counts):
        monkeypatch.setenv('MAPSAGE_ROUND', place)
        monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', count)
        monkeypatch.setattr(module, '_connections', itertools.count())  # as in another process
        stores.append(connect_store(60))
    stores[0].add('key', 1)
    assert stores[1].add('key', 0) == meet
