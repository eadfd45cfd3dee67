"""Reading ahead of the model and writing behind it."""

from __future__ import annotations

import threading
from typing import Iterator, List

import pytest

from mapsage.maps.strips import WriteBehind, map_in_order, read_ahead


def _names() -> List[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize('count', [0, 1, 2, 9])
@pytest.mark.parametrize('depth', [1, 2])
def test_items_come_in_order(count: int, depth: int) -> None:
    assert list(read_ahead(range(count), depth)) == list(range(count))
    assert 'read-ahead' not in _names()


def test_items_are_drawn_while_the_one_before_is_worked_on_and_no_further() -> None:
    drawn = [threading.Event() for _ in range(9)]

    def draw() -> Iterator[int]:
        for number, event in enumerate(drawn):
            event.set()
            yield number

    items = read_ahead(draw(), 2)
    assert next(items) == 0
    assert drawn[1].wait(60) and drawn[2].wait(60)
    assert not drawn[3].wait(0.2)
    items.close()
    assert 'read-ahead' not in _names()


def test_an_error_is_raised_in_its_turn() -> None:
    def draw() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError('block 2 is damaged')

    got = []
    with pytest.raises(OSError, match='block 2 is damaged'):
        for item in read_ahead(draw(), 2):
            got.append(item)
    assert got == [0, 1] and 'read-ahead' not in _names()


@pytest.mark.parametrize('threads', [1, 2, 3])
@pytest.mark.parametrize('count', [0, 1, 2, 9])
def test_results_come_with_their_items_in_order(count: int, threads: int) -> None:
    assert list(map_in_order(str, range(count), threads)) == [(i, str(i)) for i in range(count)]
    assert not [name for name in _names() if name.startswith('compute')]


def test_two_items_are_computed_at_the_same_time_and_only_one_more_is_drawn() -> None:
    both, drawn = threading.Barrier(2), []

    def draw() -> Iterator[int]:
        for number in range(6):
            drawn.append(number)
            yield number

    def compute(number: int) -> int:
        both.wait(60)  # fails unless another thread computes, too
        return -number

    computed = map_in_order(compute, draw(), 2)
    assert next(computed) == (0, 0) and drawn == [0, 1, 2]
    assert list(computed) == [(number, -number) for number in range(1, 6)]


@pytest.mark.parametrize('threads', [1, 2])
def test_an_error_of_a_computation_is_raised_in_its_turn(threads: int) -> None:
    got = []
    with pytest.raises(ZeroDivisionError):
        for item, _ in map_in_order(lambda number: 6 // (2 - number), range(9), threads):
            got.append(item)
    assert got == [0, 1] and not [name for name in _names() if name.startswith('compute')]


def test_everything_is_written_in_order_at_the_end() -> None:
    written: List[int] = []
    with WriteBehind(written.append, 2) as behind:
        for number in range(20):
            behind.put(number)
    assert written == list(range(20)) and 'write-behind' not in _names()


def test_put_waits_while_as_many_calls_wait() -> None:
    begun, release, written = threading.Event(), threading.Event(), []

    def write(number: int) -> None:
        begun.set()
        assert release.wait(60)
        written.append(number)

    with WriteBehind(write, 1) as behind:
        behind.put(0)  # is being written
        behind.put(1)  # waits
        assert begun.wait(60)
        done = threading.Event()
        blocked = threading.Thread(target=lambda: (behind.put(2), done.set()))
        blocked.start()
        assert not done.wait(0.2)
        release.set()
        assert done.wait(60)
        blocked.join(60)
    assert written == [0, 1, 2]


def test_no_call_follows_an_error() -> None:
    queued, written = threading.Event(), []

    def write(number: int) -> None:
        if number == 1:
            raise OSError('disk full')
        assert queued.wait(60)
        written.append(number)

    with pytest.raises(OSError, match='disk full'):
        with WriteBehind(write, 2) as behind:
            for number in range(3):
                behind.put(number)
            queued.set()  # the call after the one that fails already waits
    assert written == [0] and 'write-behind' not in _names()


def test_an_error_of_the_last_call_is_raised_at_the_end() -> None:
    with pytest.raises(ValueError):
        with WriteBehind(int, 2) as behind:
            behind.put('tile')


def test_calls_that_wait_are_dropped_when_the_block_raises() -> None:
    begun, release, written = threading.Event(), threading.Event(), []

    def write(number: int) -> None:
        begun.set()
        assert release.wait(60)
        written.append(number)

    with pytest.raises(KeyboardInterrupt):
        with WriteBehind(write, 2) as behind:
            behind.put(0)
            behind.put(1)
            assert begun.wait(60)
            behind._calls[1].add_done_callback(lambda _: release.set())  # when it is dropped
            raise KeyboardInterrupt
    assert written == [0] and 'write-behind' not in _names()
