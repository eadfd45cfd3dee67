"""At which address a rank listens, and over which interface the ranks of a machine talk."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from typing import Dict, List, Optional

import pytest
from support import ROOT

from mapsage.distributed.host_address import keep_on_loopback, reachable_host
from mapsage_launcher import addresses
from mapsage_launcher.addresses import AddressError, addresses_of, loopback_interface, own_address

namespaces = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ('ip', 'unshare'))),
    reason='network namespaces need root, iproute2 and util-linux')
SEVERAL = {'GROUP_WORLD_SIZE': '2', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '1'}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('GLOO_SOCKET_IFNAME', 'MASTER_ADDR', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE',
                 'GROUP_WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize('variables', [
    {}, {'GROUP_WORLD_SIZE': '1', 'MASTER_ADDR': 'node7.example'},
    {'GROUP_WORLD_SIZE': '1', 'MASTER_ADDR': 'node7.example', 'GLOO_SOCKET_IFNAME': 'eth7'},
    {'MASTER_ADDR': 'localhost'}, {**SEVERAL, 'MASTER_ADDR': '127.0.1.1'},
    {**SEVERAL, 'MASTER_ADDR': 'localhost'},
    {**SEVERAL, 'MASTER_ADDR': '10.1.2.3', 'GLOO_SOCKET_IFNAME': 'lo,eth7'}])
def test_where_loopback_is_the_address(variables: Dict[str, str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, variables)
    assert reachable_host() == '127.0.0.1'


@pytest.mark.parametrize('variables, words', [
    ({**SEVERAL, 'GLOO_SOCKET_IFNAME': 'none7'}, "GLOO_SOCKET_IFNAME='none7': expected .* lo"),
    ({**SEVERAL, 'GLOO_SOCKET_IFNAME': 'none7', 'MASTER_ADDR': 'localhost'}, 'none7'),
    ({**SEVERAL, 'MASTER_ADDR': 'nowhere.invalid'},
     "MASTER_ADDR='nowhere.invalid': .* numeric address of machine 0, .*GLOO_SOCKET_IFNAME")])
def test_an_address_that_cannot_be_found_is_an_error(
        variables: Dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(AddressError, match=words):
        reachable_host()


@pytest.mark.parametrize('host, route, expected', [
    ('login0', '10.0.0.7', '10.0.0.7'), ('login0', 'fd00::7', 'fd00::7'), ('login0', '', None),
    ('localhost', '', '127.0.0.1'), ('127.0.0.2', '10.0.0.7', '127.0.0.1')])
def test_a_name_that_stands_for_the_machine_itself_is_no_address(
        host: str, route: str, expected: Optional[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_loopback_interface_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'platform', 'darwin')
    monkeypatch.setattr(socket, 'if_nameindex', lambda: [(1, 'lo0'), (2, 'en0')])
    assert loopback_interface() == 'lo0'


def in_namespace(commands: str, code: str) -> List[str]:
    """Return the lines that Python code prints in a network namespace of its own."""
    script = f'{commands}\n{sys.executable} -c "$CODE"'
    done = subprocess.run(
        ['unshare', '--net', 'bash', '-euc', script], cwd=str(ROOT), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, universal_newlines=True, timeout=120,
        env={**os.environ, 'CODE': 'import mapsage_launcher.addresses as h\n' + code})
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@namespaces
@pytest.mark.parametrize('commands', ['', 'ip address add 127.0.0.1/8 dev lo'])
def test_a_machine_whose_loopback_interface_is_down(commands: str) -> None:
    lines = in_namespace(commands, 'try: print(h.loopback_interface())\n'
                                   'except h.AddressError as error: print(error)')
    assert len(lines) == 1 and '`ip link set lo up`' in lines[0]
    assert in_namespace('ip link set lo up', 'print(h.loopback_interface())') == ['lo']


@namespaces
def test_the_addresses_of_an_interface() -> None:
    make = ('ip link add eth7 type veth peer name eth8; ip link set eth8 up; ip link set eth7 up; '
            'ip address add fd00::7/64 dev eth7 nodad; ')
    ask = 'print(h.addresses_of("eth7")); print(h.own_address("fd00::9"))'
    printed, own = in_namespace(make, ask)
    first, local = eval(printed)
    assert first == own == 'fd00::7'
    assert local.startswith('fe80::') and local.endswith('%eth7')
    assert eval(in_namespace(make + 'ip address add 10.1.2.3/24 dev eth7', ask)[0])[:2] == [
        '10.1.2.3', 'fd00::7']


def test_an_address_can_be_bound() -> None:
    for address in addresses_of(loopback_interface()):
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
    assert addresses_of('none7') == []
