"""Of all processes that have become the writer of a work dir, the last one may write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from ranks import run_ranks

from mapsage.engine.checkpoints import writer_lease
from mapsage.engine.checkpoints.writer_lease import SupersededError, check_writer, take_lease


def may_write() -> bool:
    try:
        check_writer()
        return True
    except SupersededError:
        return False


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def take_turns(folder: Path, order: List[int]) -> List[bool]:
    """Take the lease after those before in ``order``; return what may be written before and after."""
    rank = int(os.environ['RANK'])
    until(lambda: all((folder / f'took{other}').exists() for other in order[: order.index(rank)]))
    take_lease(str(folder))
    told = [may_write()]
    (folder / f'took{rank}').touch()
    until(lambda: all((folder / f'took{other}').exists() for other in order))
    take_lease(str(folder))  # what has been taken before is not taken back
    return [*told, may_write()]


def take_at_once(folder: Path) -> bool:
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    (folder / f'here{rank}').touch()
    until(lambda: len(list(folder.glob('here*'))) == world)
    take_lease(str(folder))
    (folder / f'took{rank}').touch()
    until(lambda: len(list(folder.glob('took*'))) == world)
    return may_write()


@pytest.mark.parametrize('order', [[0, 1], [2, 0, 1]])
def test_the_last_of_several_processes_is_the_writer(order: List[int], tmp_path: Path) -> None:
    told = run_ranks(take_turns, len(order), tmp_path, tmp_path, order)
    assert told == [[True, rank == order[-1]] for rank in range(len(order))]


def test_one_of_several_that_come_at_once_is_the_writer(tmp_path: Path) -> None:
    assert sorted(run_ranks(take_at_once, 3, tmp_path, tmp_path)) == [False, False, True]
    assert [path.name for path in tmp_path.glob('.*')] == ['.writer']


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Path]:
    take_lease(str(tmp_path))
    yield tmp_path / '.writer'
    writer_lease._lease.clear()


@pytest.mark.parametrize('seconds', [-3600, -20, 20, 3600])
def test_no_clock_ends_the_lease(seconds: float, lease: Path) -> None:
    os.utime(lease, (time.time() + seconds, time.time() + seconds))
    assert may_write()


def test_a_rename_counts_when_it_is_seen(lease: Path) -> None:
    other = lease.with_name('.partial-of-another')  # a network disk may show the old name meanwhile
    other.write_text(json.dumps(dict(host='node7', process=1, word='0')))
    assert may_write()
    other.replace(lease)
    with pytest.raises(SupersededError, match='names another writer, .*node7'):
        check_writer()
    lease.write_text('')  # a file that another machine has begun to write, without a rename
    assert not may_write()


def test_a_word_that_was_removed_by_hand_is_nobody_elses(lease: Path) -> None:
    lease.unlink()
    assert may_write()


def test_a_process_that_takes_no_lease_writes_where_it_wants(lease: Path) -> None:
    writer_lease._lease.clear()
    assert may_write()


def test_a_second_run_of_a_process_has_a_lease_of_its_own(lease: Path, tmp_path: Path) -> None:
    other = tmp_path / 'other'
    other.mkdir()
    take_lease(str(other))
    (other / '.writer').write_text('another')
    assert not may_write()
    take_lease(str(tmp_path))
    assert may_write()
