"""Addresses and interfaces of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from typing import Any, List

import pytest
from support import ROOT

from mapsage_launcher import addresses
from mapsage_launcher.addresses import (
    addresses_of,
    loopback_interface,
    meeting_problem,
    wait_explained,
)

namespaces = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ('ip', 'unshare'))),
    reason='network namespaces need root, iproute2 and util-linux',
)


def test_a_loopback_interface_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'platform', 'darwin')
    monkeypatch.setattr(socket, 'if_nameindex', lambda: [(1, 'lo0'), (2, 'en0')])
    assert loopback_interface() == 'lo0'


def in_namespace(commands: str, code: str) -> List[str]:
    """Return the lines that Python code prints in a network namespace of its own."""
    script = f'{commands}\n{sys.executable} -c "$CODE"'
    done = subprocess.run(
        ['unshare', '--net', 'bash', '-euc', script],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
        env={**os.environ, 'CODE': 'import mapsage_launcher.addresses as h\n' + code},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@namespaces
@pytest.mark.parametrize('commands', ['', 'ip address add 127.0.0.1/8 dev lo'])
def test_a_machine_whose_loopback_interface_is_down(commands: str) -> None:
    lines = in_namespace(
        commands, 'try: print(h.loopback_interface())\nexcept h.AddressError as error: print(error)'
    )
    assert len(lines) == 1 and '`ip link set lo up`' in lines[0]
    assert in_namespace('ip link set lo up', 'print(h.loopback_interface())') == ['lo']


@namespaces
def test_the_addresses_of_an_interface() -> None:
    make = (
        'ip link add eth7 type veth peer name eth8; ip link set eth8 up; ip link set eth7 up; '
        'ip address add fd00::7/64 dev eth7 nodad; '
    )
    ask = 'print(h.addresses_of("eth7")); print(h.own_address("fd00::9"))'
    printed, own = in_namespace(make, ask)
    first, local = eval(printed)
    assert first == own == 'fd00::7'
    assert local.startswith('fe80::') and local.endswith('%eth7')
    assert eval(in_namespace(make + 'ip address add 10.1.2.3/24 dev eth7', ask)[0])[:2] == [
        '10.1.2.3',
        'fd00::7',
    ]


def test_an_address_can_be_bound() -> None:
    for address in addresses_of(loopback_interface()):
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
    assert addresses_of('none7') == []


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for MASTER_ADDR is explained at once."""
    for name in ('_PATIENCE_SECONDS', '_LOOKUP_SECONDS', '_CONNECT_SECONDS'):
        monkeypatch.setattr(addresses, name, 0.2)


def closed_port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize('keeps_store', [True, False])
@pytest.mark.parametrize('host', ['no-host.invalid', 'a' * 70 + '.invalid', 'node0..lan'])
def test_a_meeting_at_an_unknown_name(
    host: str, keeps_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, '_LOOKUP_SECONDS', 60.0)
    problem = meeting_problem(host, 29500, keeps_store)
    assert f"MASTER_ADDR='{host}' stands for no address here (" in problem
    assert 'this machine has 127.0.0.1' in problem and 'no answer within' not in problem


@pytest.mark.parametrize('keeps_store', [True, False])
def test_a_meeting_at_an_address_of_another_machine(keeps_store: bool, hasty: None) -> None:
    # 203.0.113.0/24 is reserved for documentation (RFC 5737).
    problem = meeting_problem('203.0.113.7', 29500, keeps_store)
    assert "MASTER_ADDR='203.0.113.7' stands for 203.0.113.7 here" in problem
    # In some networks a firewall answers for everyone.
    assert re.search('(no|some)thing answers there at port 29500', problem)
    assert 'this machine has 127.0.0.1' in problem
    assert ('Rank 0 keeps the store' in problem) == keeps_store


def test_a_meeting_at_a_name_that_leads_to_this_machine() -> None:
    problem = meeting_problem('localhost', closed_port(), keeps_store=False)
    assert ', an address of this machine itself: nothing answers there' in problem


@pytest.mark.parametrize('resolved', [['127.0.0.1'], ['127.0.0.2', '127.0.0.1']])
def test_a_meeting_where_something_answers(
    resolved: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, '_lookup', lambda host: (resolved, ''))
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
        assert meeting_problem('node0', port, keeps_store=True) == ''
        problem = meeting_problem('node0', port, keeps_store=False)
    assert f'something answers there at port {port}, and the store of the job was not' in problem


def test_a_name_server_that_does_not_answer(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def wait(*arguments: Any, **options: Any) -> Any:
        over.wait()
        raise OSError

    monkeypatch.setattr(socket, 'getaddrinfo', wait)
    try:
        assert '(no answer within 0.2 s)' in meeting_problem('node0', 29500, False)
    finally:
        over.set()


def explanation() -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == 'mapsage meeting')


def test_a_long_wait_is_explained_once(hasty: None, capsys: pytest.CaptureFixture[str]) -> None:
    with wait_explained('no-host.invalid', 29500, True, 900):
        explanation().join()
    printed = capsys.readouterr().err
    assert printed.startswith("warning: MASTER_ADDR='no-host.invalid' stands for no address here (")
    assert printed.endswith(' The wait may last 900 s.\n') and printed.count('\n') == 1


def test_a_wait_that_fails_at_once_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match='host not found'), wait_explained(
        'no-host.invalid', 29500, False, 900
    ):
        raise ValueError('host not found')
    assert "MASTER_ADDR='no-host.invalid' stands for no address" in capsys.readouterr().err


def test_nothing_is_printed_where_the_others_are_only_late(
    hasty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(('127.0.0.1', 0)) as listener, wait_explained(
        '127.0.0.1', listener.getsockname()[1], True, 900
    ):
        explanation().join()
    assert capsys.readouterr().err == ''


def test_nothing_is_printed_after_a_short_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with wait_explained('no-host.invalid', 29500, True, 900):
        thread = explanation()
    thread.join()
    assert capsys.readouterr().err == ''
