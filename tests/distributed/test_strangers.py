"""Jobs of real processes that strangers connect with, and ranks that hold different secrets."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

import pytest
import torch
import torch.distributed as dist
from agreeing import PATIENT, Answers, error_of, start, wait_for_others
from forked import fork_scenarios
from mmengine.config import Config
from ranks import run_ranks
from support import main_leg

from mapsage.distributed import RankError, open_channel
from mapsage.distributed.channels.open_channels import roll_call
from mapsage.distributed.lost_ranks import leave_watches, watches
from mapsage.extras.elastic import heartbeat, nodes
from mapsage.extras.elastic.heartbeat import WatchSockets
from mapsage.extras.elastic.neighbor import copies
from mapsage.extras.elastic.neighbor.link import CopyReceiver
from mapsage.extras.elastic.nodes import meet_nodes
from mapsage.extras.streaming.wire.link import LinkError
from mapsage.extras.streaming.wire.opening import open_links
from mapsage.sampling import plan_exchange
from mapsage.sampling.packing import pack_samples
from mapsage_launcher.trust.sealed import BrokenSealError

# The package has a function of this name.
sampling_exchange: Any = importlib.import_module('mapsage.sampling.exchange')
pytestmark = main_leg
FILES = 256  # that a process may open
CROWD = 600
# Opens connections to each address, sends something on each and keeps them.
ATTACK = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held, (count, sent, *addresses) = [], sys.argv[1:]
for address in addresses:
    host, port = address.rsplit(':', 1)
    for _ in range(int(count)):
        held.append(socket.create_connection((host, int(port)), 60))
        held[-1].sendall(bytes.fromhex(sent))
print('in', flush=True)
sys.stdin.read()
"""
# Starts the command behind it once a file exists.
LATE = 'until [ -e "$0" ]; do sleep 0.02; done; exec "$@"'


