"""What a rank costs the others and the rendezvous store: connections, requests, and its end."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from agreeing import PATIENT, Answers, error_of, start, wait_for_others
from forked import DIED, fork_scenarios
from ranks import run_ranks
from support import main_leg

from mapsage.distributed import (
    Consensus,
    all_ranks_or_none,
    lost_ranks_named,
    open_channel,
    tell_why,
)
from mapsage.distributed.channels.open_channels import roll_call
from mapsage.distributed.store import LockedStore

pytestmark = main_leg
# What a run with dynamic sampling opens over all ranks.
PURPOSES = [(None, ''), (None, 'blocks'), (PATIENT, 'sampling'), (PATIENT, 'sampling summary')]
CLONE_NEWUTS = 0x04000000  # of Linux: a host name of one's own
COSTLY = 16  # ranks at which the cost of naming one is counted


def run_scenarios(folder: Path) -> Dict[Tuple[str, int], Any]:
    return fork_scenarios(
        {
            ('healthy', 3): (count_requests, 3),
            ('few files', 8): (open_with_few_files, 8),
            ('groups', 3): (fail_in_one_of_two_groups, 3, Path),
            ('stopped', 3): (stop_a_rank, 3, Path),
            ('keeper raises', 3): (end_the_keeper, 3, 'raises', Path),
            ('keeper dies', 4): (end_the_keeper, 4, 'dies', Path),
            ('behind, slow', 4): (stay_behind, 4, 'slow', Path),
            ('behind, dead', 4): (stay_behind, 4, 'dead', Path),
            ('hosts', 3): (end_on_another_host, 3),
            ('last words', 3): (end_with_words, 3, Path),
            ('raises in training', 3): (end_past_the_channels, 3, 'raises', Path),
            ('dies in training', 3): (end_past_the_channels, 3, 'dies', Path),
            ('cut', 2): (cut_connections, 2, Path),
            ('cut', 3): (cut_connections, 3, Path),
            ('cut', 5): (cut_connections, 5, Path),
            ('worker', 2): (end_before_a_worker, 2, Path),
            ('forks', 2): (fork_between_collectives, 2),
            ('threads', 4): (talk_in_other_orders, 4),
            ('costs', COSTLY): (name_one_of_many, COSTLY, Path),
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('connections')
    return Answers(run_ranks(run_scenarios, 1, folder, folder, timeout=600)[0])


class Requests:
    """Counts the requests that this process makes to the rendezvous store."""

    def __init__(self) -> None:
        self.count = 0
        for name in ('add', 'set', 'find'):
            setattr(LockedStore, name, self._counted(getattr(LockedStore, name)))

    def _counted(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.count += 1
            return method(*args)

        return call


def count_requests() -> int:
    rank = start()
    requests = Requests()
    channels = [open_channel(None, *each) for each in PURPOSES]
    consensus = Consensus(['step'])
    before = 0
    for number in range(20):
        for channel in channels:
            channel.gather(torch.tensor(rank))
            channel.max(torch.tensor(rank))
            channel.broadcast(torch.tensor(rank), 1)
            channel.gather_texts('all well')
        consensus.tick(step=number)
        with all_ranks_or_none():
            before = before or requests.count  # as of the second round all has been opened
    return requests.count - before


def test_a_healthy_step_asks_the_store_nothing(answers: Answers) -> None:
    assert answers.of('healthy', 3) == [0, 0, 0]


def open_with_few_files() -> List[int]:
    rank = start()
    held = len(os.listdir('/proc/self/fd'))
    # eight ranks may have as few of them as two hundred have of 1,024
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 25, held + 25))
    channels = [open_channel(None, *each) for each in PURPOSES]
    return [int(max(channel.gather(torch.tensor(rank)))) for channel in channels]


def test_all_purposes_share_the_connections(answers: Answers) -> None:
    assert answers.of('few files', 8) == [[7] * len(PURPOSES)] * 8


def fail_in_one_of_two_groups(folder: Path) -> Any:
    rank = start()
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
    order = [1, 0] if rank == 2 else [0, 1]  # in which it opens its channels
    told = {}
    for number in order:
        told[number] = open_channel(groups[number], 2)
    error = {} if rank == 2 else error_of(lambda: told[0].gather(torch.tensor(rank)))
    wait_for_others(folder, [0, 1])
    largest = torch.tensor(rank)
    told[1].max(largest, 2)
    after = int(largest)
    pair = (
        []
        if rank == 2
        else [int(each) for each in open_channel(groups[2], 2).gather(torch.tensor(rank))]
    )
    wait_for_others(folder, [0, 1, 2], 'done with all ')
    return error.get('ranks'), after, pair


def test_the_failure_of_a_group_is_not_that_of_another(answers: Answers) -> None:
    assert answers.of('groups', 3) == [([2], 2, [0, 1])] * 2 + [(None, 2, [])]


def stop_a_rank(folder: Path) -> Any:
    rank = start()
    channel = open_channel(None, 2)
    pids = [int(each) for each in channel.gather(torch.tensor(os.getpid()))]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_others(folder, [0, 2])
        return {}
    error = error_of(lambda: channel.gather(torch.tensor(rank)))
    wait_for_others(folder, [0, 2], 'told ')
    os.kill(pids[1], signal.SIGCONT)
    wait_for_others(folder, [1, 0, 2])
    return error


def test_a_stopped_rank_is_named_as_one_that_does_not_answer(answers: Answers) -> None:
    for error in answers.of('stopped', 3)[::2]:
        assert error['ranks'] == [1] and 'does not answer. They' in error['message']


def end_the_keeper(how: str, folder: Path) -> Any:
    rank = start()  # rank 0 keeps the store
    consensus = Consensus(['step'], timeout=PATIENT)

    def step() -> None:
        with all_ranks_or_none('the step'):
            if rank == 0:
                raise KeyError('rank 0 alone')
            consensus.tick(step=2)

    consensus.tick(step=1)
    if rank == 0:
        if how == 'raises':
            error_of(step)
        os._exit(1)
    error = error_of(step)
    wait_for_others(folder, list(range(1, dist.get_world_size())))
    return error


def test_the_end_of_the_stores_keeper_is_named(answers: Answers) -> None:
    for error in answers.of('keeper raises', 3)[1:]:
        assert error['message'] == "rank 0 failed in the step: KeyError: 'rank 0 alone'"
    for error in answers.of('keeper dies', 4)[1:]:
        assert error['ranks'] == [0] and 'Rank 0 on host' in error['message']
        assert 'Broken pipe' not in error['message']


def stay_behind(how: str, folder: Path) -> Any:
    rank = start()
    channel = open_channel(None, 3)
    channel.gather(torch.tensor(rank))
    if rank == 1:  # rank 3 would have the broadcast from it
        if how == 'dead':
            os._exit(1)
        wait_for_others(folder, [0, 2, 3])
        return {}
    error = error_of(
        lambda: [channel.broadcast(torch.tensor(rank), 0), channel.gather(torch.tensor(rank))]
    )
    wait_for_others(folder, [0, 2, 3])
    return error


@pytest.mark.parametrize('how', ['slow', 'dead'])
def test_a_rank_that_waits_one_collective_behind_is_not_named(how: str, answers: Answers) -> None:
    every = answers.of(f'behind, {how}', 4)
    assert [every[rank]['ranks'] for rank in (0, 2, 3)] == [[1]] * 3


def end_on_another_host() -> Any:
    rank = int(os.environ['RANK'])
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        return 'not permitted'
    socket.sethostname(f'node-{rank}')
    start()
    channel = open_channel(None, PATIENT)
    channel.gather(torch.tensor(rank))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: channel.gather(torch.tensor(rank)))


def test_the_host_of_a_lost_rank_is_named(answers: Answers) -> None:
    first, second, gone = answers.of('hosts', 3)
    if first == 'not permitted':
        pytest.skip('this user may not give a process a host name of its own')
    assert gone == DIED
    for error in (first, second):
        assert error['ranks'] == [2] and 'Rank 2 on host node-2: its process' in error['message']


def end_with_words(folder: Path) -> Any:
    rank = start()
    channel = open_channel(None, PATIENT)
    channel.gather(torch.tensor(rank))
    if rank == 1:
        sys.last_value = ValueError('tile 7 is damaged')  # as the interpreter sets it at its end
        dist.destroy_process_group()
        return {}
    error = error_of(lambda: channel.gather(torch.tensor(rank)))
    wait_for_others(folder, [0, 2])
    return error


def test_a_rank_that_ends_with_an_error_says_which(answers: Answers) -> None:
    for error in answers.of('last words', 3)[::2]:
        assert error['ranks'] == [1]
        assert 'it ended with ValueError: tile 7 is damaged' in error['message']


def end_past_the_channels(how: str, folder: Path) -> Any:
    rank = start()
    open_channel(None, PATIENT).gather(torch.tensor(rank))
    gradients = torch.ones(1000)
    if rank == 1:
        if how == 'raises':  # as mapsage.commands ends
            tell_why(KeyError('tile 7'))
        os._exit(1)
    with pytest.raises(RuntimeError) as caught, lost_ranks_named('training'):
        while True:
            dist.all_reduce(gradients)
    wait_for_others(folder, [0, 2])
    return getattr(caught.value, 'ranks', None), str(caught.value)


@pytest.mark.parametrize('how', ['raises', 'dies'])
def test_an_end_in_a_collective_of_torch_names_rank_and_host(how: str, answers: Answers) -> None:
    for ranks, text in answers.of(f'{how} in training', 3)[::2]:
        assert ranks == [1] and f'Rank 1 on host {socket.gethostname()}: it' in text
        assert ("it ended with KeyError: 'tile 7'" in text) == (how == 'raises')


def cut_connections(folder: Path) -> Any:
    rank, world = start(), dist.get_world_size()
    channel = open_channel(None, 4)
    for _ in range(2):
        channel.gather(torch.tensor(rank))
    if rank == world - 1:
        for connection in list(roll_call().mesh._sockets):
            connection.shutdown(socket.SHUT_RDWR)
    else:
        time.sleep(0.2 * rank)  # who is not there yet is no suspect
    error = error_of(lambda: [channel.gather(torch.tensor(rank)) for _ in range(3)])
    wait_for_others(folder, list(range(world)))
    return error


@pytest.mark.parametrize('world', [2, 3, 5])
def test_a_rank_that_lost_all_its_connections_is_named(world: int, answers: Answers) -> None:
    *others, cut = answers.of('cut', world)
    if world == 2:  # neither knows which end it was, and the first to notice tells the other
        assert len(others[0]['ranks']) == len(cut['ranks']) == 1
        return
    for error in others:
        assert error['ranks'] == [world - 1], error
        assert 'answers, and' in error['message']
    assert cut['ranks'] == [world - 1]


def end_before_a_worker(folder: Path) -> Any:
    rank = start()
    channel = open_channel(None, PATIENT)
    channel.gather(torch.tensor(rank))
    if rank == 1:
        if not os.fork():  # as a loader forks its workers
            until = time.monotonic() + 30
            while not (folder / 'done0').exists() and time.monotonic() < until:
                time.sleep(0.05)
        os._exit(1)
    error = error_of(lambda: channel.gather(torch.tensor(rank)))
    wait_for_others(folder, [0])
    return error


def test_a_forked_worker_does_not_hide_the_end_of_its_rank(answers: Answers) -> None:
    error, gone = answers.of('worker', 2)
    assert gone == DIED and error['ranks'] == [1]
    assert 'its process has ended' in error['message']


def fork_between_collectives() -> List[int]:
    rank = start()
    channel = open_channel(None, PATIENT)
    states = []
    for _ in range(20):
        held = channel.gather(torch.full((1000,), rank))  # released after the fork
        pid = os.fork()
        if not pid:
            del held
            thread = threading.Thread(target=lambda: torch.ones(10).sum())
            thread.start()
            thread.join()
            os._exit(0)
        states.append(os.waitpid(pid, 0)[1])
    return sorted(set(states))


def test_a_fork_between_collectives_is_no_deadlock(answers: Answers) -> None:
    assert answers.of('forks', 2) == [[0], [0]]


def talk_in_other_orders() -> List[int]:
    rank = start()
    wrong: List[int] = []

    def talk(purpose: str, pause: float) -> None:
        channel = open_channel(None, PATIENT, purpose)
        for number in range(100):
            time.sleep(pause)
            got = [int(each) for each in channel.gather(torch.tensor(number))]
            wrong.extend(each for each in got if each != number)

    threads = [
        threading.Thread(target=talk, args=(name, pause), daemon=True)
        for name, pause in (('a', 0.001 * rank), ('b', 0.001 * (3 - rank)), ('c', 0.0))
    ]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join(PATIENT - 30)
    return wrong + [-1 for thread in threads if thread.is_alive()]


def test_threads_may_talk_in_another_order_on_each_rank(answers: Answers) -> None:
    assert answers.of('threads', 4) == [[]] * 4


def name_one_of_many(folder: Path) -> Any:
    rank = start()
    world = dist.get_world_size()
    requests = Requests()
    channel = open_channel(None, 5)
    channel.gather(torch.tensor(rank))
    before = requests.count
    if rank == 3:
        wait_for_others(folder, [each for each in range(world) if each != 3])
        return [], requests.count - before
    error = error_of(lambda: channel.gather(torch.tensor(rank)))
    count = requests.count - before
    wait_for_others(folder, list(range(world)))
    return error['ranks'], count


def test_naming_costs_each_rank_a_constant_number_of_requests(answers: Answers) -> None:
    every = answers.of('costs', COSTLY)
    assert [ranks for ranks, _ in every] == [[] if rank == 3 else [3] for rank in range(COSTLY)]
    # one reads what the others wrote; these look a few times whether it is done
    assert sum(count for _, count in every) < 20 * COSTLY
