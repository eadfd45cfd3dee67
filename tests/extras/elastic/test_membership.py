"""Launchers in torch's own rendezvous: its store ends, is silent or a new one; who is lost."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Callable, Iterator, List

import pytest
from ranks import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from mapsage_launcher.nodes import elastic, elastic_agent, membership


class Launcher:
    """A launcher's part of the rendezvous, without ranks."""

    def __init__(self, settings: elastic.Settings, number: int) -> None:
        parameters = RendezvousParameters(
            'c10d',
            f'127.0.0.1:{settings.port}',
            settings.run_id,
            *settings.nodes,
            is_host=0,
            join_timeout=60,
            last_call_timeout=60,
            keep_alive_interval=60,
        )
        backend, store = create_backend(parameters)
        self.handler = dynamic_rendezvous.create_handler(store, backend, parameters)
        node = self.handler._this_node
        self.handler._this_node = self.handler._op_executor._node = type(node)(
            f'127.0.0.{number + 1}', node.pid, node.local_id
        )
        self.handler._state_holder._cache_duration = 0
        self.watched, self.said, self.ended = False, [], False  # type: bool, List[str], bool
        self.membership = membership.Membership(
            self.handler,
            ('127.0.0.1', settings.port),
            lambda: elastic_agent._connect(settings),
            lambda: self.watched,
            self.said.append,
        )

    @property
    def state(self) -> Any:
        return self.handler._state_holder.state

    def meet(self) -> None:
        self.membership.arrive()
        try:
            self.handler.next_rendezvous()
            self.membership.formed()
        # the second: of a machine that stands on the list of those that may come later
        except (RendezvousClosedError, RendezvousGracefulExitError):
            self.ended = True

    def forget(self, *others: Any) -> None:
        """Write into the store that some have been silent for too long."""
        with self.handler._heartbeat_lock:
            self.handler._state_holder.sync()
            for other in others:
                self.state.participants.pop(other.handler._this_node)
                self.state.last_heartbeats.pop(other.handler._this_node)
            if not self.state.participants:  # as torch has it
                self.state.complete, self.state.round = False, self.state.round + 1
            self.handler._state_holder.mark_dirty()
            assert self.handler._state_holder.sync()