@contextmanager
def crowd(addresses: Sequence[Any], count: int = CROWD, sent: bytes = b'') -> Iterator[None]:
    """Have another process keep so many connections to each address open."""
    with subprocess.Popen(
        [
            sys.executable,
            '-I',
            '-S',
            '-c',
            ATTACK,
            str(count),
            sent.hex(),
            *(f'{address[0]}:{address[1]}' for address in addresses),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b'in\n'
        yield
        process.stdin.close()


def use_few_files() -> None:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def open_many_files() -> int:
    """Open what a step of a training opens, and close it."""
    files = [open(os.devnull, 'rb') for _ in range(64)]
    for file in files:
        file.close()
    return len(files)


def run_scenarios(folder: Path) -> Dict[Any, Any]:
    return fork_scenarios(
        {
            ('idle', 3): (meet_in_a_crowd, 3, Path, b'', CROWD),
            ('announcing', 2): (meet_in_a_crowd, 2, Path, b'MapSage\1' + b'\0\x10\0\0' * 9, 300),
            ('garbage', 5): (meet_in_a_crowd, 5, Path, b'GET / HTTP/1.1\r\n\r\n', 100),
            ('watch', 3): (join_in_a_crowd, 3, Path),
            ('copies', 2): (copy_in_a_crowd, 2, Path),
            **{(('secret', rank), 3): (differ, 3, rank, Path) for rank in range(3)},
            ('links', 3): (link_in_a_crowd, 3, Path),
            ('links, secret', 2): (link_with_other_secrets, 2, Path),
            ('changed', 3): (receive_what_was_changed, 3, Path),
            ('stale', 2): (meet_a_port_of_another_job, 2, Path),
        },
        folder,
        2 * PATIENT,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('strangers')
    return Answers(run_ranks(run_scenarios, 1, folder, folder, timeout=600)[0])


# --- the channels


def meet_in_a_crowd(folder: Path, sent: bytes, count: int) -> Any:
    """Open the first connections while strangers hold theirs at every rank."""
    use_few_files()
    rank = start()
    mesh = roll_call().mesh
    wait_for_others(folder, range(dist.get_world_size()), 'listens ')
    before, addresses = memory(), []
    if rank == 1:
        addresses = [mesh._address(each) for each in range(dist.get_world_size())]
    sums = []
    with crowd(addresses, count, sent):
        wait_for_others(folder, [1], 'in ')
        for number in range(20):
            channel = open_channel(None, PATIENT, f'purpose {number}')
            sums.append(int(sum(channel.gather(torch.tensor(rank + number)))))
            open_many_files()
        grown = memory() - before
        wait_for_others(folder, range(dist.get_world_size()))
    return sums, grown


def memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize('scenario, world', [('idle', 3), ('announcing', 2), ('garbage', 5)])
def test_channels_open_and_last_in_a_crowd(answers: Answers, scenario: str, world: int) -> None:
    told = answers.of(scenario, world)
    assert [sums for sums, _ in told] == [
        [sum(range(world)) + world * number for number in range(20)]
    ] * world
    assert max(grown for _, grown in told) < 16 * 2**20


def differ(whose: int, folder: Path) -> Any:
    """One rank holds another secret than the others."""
    if os.environ['RANK'] == str(whose):
        os.environ['MAPSAGE_SECRET'] = 'd1ff' * 16
    rank = start()
    error = error_of(lambda: open_channel(None, 20).gather(torch.tensor(rank)))
    wait_for_others(folder, range(3))
    return error


@pytest.mark.parametrize('whose', range(3))
def test_another_secret_is_named_on_every_rank(answers: Answers, whose: int) -> None:
    for error in answers.of(('secret', whose), 3):  # type: ignore[arg-type]
        assert error['type'] == 'RankLostError'
        assert 'hold different secrets' in error['message'], error
        assert whose in error['ranks'] and f'rank {whose} on host' in error['message']
        assert 'MAPSAGE_SECRET_FILE' in error['message'] and 'rank' in error['message']
        assert (
            'd1ff' not in error['message'] and os.environ['MAPSAGE_SECRET'] not in error['message']
        )


def meet_a_port_of_another_job(folder: Path) -> Any:
    """A port that was given again, to another job of this user with the same secret."""
    rank = start()
    mesh = roll_call().mesh
    if rank == 1:
        host, port, number, name = mesh._address(1)
        mesh._store.set(f'{mesh._prefix}/address/1', json.dumps([host, port, '0' * 32, name]))
    wait_for_others(folder, range(2), 'listens ')
    error = (
        error_of(lambda: open_channel(None, PATIENT).max(torch.tensor(rank))) if rank == 0 else None
    )
    wait_for_others(folder, range(2))
    return error


class Command:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def receive_what_was_changed(folder: Path) -> Any:
    """On their way to the others, the samples of rank 1 get the seal of another secret."""
    rank = start()
    if rank == 1:
        sampling_exchange.pack_samples = lambda samples, secret: pack_samples(samples, b'x' * 64)
    samples = [Command(folder / f'ran on {rank}')] * (3 if rank == 1 else 0)
    message = ''
    try:
        sampling_exchange.exchange(
            samples, plan_exchange([0, 3, 0], 1), open_channel(None, None, 'sampling')
        )
    except (BrokenSealError, RankError) as error:
        message = str(error)
    wait_for_others(folder, range(3))
    return message, sorted(path.name for path in folder.glob('ran on *'))


def test_samples_that_were_changed_on_their_way_are_not_unpickled(answers: Answers) -> None:
    told = answers.of('changed', 3)
    assert [ran for _, ran in told] == [[]] * 3
    assert all('do not carry the seal' in message for message, _ in told), told


# --- the watch of a node


def join_in_a_crowd(folder: Path) -> str:
    """The watches of two nodes join while strangers hold connections to the first one's."""
    rank = int(os.environ['RANK'])
    mark = folder / 'crowd is in'
    command = heartbeat.watch_command
    attacks: List[Any] = []

    class Crowded(WatchSockets):
        def start(self, node: int, *args: Any) -> None:
            super().start(node, *args)
            if node == 0:
                use_few_files()
                attacks.append(crowd([self.facts['address']], 100))
                attacks[0].__enter__()
                mark.touch()

    nodes.WatchSockets = Crowded  # type: ignore[misc]
    if rank:
        heartbeat.watch_command = lambda *sockets: ['sh', '-c', LATE, str(mark), *command(*sockets)]
    os.environ.update(
        GROUP_RANK=str(rank), GROUP_WORLD_SIZE='3', LOCAL_RANK='0', LOCAL_WORLD_SIZE='1'
    )
    use_few_files()
    start()
    nodes._FOLDER_SECONDS = 0.5  # type: ignore[attr-defined]
    meet_nodes(Config(dict(model=dict(depth=18))), '/', 6.0)
    time.sleep(7.0)  # in which each would be missed that has not joined
    finding = watches[-1].finding  # type: ignore[attr-defined]
    leave_watches()
    for attack in attacks:
        attack.__exit__(None, None, None)
    wait_for_others(folder, range(3))
    return 'alive' if finding is None else finding['text']


def test_a_second_machine_joins_the_watch_beside_100_silent_strangers(answers: Answers) -> None:
    assert answers.of('watch', 3) == ['alive'] * 3


# --- copies


def copy_in_a_crowd(folder: Path) -> Any:
    """A checkpoint is copied to another machine that strangers hold connections to."""
    use_few_files()
    rank = int(os.environ['RANK'])
    os.environ.update(GROUP_RANK=str(rank), GROUP_WORLD_SIZE='2', LOCAL_RANK='0')
    disk, remembered = folder / f'disk {rank}', folder / f'memory {rank}'
    for place in (disk, remembered):
        place.mkdir()
    receivers: List[CopyReceiver] = []

    class Known(CopyReceiver):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            receivers.append(self)

    copies.CopyReceiver = Known  # type: ignore[misc]
    start()
    neighbor = copies.NeighborCopies(str(disk), memory=remembered)
    with neighbor.running(logging.getLogger(), False):
        with crowd([receiver.address for receiver in receivers], CROWD, b'M'):
            wait_for_others(folder, range(2), 'in ')
            (disk / 'iter_5.pth').write_bytes(bytes(9 * 2**20))
            neighbor.send(str(disk / 'iter_5.pth'))
            if rank == 1:
                deadline = time.monotonic() + PATIENT
                while not list(remembered.glob('*/*-iter_5.pth')):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            wait_for_others(folder, range(2))
            return [path.stat().st_size for path in neighbor._store.copies()]


def test_a_copy_arrives_beside_600_strangers(answers: Answers) -> None:
    assert answers.of('copies', 2) == [[], [9 * 2**20]]


# --- encoders


def link_in_a_crowd(folder: Path) -> Any:
    """A head connects with two encoders that strangers hold connections to, and again later."""
    use_few_files()
    rank = int(os.environ['RANK'])
    store = dist.FileStore(str(folder / 'store'), -1)
    if rank:
        links = open_links(store, rank, [1, 2], [0], PATIENT, PATIENT)
        wait_for_others_without_group(folder, rank, 3)
        return len(links)
    addresses = [json.loads(store.get(f'mapsage/extras/streaming/at/{each}')) for each in (1, 2)]
    with crowd(addresses):
        links = open_links(store, rank, [1, 2], [0], PATIENT, PATIENT)
        open_many_files()
        for link in links.values():
            link.abandon('to open it again')
            assert link.await_open(PATIENT) is None
        wait_for_others_without_group(folder, rank, 3)
        return len(links)


def wait_for_others_without_group(folder: Path, rank: int, world: int) -> None:
    (folder / f'done{rank}').touch()
    deadline = time.monotonic() + PATIENT
    while any(not (folder / f'done{each}').exists() for each in range(world)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_head_connects_beside_600_strangers(answers: Answers) -> None:
    assert answers.of('links', 3) == [2, 1, 1]


def link_with_other_secrets(folder: Path) -> str:
    rank = int(os.environ['RANK'])
    if rank == 1:
        os.environ['MAPSAGE_SECRET'] = 'd1ff' * 16
    store = dist.FileStore(str(folder / 'store'), -1)
    try:
        open_links(store, rank, [1], [0], 5.0, 5.0)
    except LinkError as error:
        return str(error)
    return 'linked'


def test_an_encoder_with_another_secret_is_named_on_both_sides(answers: Answers) -> None:
    head, encoder = answers.of('links, secret')
    assert 'encoder rank 1' in head and 'hold different secrets' in head
    assert 'MAPSAGE_SECRET_FILE' in head
    assert 'head rank 0' in encoder and 'MAPSAGE_SECRET_FILE' in encoder


def test_a_port_of_another_job_is_no_rank(answers: Answers) -> None:
    error, _ = answers.of('stale')
    assert 'another process listens at its address now' in error['message']
