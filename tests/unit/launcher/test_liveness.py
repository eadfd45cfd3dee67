"""Peers that say something are alive; silent ones are reported once; a pause is nobody's fault."""

from __future__ import annotations

import threading
import time
from typing import Any, List, Tuple

import pytest

from mapsage_launcher.liveness import Liveness


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(*peers: str, timeout: float = 10.0) -> Tuple[Liveness, Clock, List[Any], List[Any]]:
    clock, beats, silent = Clock(), [], []
    liveness = Liveness(timeout, clock=clock)
    for peer in peers:
        liveness.watch(
            peer,
            lambda peer=peer: beats.append(peer),
            lambda seconds, peer=peer: silent.append((peer, seconds)),
        )
    return liveness, clock, beats, silent


def pass_seconds(liveness: Liveness, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        liveness.tick()


def test_a_peer_that_says_nothing_is_reported_once_and_others_go_on() -> None:
    liveness, clock, beats, silent = watched('a', 'b')
    for _ in range(4):
        pass_seconds(liveness, clock, 4)
        liveness.heard('b')
    assert silent == [('a', 11.0)]
    assert beats.count('b') == 16 and beats.count('a') == 10
    liveness.watch('a', lambda: None, lambda seconds: silent.append('again'))
    pass_seconds(liveness, clock, 10)
    assert silent == [('a', 11.0)]  # its time began again
    liveness.forget('a')
    pass_seconds(liveness, clock, 20)
    assert [each[0] for each in silent] == ['a', 'b']


def test_time_in_which_this_process_was_stopped_is_not_held_against_peers() -> None:
    liveness, clock, _, silent = watched('a')
    pass_seconds(liveness, clock, 9)
    clock.now += 3600  # a suspended machine
    liveness.tick()
    pass_seconds(liveness, clock, 1)
    assert silent == []
    pass_seconds(liveness, clock, 1)
    assert [each[0] for each in silent] == ['a']


@pytest.mark.parametrize('first, silent_after', [(60, 61), (3, 11)])
def test_the_first_sign_of_a_peer_may_take_longer(first: float, silent_after: int) -> None:
    liveness, clock, _, silent = watched()
    for peer in 'ab':
        liveness.watch(peer, lambda: None, lambda seconds, peer=peer: silent.append(peer), first)
    pass_seconds(liveness, clock, 2)
    liveness.heard('b')
    pass_seconds(liveness, clock, silent_after - 3)
    assert silent == (['b'] if first == 60 else [])  # its time is the usual one
    pass_seconds(liveness, clock, 1)
    assert silent[-1] == 'a'


def test_a_loaded_machine_is_not_a_stopped_one() -> None:
    liveness, clock, _, silent = watched('a')
    for _ in range(4):
        clock.now += 4  # each turn is late, by less than half of the timeout
        liveness.tick()
    assert [each[0] for each in silent] == ['a']


def test_one_peer_that_cannot_be_told_does_not_cost_the_others() -> None:
    liveness, clock, beats, silent = watched('b')

    def broken() -> None:
        raise OSError('no route')

    liveness.watch('a', broken, lambda seconds: silent.append(('a', seconds)))
    liveness.watch('c', lambda: beats.append('c'), lambda seconds: None)
    pass_seconds(liveness, clock, 1)
    assert beats == ['b', 'c'] and silent == []


def test_the_thread_beats_while_this_one_is_busy_and_ends() -> None:
    beaten = threading.Event()
    liveness = Liveness(5, interval=0.01).start()
    liveness.watch('a', beaten.set, lambda seconds: None)
    end = time.monotonic() + 30
    while not beaten.is_set() and time.monotonic() < end:
        sum(range(1000))
    assert beaten.is_set()
    liveness.close()
    assert not any(
        thread.name == 'liveness' and thread is liveness._thread for thread in threading.enumerate()
    )


@pytest.mark.parametrize('times', [(0, None), (-1, None), (5, 5), (5, 0)])
def test_times_that_cannot_be(times: Any) -> None:
    with pytest.raises(ValueError, match='expected positive'):
        Liveness(*times)
