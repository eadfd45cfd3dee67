"""A collective of torch.distributed that breaks names the rank at fault, not an address."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from forked import DIED, PATIENT, fork_scenarios
from ranks import run_ranks
from support import on_host

from mapsage.distributed import broken_collective, lost_ranks, lost_ranks_named, open_channel

pytestmark = on_host
WORLDS = [2, 3, 5]
SECONDS = 4.0  # how long gloo waits; ranks that are no neighbors of the one at fault wait so long
# Longer, so that the notes of those are waited for.
lost_ranks.QUIET_SECONDS = 1.5 * SECONDS


def reduce_with_fault(fault: str, folder: Path) -> Any:
    """Reduce, as a gradient is, with a fault of the last rank; return the error's type and text."""
    store = dist.FileStore(str(folder / 'store'), int(os.environ['WORLD_SIZE']))
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    dist.init_process_group(
        'gloo', store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    try:
        for block in range(2):  # what a block before has left is no note of this one
            with lost_ranks_named('this test'):
                if rank == world - 1 and block:
                    break_down(fault, [folder / f'told {each}' for each in range(rank)])
                dist.all_reduce(torch.ones(4))
    except Exception as error:
        (folder / f'told {rank}').touch()
        return type(error).__name__, str(error), getattr(error, 'ranks', None)
    return None


def reduce_patiently(folder: Path) -> Any:
    """As ``reduce_with_fault``, in ranks that have channels, with a timeout that none meets."""
    lost_ranks.QUIET_SECONDS = 0.5
    store = dist.FileStore(str(folder / 'store'), int(os.environ['WORLD_SIZE']))
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world)
    open_channel(timeout=PATIENT).gather_texts('')
    try:
        with lost_ranks_named('this test'):
            dist.all_reduce(torch.ones(4))
            if rank == 1:
                break_down('dies', [])
            dist.all_reduce(torch.ones(4))
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, 'ranks', None)
    return None


def break_down(fault: str, told: List[Path]) -> None:
    if fault == 'raises':
        raise ValueError('tile 17')
    if fault == 'dies':
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == 'hangs':
        while not all(each.exists() for each in told):  # it is not its end that frees the others
            time.sleep(0.02)


def break_all(folder: Path) -> Dict[str, Any]:
    scenarios: Dict[Any, Any] = {
        (fault, world): (reduce_with_fault, world, fault, Path)
        for fault in ('raises', 'dies', 'hangs')
        for world in WORLDS
    }
    scenarios.update({('patient', world): (reduce_patiently, world, Path) for world in (5, 7)})
    return fork_scenarios(scenarios, folder)


@pytest.fixture(scope='module')
def told(tmp_path_factory: pytest.TempPathFactory) -> Dict[Any, Any]:
    folder = tmp_path_factory.mktemp('lost')
    return run_ranks(break_all, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('world', WORLDS)
def test_a_rank_that_hangs_is_named(world: int, told: Dict[Any, Any]) -> None:
    for name, text, ranks in told['hangs', world][:-1]:
        assert name == 'RankLostError' and ranks == [world - 1]
        assert f'in this test and rank(s) [{world - 1}] did not come to it' in text


@pytest.mark.parametrize('world', WORLDS)
def test_a_rank_that_died_is_named(world: int, told: Dict[Any, Any]) -> None:
    *others, died = told['dies', world]
    assert died == DIED
    assert all(name == 'RankLostError' and ranks == [world - 1] for name, _, ranks in others)


@pytest.mark.parametrize('world', [5, 7])
def test_ranks_that_wait_on_are_not_taken_for_lost(world: int, told: Dict[Any, Any]) -> None:
    answers = told['patient', world]
    assert isinstance(answers, list), answers
    assert answers.pop(1) == DIED
    for name, text, ranks in answers:
        assert name == 'RankLostError' and ranks == [1], text
        assert 'its process has ended' in text


def test_a_tensor_that_a_backend_refuses_is_no_lost_rank() -> None:
    refused = getattr(dist, 'DistBackendError', RuntimeError)(
        'ECCL error in: ProcessGroupECCL.cpp, invalid argument\necclInvalidArgument: ...'
    )
    assert not broken_collective._is_broken_collective(refused)
    assert broken_collective._is_broken_collective(RuntimeError('[gloo/transport] timed out'))


@pytest.mark.parametrize('world', WORLDS)
def test_the_error_of_another_rank_is_shown(world: int, told: Dict[Any, Any]) -> None:
    *others, own = told['raises', world]
    assert own[:2] == ('ValueError', 'tile 17')
    for name, text, _ in others:
        assert name == 'RankError'
        assert text == f'rank {world - 1} failed in this test: ValueError: tile 17'
