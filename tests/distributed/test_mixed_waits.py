"""One rank does not come; some ranks wait for it at an agreement, some in torch.distributed."""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from ranks import run_ranks
from support import on_host

from mapsage.distributed import (
    RankLostError,
    broken_collective,
    lost_ranks,
    lost_ranks_named,
    open_channel,
)

pytestmark = on_host
SECONDS = 3.0  # how long a rank may be late
# How a rank does not come, the number of ranks, which one it is, and the first that waits in torch.
CASES = [
    ('Python', 3, 0, 0),
    ('Python', 3, 1, 1),
    ('Python', 5, 0, 1),
    ('Python', 5, 4, 0),
    ('C', 3, 1, 0),
    ('C', 5, 4, 1),
    ('receive', 3, 1, 0),
    ('receive', 5, 1, 0),
    ('receive', 5, 0, 1),
    ('receive', 5, 4, 1),
]


def _wait_in_python(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_RDONLY))


def _wait_in_c(fifo: Path) -> None:
    # Without letting other threads of the interpreter run, so that this process answers nobody.
    ctypes.PyDLL(None).open(str(fifo).encode(), os.O_RDONLY)


def _receive(fifo: Path) -> None:
    dist.recv(torch.ones(3), src=(dist.get_rank() + 1) % dist.get_world_size())


HANGS = {'Python': _wait_in_python, 'C': _wait_in_c, 'receive': _receive}


def _end_the_hang(fifo: Path, rank: int, world: int) -> None:
    """Wake the rank that hangs at a named pipe, if all others have found out."""
    fifo.with_name(f'{rank}.knows').touch()
    if len(list(fifo.parent.glob('*.knows'))) == world - 1:
        os.close(os.open(fifo, os.O_RDWR))


def wait_in_two_ways(how: str, missing: int, first: int, folder: Path) -> Dict[str, Any]:
    """Let some ranks wait in a channel, some in torch, for one in neither; return the error."""
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    store = dist.FileStore(str(folder / 'store'), world)
    dist.init_process_group(
        'gloo', store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    channel = open_channel()
    fifo = folder / 'fifo'
    if rank == missing:
        os.mkfifo(fifo)
    channel.gather(torch.tensor(rank))
    others = [other for other in range(world) if other != missing]
    in_torch = others[first::2]
    try:
        with lost_ranks_named('this test'):
            if rank == missing:
                HANGS[how](fifo)
            elif rank in in_torch:
                dist.all_reduce(torch.ones(2))
            else:
                channel.gather(torch.tensor(rank))
    except Exception as error:
        if rank != missing:
            _end_the_hang(fifo, rank, world)
        return dict(kind=type(error).__name__, message=str(error), ranks=getattr(error, 'ranks', 0))
    return {}


def give_up_while_asked(folder: Path) -> Dict[str, Any]:
    """Rank 2 hangs, rank 1 waits for it in torch, and rank 0 gives up when rank 1 asks for it."""
    lost_ranks.QUIET_SECONDS = 0.5
    rank, real_ask, fifo = int(os.environ['RANK']), broken_collective.ask_reports, folder / 'fifo'
    store = dist.FileStore(str(folder / 'store'), 3)
    dist.init_process_group(
        'gloo', store=store, rank=rank, world_size=3, timeout=timedelta(seconds=SECONDS)
    )
    if rank == 2:
        os.mkfifo(fifo)
    open_channel().gather(torch.tensor(rank))

    def ask_once_it_has_ended(name: str) -> Any:
        (folder / 'asked').touch()
        until((folder / '0.answer').exists)
        return real_ask(name)

    broken_collective.ask_reports = ask_once_it_has_ended
    try:
        with lost_ranks_named('this test'):
            if rank == 0:
                until((folder / 'asked').exists)
                raise RankLostError('rank 2 did not come', [2])
            if rank == 1:
                dist.all_reduce(torch.ones(2))
            _wait_in_python(fifo)
    except RankLostError as error:
        _end_the_hang(fifo, rank, 3)
        return dict(ranks=error.ranks)
    return {}


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def run_all(folder: Path) -> Dict[Any, Any]:
    return fork_scenarios(
        {
            'asked': (give_up_while_asked, 3, Path),
            **{
                (how, world, missing, first): (wait_in_two_ways, world, how, missing, first, Path)
                for how, world, missing, first in CASES
            },
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Dict[Any, Any]:
    folder = tmp_path_factory.mktemp('mixed')
    return run_ranks(run_all, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('how, world, missing, first', CASES)
def test_who_waits_is_not_blamed(
    how: str, world: int, missing: int, first: int, answers: Dict[Any, Any]
) -> None:
    errors = answers[how, world, missing, first]
    assert isinstance(errors, list), errors
    waiting = [error for rank, error in enumerate(errors) if rank != missing]
    assert all(error['kind'] == 'RankLostError' for error in waiting), errors
    if how == 'receive' and world == 3:
        # Three ranks in three collectives: nothing tells which of them is wrong.
        assert all(missing in error['ranks'] or not error['ranks'] for error in waiting), errors
        return
    assert all(error['ranks'] == [missing] for error in waiting), errors
    if how != 'C':
        place = 'in _receive' if how == 'receive' else 'in _wait_in_python'
        assert all(place in error['message'] for error in waiting), errors


def test_a_rank_that_gives_up_while_it_is_asked_is_not_blamed(answers: Dict[Any, Any]) -> None:
    assert answers['asked'] == [dict(ranks=[2]), dict(ranks=[2]), {}]
