"""A rank that is stopped for about as long as the others wait is named, and blames nobody."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from ranks import run_ranks
from support import on_host

from mapsage.distributed import lost_ranks, lost_ranks_named, open_channel

pytestmark = on_host
SECONDS = 4.0  # how long a rank may be late
# When the rank goes on: while the others still ask who is there, or when all of them have given up.
WHILE, AFTER = 'while the others ask', 'after the others gave up'
WHERE = ['channel', 'torch']
STOPPED = [(2, 0), (2, 1), (3, 0), (3, 2), (5, 4)]  # ranks, and the one that is stopped
lost_ranks.QUIET_SECONDS = 1.5 * SECONDS  # ranks that are no neighbors of the one at fault


def stop_and_go_on(where: str, stopped: int, when: str, folder: Path) -> Dict[str, Any]:
    """Stop one rank before a collective; return the error of this one, with the ranks it names."""
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    store = dist.FileStore(str(folder / 'store'), world)
    dist.init_process_group(
        'gloo', store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    channel = open_channel()
    channel.gather(torch.tensor(rank))
    dist.all_reduce(torch.ones(2))
    others = [folder / f'told {other}' for other in range(world) if other != stopped]
    if rank == stopped:
        _stop_until(SECONDS + 0.7 if when == WHILE else 0, others if when == AFTER else [])
    try:
        with lost_ranks_named('this test'):
            for _ in range(2):  # what the others sent in time may complete one of them
                channel.gather(torch.tensor(rank)) if where == 'channel' else dist.all_reduce(
                    torch.ones(2)
                )
    except Exception as error:
        (folder / f'told {rank}').touch()
        return dict(kind=type(error).__name__, message=str(error), ranks=getattr(error, 'ranks', 0))
    return {}


def _stop_until(seconds: float, files: List[Path]) -> None:
    """Stop this process; a child of it continues it after some seconds, or when files are there."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        while not all(path.exists() for path in files):
            time.sleep(0.02)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def run_all(folder: Path) -> Dict[Any, Any]:
    return fork_scenarios(
        {
            (where, world, stopped, when): (stop_and_go_on, world, where, stopped, when, Path)
            for where in WHERE
            for world, stopped in STOPPED
            for when in (WHILE, AFTER)
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Dict[Any, Any]:
    folder = tmp_path_factory.mktemp('late')
    return run_ranks(run_all, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('when', [WHILE, AFTER])
@pytest.mark.parametrize('where', WHERE)
@pytest.mark.parametrize('case', STOPPED)
def test_the_stopped_rank_is_named_by_all(
    case: Tuple[int, int], where: str, when: str, answers: Dict[Any, Any]
) -> None:
    world, stopped = case
    errors = answers[where, world, stopped, when]
    assert isinstance(errors, list), errors
    for rank, error in enumerate(errors):
        assert error['kind'] == 'RankLostError' and error['ranks'] == [stopped], (rank, errors)
    if when == WHILE:
        assert all(
            f'ank {stopped}' in error['message'] and 'did not run for' in error['message']
            for error in errors
        ), errors


@pytest.mark.parametrize('where', WHERE)
def test_the_stopped_rank_says_that_the_others_have_waited(
    where: str, answers: Dict[Any, Any]
) -> None:
    for world, stopped in STOPPED:
        for when in (WHILE, AFTER):
            message = answers[where, world, stopped, when][stopped]['message']
            assert f'the others have waited for it, rank {stopped}, in vain' in message
