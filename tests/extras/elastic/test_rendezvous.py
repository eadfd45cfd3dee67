"""The rendezvous store listens only at the address that was asked for."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from socket_table import listening

from mapsage_launcher.nodes.rendezvous import open_store


@pytest.mark.skipif(
    'master_listen_fd' not in (dist.TCPStore.__init__.__doc__ or ''),
    reason='of newer versions of torch',
)
@pytest.mark.parametrize(
    'host, address', [('localhost', '127.0.0.1'), ('127.0.0.1', '127.0.0.1'), ('::1', '::1')]
)
def test_the_store_listens_at_one_address(host: str, address: str) -> None:
    before = set(listening([os.getpid()]))
    store, printed, warning = open_store(host, 0)
    client = dist.TCPStore(
        address, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    client.set('key', 'value')
    assert store.get('key') == b'value' and warning == '' and printed == address
    opened = set(listening([os.getpid()])) - before
    assert {(each.address, each.port) for each in opened} == {(address, store.port)}
