"""The machines of these tests themselves: what they can reach, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import machines as module
import pytest
from machines import Machine, Machines, Process, why_not
from support import on_host

pytestmark = [on_host, pytest.mark.skipif(bool(why_not('nft')), reason=why_not('nft'))]

# Sends its peer's name to the peer's port 7000, and waits for the answer.
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as peer:
    peer.settimeout(float(sys.argv[2]))
    print(peer.recv(99).decode(), flush=True)
"""
ANSWER = """
import socket
server = socket.create_server(('', 7000))
print('listens', flush=True)
while True:
    peer, (address, _) = server.accept()
    peer.sendall(f'{socket.gethostname()} hears {address}'.encode())
    peer.close()
"""


def until(condition: Callable[[], Any], timeout: float = 20) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


@pytest.fixture(scope='module')
def two(tmp_path_factory) -> Iterator[Machines]:
    with Machines(2, tmp_path_factory.mktemp('two'), dict(small='64k')) as machines:
        for machine in machines.nodes:
            server = machine.run([sys.executable, '-S', '-c', ANSWER])
            until(lambda server=server: 'listens' in server.output)
        yield machines


def ask(machine: Machine, peer: Machine, timeout: float = 5) -> Process:
    asked = machine.run([sys.executable, '-S', '-c', ASK, peer.name, timeout])
    asked.wait(60)
    return asked


def test_machines_have_names_and_addresses(two: Machines) -> None:
    zero, one = two.nodes
    assert ask(zero, one).output == 'node1 hears 10.99.0.1\n'
    assert ask(one, one).output == 'node1 hears 10.99.0.2\n'
    assert ask(two.store, zero).output == 'node0 hears 10.99.0.3\n'


def test_machines_have_memories_of_their_own(two: Machines) -> None:
    zero, one = two.nodes
    assert zero.run(['mkdir', '/dev/shm/mapsage-try']).wait(20) == 0
    assert zero.run(['touch', '/dev/shm/mapsage-try/copy']).wait(20) == 0
    assert (zero.memory(), one.memory()) == (['copy'], [])
    assert not Path('/dev/shm/mapsage-try').exists()


def test_scripts_are_forked_inside_the_machine(two: Machines, tmp_path: Path) -> None:
    script = tmp_path / 'script.py'
    script.write_text(
        'import os, socket, sys\n'
        'print("torch" in sys.modules, socket.gethostname(), os.environ["GIVEN"])\n'
    )
    told = two.nodes[1].run([two.nodes[1].python, script], GIVEN='this')
    assert told.wait(60) == 0
    assert told.output == 'True node1 this\n'


def test_a_cut_link_and_a_healed_one(two: Machines) -> None:
    zero, one = two.nodes
    one.cut()
    assert ask(zero, one, 1).status != 0
    assert ask(zero, two.store, 1).output.endswith(
        'ConnectionRefusedError: [Errno 111] Connection refused\n'
    )
    one.heal()
    assert until(lambda: ask(zero, one, 1).status == 0)


@pytest.mark.parametrize('direction', ['in', 'out'])
def test_one_way_drops(direction: str, two: Machines) -> None:
    zero, one = two.nodes
    one.drop(direction, [zero])
    assert 'imed out' in ask(zero, one, 1).output  # without a word, as a firewall does
    assert ask(two.store, one).status == 0
    one.heal()
    one.drop(direction)
    assert 'imed out' in ask(two.store, one, 1).output
    one.heal()
    assert ask(zero, one).status == 0


def test_a_throttled_link_still_carries(two: Machines) -> None:
    zero, one = two.nodes
    one.throttle('100kbit')
    assert 'rate 100Kbit' in module._in(one.namespace, 'tc', 'qdisc', 'show')
    assert ask(zero, one, 20).status == 0
    one.heal()
    assert 'tbf' not in module._in(one.namespace, 'tc', 'qdisc', 'show')


def test_a_small_disk(two: Machines) -> None:
    disk = two.disks['small']
    (disk / 'shared').write_text('seen by all')
    assert two.nodes[1].run(['cat', disk / 'shared']).wait(20) == 0
    wrote = two.nodes[0].run(['dd', 'if=/dev/zero', f'of={disk}/file', 'bs=1k', 'count=100'])
    assert wrote.wait(20) != 0
    assert 'No space left' in wrote.output


def test_two_runs_do_not_meet_and_leave_nothing(two: Machines, tmp_path: Path) -> None:
    before = set(module.NAMESPACES.iterdir())
    with Machines(1, tmp_path, dict(disk='64k')) as other:
        # the same address, where nobody listens
        assert ask(other.store, other.nodes[0]).status != 0
        left = other.nodes[0].run(['sleep', '600'])
        other.nodes[0].power_off()
        left.wait(20)
        until(lambda: not other.nodes[0].pids())
        left = other.store.run(['sleep', '600'])
    assert left.wait(20) == -signal.SIGKILL
    assert set(module.NAMESPACES.iterdir()) == before
    assert f' {other.disks["disk"]} ' not in Path('/proc/mounts').read_text()
    assert ask(two.store, two.nodes[0]).status == 0


def test_leftovers_of_a_killed_run_are_removed(two: Machines) -> None:
    owner = subprocess.Popen(['sleep', '600'])
    name = f'mapsage-{owner.pid}.{module._started(owner.pid)}.0-node0'
    module._command('ip', 'netns', 'add', name)
    module.remove_leftovers()
    assert (module.NAMESPACES / name).exists()
    owner.kill()
    owner.wait()
    sleeper = subprocess.Popen(['nsenter', f'--net={module.NAMESPACES / name}', 'sleep', '600'])
    until(
        lambda: (
            os.stat(f'/proc/{sleeper.pid}/ns/net').st_ino
            == os.stat(module.NAMESPACES / name).st_ino
        )
    )
    module.remove_leftovers()
    assert sleeper.wait(20) == -signal.SIGKILL
    assert not (module.NAMESPACES / name).exists()
    assert Path(module.NAMESPACES / two.store.namespace).exists()
