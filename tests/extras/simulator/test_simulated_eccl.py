"""The simulated eccl: asynchronous, with the vendor's quirks, and silent about lost peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from support import no_simulated_cards
from warm_python import warm_python

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.groups.process_group import new_group

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

PROFILES = ['2.10', '2.10-int64', '2.11']
UNTOUCHED = -1


def join() -> Any:
    sim = set_current_accelerator(resolve_accelerator('sim'))
    init_process_group(sim, timeout=60)
    return sim.device(dist.get_rank())


def error(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        collective(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as caught:
        return f'{type(caught).__name__}: {caught}'
    return ''


def run_collectives() -> Dict[str, Any]:
    device = join()
    rank, eccl = dist.get_rank(), dist.distributed_c10d._get_default_group()._get_backend(device)
    told: Dict[str, Any] = {}

    floats = torch.full((3,), float(rank + 1), device=device)
    work = dist.all_reduce(floats, async_op=True)
    early = floats.tolist()
    work.wait()
    told['float'] = [str(early), floats.tolist()]
    ints = torch.full((2,), rank + 1, dtype=torch.int32, device=device)
    work = dist.all_reduce(ints, async_op=True)
    early = ints.tolist()
    told['int32'] = [early, work.get_future().wait()[0].tolist()]
    source = torch.full((2,), 5.0 * rank, device=device)
    work = dist.broadcast(source, src=1, async_op=True)
    early = source.tolist()
    work.wait()
    told['broadcast'] = [str(early), source.tolist()]

    wide = (torch.arange(1, 5) * (rank + 1)).to(device)
    told['int64 sum'] = [error(dist.all_reduce, wide), wide.tolist()]
    double = torch.full((1,), 0.5, dtype=torch.float64, device=device)
    told['float64 sum'] = [error(dist.reduce, double, 0), double.tolist()]
    gathered = [torch.full((4,), UNTOUCHED, device=device) for _ in range(2)]
    dist.all_gather(gathered, (torch.arange(1, 5) * (rank + 1)).to(device))
    told['int64 gathered'] = [row.tolist() for row in gathered]

    told['int16'] = error(dist.broadcast, torch.zeros(2, dtype=torch.int16, device=device), 0)
    told['transposed'] = error(dist.all_reduce, torch.zeros(2, 3, device=device).t())
    told['channels last'] = error(
        dist.all_reduce,
        torch.zeros(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last),
    )
    told['BAND'] = error(dist.all_reduce, ints, op=dist.ReduceOp.BAND)
    flags = torch.tensor([rank == 1, False], device=device)
    told['bool AVG'] = error(dist.all_reduce, flags.clone(), op=dist.ReduceOp.AVG)
    dist.all_reduce(flags)
    told['bool'] = flags.tolist()
    averages = torch.full((1,), float(rank), device=device)
    dist.all_reduce(averages, op=dist.ReduceOp.AVG)
    told['average'] = averages.tolist()

    rows = [torch.full((1,), -1.0, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.ones(1, device=device), rows, dst=0)
    told['gather'] = [row.tolist() for row in rows or []]
    message = torch.full((2,), float(rank), device=device)
    dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
    told['received'] = message.tolist()
    part = torch.empty(2, device=device)
    dist.reduce_scatter(part, [torch.full((2,), float(peer), device=device) for peer in (1, 2)])
    told['reduce_scatter'] = part.tolist()
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, torch.tensor([10.0, 20.0], device=device) + rank)
    told['all_to_all'] = swapped.tolist()

    before = eccl._get_sequence_number_for_group()
    dist.barrier()
    told['barriers over gloo'] = eccl._get_sequence_number_for_group() - before
    dist.barrier(device_ids=[rank])
    told['barriers on the card'] = eccl._get_sequence_number_for_group() - before

    def reduce_elsewhere() -> None:
        told['other thread'] = error(eccl.allreduce, [floats])

    thread = threading.Thread(target=reduce_elsewhere)
    thread.start()
    thread.join()
    return told


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, List[Dict[str, Any]]]:
    return {
        profile: run_ranks(
            run_collectives,
            2,
            tmp_path_factory.mktemp('eccl'),
            environ={'MAPSAGE_SIM_GCU': profile},
        )
        for profile in PROFILES
    }


@pytest.mark.parametrize('profile', PROFILES)
def test_an_output_is_poison_until_its_work_was_waited_for(profile: str, answers: Any) -> None:
    for rank, told in enumerate(answers[profile]):
        assert told['float'] == ['[nan, nan, nan]', [3, 3, 3]]
        assert told['int32'] == [[0x5A5A5A5A] * 2, [3, 3]]
        assert told['broadcast'] == ['[nan, nan]' if rank == 0 else '[5.0, 5.0]', [5, 5]]


def test_64_bits_are_narrowed(answers: Any) -> None:
    for told in answers['2.10']:
        assert told['int64 sum'] == ['', [3, 6, 9, 12]]
        assert told['int64 gathered'] == [[1, 2, 3, 4], [2, 4, 6, 8]]
    assert answers['2.10'][0]['float64 sum'] == ['', [1.0]]


def test_half_of_an_int64_tensor_is_moved(answers: Any) -> None:
    for rank, told in enumerate(answers['2.10-int64']):
        assert told['int64 sum'] == ['', [3, 6, 3 * (rank + 1), 4 * (rank + 1)]]
        # One buffer of eight elements: two of each rank, then the old content.
        assert told['int64 gathered'] == [[1, 2, 2, 4], [UNTOUCHED] * 4]


def test_64_bit_reductions_are_refused(answers: Any) -> None:
    for rank, told in enumerate(answers['2.11']):
        for name in ('int64 sum', 'float64 sum'):
            message, _ = told[name]
            assert message.startswith('DistBackendError: ') and 'ecclInvalidArgument' in message
        assert told['int64 sum'][1] == [(rank + 1) * number for number in (1, 2, 3, 4)]
        assert told['int64 gathered'] == [[1, 2, 3, 4], [2, 4, 6, 8]]


@pytest.mark.parametrize('profile', PROFILES)
def test_what_eccl_refuses(profile: str, answers: Any) -> None:
    for rank, told in enumerate(answers[profile]):
        assert 'Input tensor data type is not supported for ECCL process group' in told['int16']
        assert told['transposed'] == 'ValueError: Tensors must be contiguous'
        assert told['channels last'] == ''
        assert told['BAND'].startswith('ValueError: Cannot use ReduceOp.BAND')
        assert told['bool AVG'] == 'TypeError: Cannot use ReduceOp.AVG with Boolean inputs'
        # A new thread begins with card 0.
        assert ('is the current device of this thread' in told['other thread']) == (rank == 1)


@pytest.mark.parametrize('profile', PROFILES)
def test_what_eccl_does_otherwise(profile: str, answers: Any) -> None:
    for rank, told in enumerate(answers[profile]):
        assert told['bool'] == [True, False] and told['average'] == [0.5]
        assert told['gather'] == ([[-1.0], [-1.0]] if rank == 0 else [])
        assert told['received'] == [0, 0]
        assert told['reduce_scatter'] == [2.0 * (rank + 1)] * 2
        assert told['all_to_all'] == [10.0 * (rank + 1), 10.0 * (rank + 1) + 1]
        assert told['barriers over gloo'] == 0 and told['barriers on the card'] == 1


ALONE = """
import os, signal, time
import torch, torch.distributed as dist
from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.groups import process_group
process_group.SILENT_BACKEND_EXTRA_SECONDS = 0
sim = set_current_accelerator(resolve_accelerator('sim'))
process_group.init_process_group(sim, timeout=3)
tensor = torch.ones(5, device=sim.device(dist.get_rank()))
dist.all_reduce(tensor)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(tensor)
finally:
    print('an exception, or the end of the wait')
