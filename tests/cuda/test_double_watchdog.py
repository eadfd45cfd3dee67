"""What PyTorch's ProcessGroupNCCL does on the double when ranks or streams do not keep in step."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

TIMEOUT_SECONDS = 2
TWO_DEVICES = {'CUDA_DOUBLE_DEVICES': '2'}
# The watchdog ends the process four times this time after a timeout: 60 s if it is not set.
SOON = {**TWO_DEVICES, 'TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC': '100'}
# wait() raises after the timeout, and the watchdog leaves the process alone.
BLOCKING = {**TWO_DEVICES, 'TORCH_NCCL_BLOCKING_WAIT': '1'}


def join(device_index: int, backend: str = 'nccl') -> int:
    torch.cuda.set_device(device_index)
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    return dist.get_rank()


def shorten_timeout() -> None:
    """Give later collectives little time; ranks that are starting need more on a busy machine."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS), dist.group.WORLD)


def sum_of_ones(count: int) -> List[float]:
    tensor = torch.ones(count, device='cuda')
    dist.all_reduce(tensor)
    return tensor.tolist()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def meet_once(folder: Path, peer_dies: bool) -> None:
    """Sum once on both ranks; then rank 1 dies or does something else."""
    is_peer = os.environ['RANK'] == '1'
    if is_peer and peer_dies:
        # a fork is the rank, so that run_ranks does not see its end
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            wait_for(folder / 'over')
            return
    join(int(is_peer))
    assert sum_of_ones(4) == [2] * 4
    shorten_timeout()
    if not is_peer:
        sum_of_ones(4)
    elif peer_dies:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        wait_for(folder / 'over')


@pytest.mark.parametrize('peer_dies', [False, True])
def test_the_watchdog_ends_a_rank_whose_peer_does_not_come(tmp_path: Path, peer_dies: bool) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match='rank 0: exit status -6') as failure:
        run_ranks(meet_once, 2, tmp_path / 'ranks', tmp_path, peer_dies, timeout=60, environ=SOON)
    assert time.monotonic() - start >= TIMEOUT_SECONDS
    log = (tmp_path / 'ranks' / 'task0.pkl.log').read_text()
    assert 'Watchdog caught collective operation timeout' in log
    assert 'rank 1: hangs' in str(failure.value)


def sum_different_counts() -> Tuple[float, str]:
    """Return the error of a sum of 4 numbers on rank 0 and 5 on rank 1, and how long it took."""
    rank = join(int(os.environ['RANK']))
    assert sum_of_ones(4) == [2] * 4
    shorten_timeout()
    start = time.monotonic()
    work = dist.all_reduce(torch.ones(4 + rank, device='cuda'), async_op=True)
    try:
        work.wait()
    except dist.DistBackendError as error:
        message = str(error)
    seconds = time.monotonic() - start
    dist.distributed_c10d._abort_process_group()
    return seconds, message


def test_ranks_in_different_collectives_hang_and_are_named(tmp_path: Path) -> None:
    results = run_ranks(
        sum_different_counts,
        2,
        tmp_path,
        timeout=60,
        environ={**BLOCKING, 'CUDA_DOUBLE_NCCL_TRACE': '1'},
    )
    for rank, (seconds, message) in enumerate(results):
        assert seconds >= TIMEOUT_SECONDS
        assert f'OpType=ALLREDUCE, NumelIn={4 + rank}' in message and 'timeout' in message
        log = (tmp_path / f'task{rank}.pkl.log').read_text()
        assert (
            f'rank {rank} of 2 is in AllReduce of {4 + rank} numbers of type 7 and rank '
            f'{1 - rank} is not'
        ) in log
        assert f'rank {rank}/2 AllReduce count {4 + rank} type 7 reduction 0' in log


def meet_on_the_host() -> None:
    dist.all_reduce(torch.ones(1))


def read_without_waiting() -> Dict[str, Any]:
    """Start collectives whose peer comes later, and read their targets on another stream."""
    rank = join(int(os.environ['RANK']), backend='cpu:gloo,cuda:nccl')
    dist.all_reduce(torch.ones(1, device='cuda'))  # makes the communicator
    in_place = torch.full((8,), rank + 1.0, device='cuda')
    numbers = torch.full((8,), rank + 1, device='cuda')
    source, gathered = torch.full((8,), rank + 1.0, device='cuda'), torch.zeros(16, device='cuda')
    torch.cuda.synchronize()
    if rank == 1:
        meet_on_the_host()
    start = [
        dist.all_reduce(in_place, async_op=True),
        dist.all_reduce(numbers, async_op=True),
        dist.all_gather_into_tensor(gathered, source, async_op=True),
    ]
    results: Dict[str, Any] = {}
    if rank == 0:
        with torch.cuda.stream(torch.cuda.Stream()):  # a race on a GPU
            early = [in_place.clone(), numbers.clone(), gathered.clone(), source.clone()]
        results['completed'] = [work.is_completed() for work in start]
        meet_on_the_host()
        results['early'] = [tensor.tolist() for tensor in early]
    for work in start:
        work.wait()
    results['late'] = [tensor.tolist() for tensor in (in_place, numbers, gathered, source)]
    return results


def test_a_target_holds_poison_until_its_collective_has_run(tmp_path: Path) -> None:
    results = run_ranks(read_without_waiting, 2, tmp_path, timeout=60, environ=TWO_DEVICES)
    in_place, numbers, gathered, source = (torch.tensor(one) for one in results[0]['early'])
    assert not any(results[0]['completed'])
    assert bool(in_place.isnan().all()) and bool(gathered.isnan().all())
    assert numbers.tolist() == [torch.iinfo(torch.int64).min] * 8
    assert source.tolist() == [1.0] * 8
    for rank, result in enumerate(results):
        assert result['late'] == [[3.0] * 8, [3] * 8, [1.0] * 8 + [2.0] * 8, [rank + 1.0] * 8]


def join_on_one_card() -> str:
    join(0)
    with pytest.raises(dist.DistBackendError) as failure:
        sum_of_ones(4)
    assert not list(Path('/dev/shm').glob(f'cuda-double-nccl-{os.getpid()}-*'))
    return str(failure.value)


def test_two_ranks_on_one_card_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(join_on_one_card, 2, tmp_path, timeout=60, environ=TWO_DEVICES):
        assert 'ncclInvalidUsage' in message
        assert 'Duplicate GPU detected : rank 0 and rank 1 both on card 0' in message


def fork_after_use(uses_cuda: bool) -> str:
    """Return what a fork of this process says when it uses CUDA, and CUDA's own error in it."""
    if uses_cuda:
        torch.cuda.init()
    read, write = os.pipe()
    if not os.fork():
        try:
            message = str(torch.ones(1, device='cuda').tolist())
        except Exception as error:
            message = str(error)
        status = ctypes.CDLL('libcudart.so.13').cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
        os.write(write, f'{message}, error {status}'.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_a_fork_of_a_process_that_used_cuda_cannot_use_it(tmp_path: Path) -> None:
    [message] = run_ranks(fork_after_use, 1, tmp_path / 'after', True, environ=TWO_DEVICES)
    assert 'Cannot re-initialize CUDA in forked subprocess' in message
    assert message.endswith('error 3')  # cudaErrorInitializationError
    [message] = run_ranks(fork_after_use, 1, tmp_path / 'before', False, environ=TWO_DEVICES)
    assert message == '[1.0], error 0'
