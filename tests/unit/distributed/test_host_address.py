"""At which address a rank listens, and over which interface the ranks of a machine talk."""

from __future__ import annotations

from typing import Dict, Optional

import pytest

from mapsage.distributed.host_address import keep_on_loopback, reachable_host
from mapsage_launcher import addresses
from mapsage_launcher.addresses import AddressError, loopback_interface, own_address

SEVERAL = {'GROUP_WORLD_SIZE': '2', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '1'}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        'GLOO_SOCKET_IFNAME',
        'MASTER_ADDR',
        'WORLD_SIZE',
        'LOCAL_WORLD_SIZE',
        'GROUP_WORLD_SIZE',
    ):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    'variables',
    [
        {},
        {'GROUP_WORLD_SIZE': '1', 'MASTER_ADDR': 'node7.example'},
        {'GROUP_WORLD_SIZE': '1', 'MASTER_ADDR': 'node7.example', 'GLOO_SOCKET_IFNAME': 'eth7'},
        {'MASTER_ADDR': 'localhost'},
        {**SEVERAL, 'MASTER_ADDR': '127.0.1.1'},
        {**SEVERAL, 'MASTER_ADDR': 'localhost'},
        {**SEVERAL, 'MASTER_ADDR': '10.1.2.3', 'GLOO_SOCKET_IFNAME': 'lo,eth7'},
    ],
)
def test_where_loopback_is_the_address(
    variables: Dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, variables)
    assert reachable_host() == '127.0.0.1'


@pytest.mark.parametrize(
    'variables, words',
    [
        ({**SEVERAL, 'GLOO_SOCKET_IFNAME': 'none7'}, "GLOO_SOCKET_IFNAME='none7': expected .* lo"),
        ({**SEVERAL, 'GLOO_SOCKET_IFNAME': 'none7', 'MASTER_ADDR': 'localhost'}, 'none7'),
        (
            {**SEVERAL, 'MASTER_ADDR': 'nowhere.invalid'},
            "MASTER_ADDR='nowhere.invalid': .* numeric address of machine 0, .*GLOO_SOCKET_IFNAME",
        ),
    ],
)
def test_an_address_that_cannot_be_found_is_an_error(
    variables: Dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(AddressError, match=words):
        reachable_host()


@pytest.mark.parametrize(
    'host, route, expected',
    [
        ('login0', '10.0.0.7', '10.0.0.7'),
        ('login0', 'fd00::7', 'fd00::7'),
        ('login0', '', None),
        ('localhost', '', '127.0.0.1'),
        ('127.0.0.2', '10.0.0.7', '127.0.0.1'),
    ],
)
def test_a_name_that_stands_for_the_machine_itself_is_no_address(
    host: str, route: str, expected: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian resolves a host's own name to 127.0.1.1, of which other hosts have their own."""

    def towards(host: str, port: int) -> str:
        if host == '192.0.2.1' and not route:
            raise OSError('Network is unreachable')
        return route if host == '192.0.2.1' else '127.0.0.1'

    monkeypatch.setattr(addresses, '_address_towards', towards)
    set_variables(monkeypatch, {**SEVERAL, 'MASTER_ADDR': host})
    if expected is None:
        with pytest.raises(AddressError, match='login0 stands for 127.0.0.1.*use its address'):
            own_address(host)
        with pytest.raises(AddressError, match='^MASTER_ADDR: login0 stands for'):
            reachable_host()
    else:
        assert own_address(host) == reachable_host() == expected


def test_the_interfaces_of_a_job_on_one_machine() -> None:
    one = {'GROUP_WORLD_SIZE': '1', 'NCCL_SOCKET_IFNAME': 'eth7'}
    keep_on_loopback(one)
    assert one['GLOO_SOCKET_IFNAME'] == one['ECCL_SOCKET_IFNAME'] == loopback_interface()
    assert one['NCCL_SOCKET_IFNAME'] == 'eth7'
    several = dict(SEVERAL)
    keep_on_loopback(several)
    assert several == SEVERAL
