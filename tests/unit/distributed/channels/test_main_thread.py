"""Where main threads are, and which rank the others wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mapsage.distributed import open_channel
from mapsage.distributed.channels.main_thread import main_thread_position, set_broken_collective
from mapsage.distributed.lost_ranks import Activity, Position, find_stragglers

RUNS, BACKWARD, COLLECTIVE = Activity.RUNS, Activity.IN_BACKWARD, Activity.IN_COLLECTIVE


@pytest.mark.parametrize(
    'positions, stragglers',
    [
        ({}, []),
        ({3: (RUNS, 'a')}, [3]),
        ({0: (COLLECTIVE, 'a'), 4: (RUNS, 'b')}, [4]),
        ({0: (COLLECTIVE, 'a'), 1: (BACKWARD, 'b'), 4: (RUNS, 'b')}, [4]),
        ({0: (COLLECTIVE, 'a'), 1: (BACKWARD, 'b')}, [1]),
        ({0: (BACKWARD, 'a'), 1: (BACKWARD, 'b')}, [0, 1]),
        ({0: (RUNS, 'a'), 1: (RUNS, 'a'), 2: (RUNS, 'b')}, [0, 1, 2]),
        ({0: (COLLECTIVE, 'a'), 1: (COLLECTIVE, 'b'), 3: (COLLECTIVE, 'a')}, [1]),
        ({0: (COLLECTIVE, 'a'), 1: (COLLECTIVE, 'b')}, [0, 1]),
        ({0: (COLLECTIVE, 'a'), 1: (COLLECTIVE, 'a')}, [0, 1]),
        (
            {
                0: (COLLECTIVE, 'a'),
                1: (COLLECTIVE, 'a'),
                2: (COLLECTIVE, 'b'),
                3: (COLLECTIVE, 'c'),
            },
            [0, 1, 2, 3],
        ),
    ],
)
def test_whom_the_others_wait_for(positions: Any, stragglers: List[int]) -> None:
    assert (
        find_stragglers({rank: Position(*position) for rank, position in positions.items()})
        == stragglers
    )


def watch(action: Callable[[], Any], seconds: float = 0.3) -> Position:
    """Return where the main thread is a moment after an action has begun, which must be slow."""
    positions: List[Position] = []

    def look() -> None:
        positions.append(main_thread_position())
        # On a busy machine the action may begin later than the timer ends.
        while (
            positions[-1].activity == RUNS
            and positions[-1].line.endswith(' in watch')
            and not ended.wait(0.01)
        ):
            positions.append(main_thread_position())

    ended, timer = threading.Event(), threading.Timer(seconds, look)
    timer.start()
    action()
    ended.set()
    timer.join()
    return positions[-1]


def test_a_thread_that_sleeps_runs() -> None:
    position = watch(lambda: threading.Event().wait(0.6))
    assert position.activity == RUNS
    assert position.line.startswith(f'{Path(__file__).parent.name}/test_main_thread.py:')
    assert position.line.endswith(' in <lambda>')


def test_a_thread_that_reports_a_broken_collective_has_waited() -> None:
    try:
        raise RuntimeError('gloo/ timed out')
    except RuntimeError as error:
        set_broken_collective(error)
    try:
        position = watch(lambda: threading.Event().wait(0.6))
    finally:
        set_broken_collective(None)
    assert position.activity == COLLECTIVE
    assert position.line.endswith('in test_a_thread_that_reports_a_broken_collective_has_waited')


def wait_in_backward(gradient: torch.Tensor) -> None:
    threading.Event().wait(0.6)


def test_a_slow_hook_in_a_backward_runs_and_a_slow_kernel_computes_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    handle = weight.register_hook(wait_in_backward)
    assert watch(weight.sum().backward).activity == RUNS
    handle.remove()
    matrix = torch.randn(1000, 1000, requires_grad=True)
    product = matrix
    for _ in range(12):
        product = product @ matrix / 1000
    assert watch(product.sum().backward, 0.1).activity == BACKWARD


def wait_for_the_last_rank() -> List[Position]:
    dist.init_process_group('gloo')
    channel = open_channel()
    late = dist.get_rank() == dist.get_world_size() - 1

    def meet(collective: Callable[[torch.Tensor], Any]) -> None:
        if late:
            threading.Event().wait(1.0)
        collective(torch.ones(1))

    channel.max(torch.ones(1))
    positions = [watch(lambda: meet(dist.all_reduce), 0.6), watch(lambda: meet(channel.max), 0.6)]
    dist.destroy_process_group()
    return positions


def test_ranks_in_collectives_wait_for_the_one_that_is_late(tmp_path: Path) -> None:
    for positions in zip(*run_ranks(wait_for_the_last_rank, 3, tmp_path)):
        assert [position.activity for position in positions] == [COLLECTIVE, COLLECTIVE, RUNS]
        assert all('test_main_thread.py:' in position.line for position in positions)
        assert find_stragglers(dict(enumerate(positions))) == [2]


def test_a_wait_in_a_group_written_in_python_is_in_a_collective() -> None:
    work: Dict[str, Any] = {'__name__': 'mapsage.distributed.groups.staged', 'sleep': time.sleep}
    exec('def wait():\n    sleep(0.6)\n', work)

    def step() -> None:
        work['wait']()

    position = watch(step)
    assert position.activity == COLLECTIVE
    assert position.line.endswith(' in step')
