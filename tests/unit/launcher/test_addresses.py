"""Addresses and interfaces of this machine."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from typing import List

import pytest
from support import ROOT

from mapsage_launcher.addresses import addresses_of, loopback_interface

namespaces = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ('ip', 'unshare'))),
    reason='network namespaces need root, iproute2 and util-linux')


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