class Place:
    """A rendezvous store, which can be started again at the same address."""

    def __init__(self) -> None:
        self.settings = elastic.Settings((2, 3), '127.0.0.1', free_port(), 'job')
        self.launchers: List[Launcher] = []
        self.start()

    def start(self) -> None:
        self.store = TCPStore(
            '127.0.0.1',
            self.settings.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )

    def end(self) -> None:
        self.store = None

    def launcher(self) -> Launcher:
        self.launchers.append(Launcher(self.settings, len(self.launchers)))
        return self.launchers[-1]

    def meet(self, *launchers: Launcher, of: int = 3) -> None:
        """Let machines meet; none waits for more where all ``of`` them have come."""
        for each in launchers:
            each.handler._settings.timeout._last_call = timedelta(seconds=60 if of == 3 else 0.05)
        threads = [threading.Thread(target=each.meet, daemon=True) for each in launchers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1')
    monkeypatch.setattr(dynamic_rendezvous, '_delay', lambda seconds: time.sleep(0.05))
    monkeypatch.setattr(membership, '_ASK_SECONDS', 0.1)
    place = Place()
    yield place
    for each in place.launchers:
        each.handler._stop_heartbeats()


@pytest.fixture
def two(place: Place) -> List[Launcher]:
    launchers = [place.launcher(), place.launcher()]
    place.meet(*launchers, of=2)
    assert [each.membership.waiting() for each in launchers] == [0, 0]
    return launchers


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_store_that_is_started_again_finds_the_same_group(
    place: Place, two: List[Launcher]
) -> None:
    one, other = two
    place.end()
    until(lambda: [each.membership.waiting() for each in two] == [0, 0] and one.said and other.said)
    assert all('the rendezvous store has ended' in each.said[0] for each in two)
    place.start()
    until(
        lambda: (
            [each.membership.waiting() for each in two] == [0, 0]
            and len(one.said) > 1
            and len(other.said) > 1
        )
    )
    assert len(one.state.participants) == 2
    joiner = place.launcher()
    thread = threading.Thread(target=joiner.meet, daemon=True)
    thread.start()
    until(lambda: one.membership.waiting() and other.membership.waiting())
    assert one.membership.reason == 'machines are waiting to join'
    place.meet(one, other)
    thread.join(60)
    assert {len(each.state.participants) for each in place.launchers} == {3}
    assert [each.membership.first_round for each in place.launchers] == [0, 0, 1]


def test_a_machine_that_comes_first_to_a_new_store_is_joined(
    place: Place, two: List[Launcher]
) -> None:
    place.end()
    until(
        lambda: (
            [each.membership.waiting() for each in two] == [0, 0] and two[0].said and two[1].said
        )
    )
    place.start()
    joiner = place.launcher()
    thread = threading.Thread(target=joiner.meet, daemon=True)
    thread.start()
    until(lambda: joiner.handler._this_node in joiner.state.participants)
    until(lambda: all(each.membership.waiting() for each in two))
    assert two[0].membership.reason == 'the other machines have met again'
    place.meet(*two)
    thread.join(60)
    assert {len(each.state.participants) for each in place.launchers} == {3}


@pytest.mark.parametrize('silent', [[0], [1], [0, 1]])
def test_a_machine_that_was_silent_for_a_while_keeps_its_place(
    silent: List[int], two: List[Launcher]
) -> None:
    for each in two:
        each.watched = True
    two[0].forget(*(two[number] for number in silent))
    assert [each.membership.waiting() for each in (*two, *two)] == [0] * 4
    for each in two:
        assert (each.state.complete, each.state.round) == (True, 0)
        assert set(each.state.participants.values()) == {0, 1}


def test_a_machine_that_is_lost_while_the_ranks_start_is_noticed(two: List[Launcher]) -> None:
    one, other = two
    other.membership.leave()
    assert one.membership.waiting() == 1
    assert one.membership.reason.startswith('lost while the ranks started: 127.0.0.2 (launcher ')
    one.watched = True  # now the ranks themselves notice
    assert one.membership.waiting() == 0


def test_a_machine_that_leaves_keeps_the_rendezvous_open(place: Place, two: List[Launcher]) -> None:
    one, other = two
    other.membership.leave()
    other.handler.shutdown()  # as torch does in the end
    assert not one.handler.is_closed()
    place.meet(one, place.launcher(), of=2)
    one.handler.shutdown()
    late = place.launcher()
    late.meet()
    assert late.ended and late.membership.came_late


def test_a_machine_too_many_waits_and_the_others_go_on(place: Place, two: List[Launcher]) -> None:
    threads = [
        threading.Thread(target=each.meet, daemon=True)
        for each in (place.launcher(), place.launcher(), *two)
    ]
    for each in two:  # a round of three, never one of these two alone
        each.handler._settings.timeout._last_call = timedelta(seconds=60)
    for thread in threads[:2]:
        thread.start()
    until(lambda: two[0].membership.waiting() and len(two[0].state.wait_list) == 2)
    for thread in threads[2:]:
        thread.start()
    until(lambda: sum(thread.is_alive() for thread in threads) == 1)  # one of the four
    trains = [each for each in place.launchers if each.membership._round == 1]
    assert len(trains) == 3
    # it stands on the list of those that wait, or on that of those that may come later
    assert [each.membership.waiting() for each in (*trains, *trains)] == [0] * 6
    another = place.launcher()
    assert another.membership.arrive()
    trains[0].handler.shutdown()
    for thread in threads:
        thread.join(60)
    assert [each.ended for each in place.launchers[:4]].count(True) == 1
    assert not any(each.membership.came_late for each in place.launchers[:4])


def test_a_job_that_was_asked_to_stop_goes_on_in_the_same_store(
    place: Place, two: List[Launcher]
) -> None:
    one, other = two
    for each in two:
        each.membership.note('stopped')
    one.membership.close()
    again = [place.launcher(), place.launcher()]
    place.meet(*again, of=2)
    assert [each.membership.first_round for each in again] == [1, 1]
    other.membership.close()  # it was slower
    assert not again[0].handler.is_closed()
    again[0].membership.note('complete')
    again[0].membership.close()
    late = place.launcher()
    late.meet()
    assert late.ended and late.membership.came_late and late.membership.was_complete()


def test_a_job_that_has_ended_by_an_error_is_not_opened_again(
    place: Place, two: List[Launcher]
) -> None:
    two[0].handler.shutdown()
    late = place.launcher()
    late.meet()
    assert late.ended and late.membership.came_late
    assert not late.membership.was_complete() and not late.membership.was_stopped()
