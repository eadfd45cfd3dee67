"""Stores that other users, or at least other machines, cannot reach."""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from socket_table import listening

from mapsage_launcher.trust import private_store
from mapsage_launcher.trust.private_store import (
    PrivateStoreError,
    file_path,
    loopback_store,
    private_file,
)

HAS_LISTENING_FD = 'master_listen_fd' in (dist.TCPStore.__init__.__doc__ or '')


def open_store(descriptor: int) -> Any:
    return dist.FileStore(file_path(descriptor), -1)


def test_a_file_without_a_name() -> None:
    descriptor = private_file()
    first, second = open_store(descriptor), open_store(descriptor)
    first.set('key', 'value')
    assert second.get('key') == b'value' and second.add('count', 2) == 2
    del first, second
    assert open_store(descriptor).get('key') == b'value'
    assert os.fstat(descriptor).st_nlink == 0
    assert not os.get_inheritable(descriptor)
    other = private_file()
    assert open_store(other).add('count', 1) == 1


def test_a_system_without_memory_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, 'memfd_create', raising=False)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    store = open_store(private_file())
    assert store.add('count', 3) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_again_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is not mounted, or a security module forbids it."""
    before = len(os.listdir('/proc/self/fd'))
    monkeypatch.setattr(private_store, 'file_path', lambda descriptor: '/no/such/folder')
    with pytest.raises(OSError, match='No such file'):
        private_file()
    assert len(os.listdir('/proc/self/fd')) == before


@pytest.mark.skipif(not HAS_LISTENING_FD, reason='of newer versions of torch')
@pytest.mark.parametrize('libuv', ['0', '1'])
def test_a_store_on_loopback_alone(libuv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('USE_LIBUV', libuv)
    before = set(listening([os.getpid()]))
    store, warning = loopback_store('no lock', timedelta(seconds=20))
    client = dist.TCPStore(
        '127.0.0.1',
        store.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )
    client.set('key', 'value')
    assert store.get('key') == b'value'
    opened = set(listening([os.getpid()])) - before
    assert {(each.kind, each.address, each.port) for each in opened} == {
        ('tcp', '127.0.0.1', store.port)
    }
    with pytest.raises(OSError):
        socket.create_connection(('127.0.0.2', store.port), 5)
    assert all(
        words in warning
        for words in ('no lock', f'127.0.0.1:{store.port}', 'Other users', 'unpickles', 'TMPDIR')
    )


def test_a_torch_that_can_only_listen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __init__(self) -> None:
            """Without the argument."""

    monkeypatch.setattr(dist, 'TCPStore', Old)
    with pytest.raises(PrivateStoreError, match='no lock.*Set TMPDIR'):
        loopback_store('no lock', timedelta(seconds=20))
