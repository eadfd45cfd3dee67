"""Under which address a rank says it can be reached."""
from __future__ import annotations

import socket

import pytest

from mapsage.distributed.host_address import reachable_host


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('GLOO_SOCKET_IFNAME', raising=False)


def test_a_loopback_address_stands_for_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian resolves a host's own name to 127.0.1.1, of which other hosts have their own."""
    monkeypatch.setenv('MASTER_ADDR', '127.0.1.1')
    assert reachable_host() == '127.0.1.1'
    monkeypatch.setenv('MASTER_ADDR', 'localhost')
    assert reachable_host() == 'localhost'


def test_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MASTER_ADDR', '10.1.2.3')
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'lo,eth7')
    assert reachable_host() == '127.0.0.1'


def test_an_interface_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MASTER_ADDR', 'localhost')
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'none7')
    assert reachable_host() == 'localhost'
    monkeypatch.setenv('MASTER_ADDR', 'nowhere.invalid')
    assert reachable_host() == socket.gethostname()


def test_a_name_nobody_knows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MASTER_ADDR', 'nowhere.invalid')
    assert reachable_host() == socket.gethostname()  # which is no other host
    monkeypatch.delenv('MASTER_ADDR')
    assert socket.gethostbyname(reachable_host())