"""
DESTROY = """
import torch.distributed as dist
from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
init_process_group(set_current_accelerator(resolve_accelerator('sim')), timeout=30)
print('done')
"""


def run_scripts(script: str, folder: Path, **environ: str) -> List[Any]:
    """Return status and output of two ranks that run a script."""
    import subprocess

    path, port = folder / 'script.py', str(free_port())
    path.write_text(script)
    ranks = [
        subprocess.Popen(
            [warm_python(), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                'RANK': str(rank),
                'LOCAL_RANK': str(rank),
                'WORLD_SIZE': '2',
                'LOCAL_WORLD_SIZE': '2',
                'MASTER_ADDR': '127.0.0.1',
                'MASTER_PORT': port,
                'PYTHONPATH': str(Path(__file__).parents[4]),
                **environ,
            },
        )
        for rank in range(2)
    ]
    return [(rank.communicate(timeout=60)[0], rank.returncode)[::-1] for rank in ranks]


def test_survivors_hang_until_the_watchdog_aborts_them(tmp_path: Path) -> None:
    start = time.monotonic()
    (status, output), (killed, _) = run_scripts(ALONE, tmp_path)
    assert (status, killed) == (-signal.SIGABRT, -signal.SIGKILL), output
    assert time.monotonic() - start >= 3
    assert (
        'Watchdog caught collective operation timeout: WorkECCL(SeqNum=2, OpType=ALLREDUCE, '
        'NumelIn=5, NumelOut=5, Timeout(ms)=3000) ran for 3' in output
    )
    assert 'an exception' not in output and 'Traceback' not in output


def test_a_clean_exit_leaves_the_backend_that_would_abort(tmp_path: Path) -> None:
    for status, output in run_scripts(DESTROY, tmp_path, MAPSAGE_SIM_FAULTS='destroy=1'):
        assert status == 0 and 'done' in output, output


def test_destroying_the_group_aborts(tmp_path: Path) -> None:
    script = DESTROY + 'dist.destroy_process_group()\n'
    for status, output in run_scripts(script, tmp_path, MAPSAGE_SIM_FAULTS='destroy=1'):
        assert status == -signal.SIGABRT and 'ecclCommDestroy' in output, output


def read_timeouts() -> Any:
    device = join()
    default = dist.distributed_c10d._get_default_group()
    timeouts = []
    for group in (default, new_group([0], resolve_accelerator('sim'), 10)):
        gloo: Any = group._get_backend(torch.device('cpu'))
        eccl: Any = group._get_backend(device)
        timeouts.append((gloo.options._timeout, eccl._watchdog._timeout))
    return timeouts


def test_eccl_waits_longer_than_the_ranks(tmp_path: Path) -> None:
    [timeouts] = run_ranks(read_timeouts, 1, tmp_path)
    assert timeouts == [
        (timedelta(seconds=60), timedelta(seconds=120)),
        (timedelta(seconds=10), timedelta(seconds=70)),
    ]
