"""Collectives of the staged process group, each against an answer computed in one process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support import no_simulated_cards

from mapsage.accelerator import (
    AcceleratorError,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.distributed import init_process_group, local_rank
from mapsage.distributed.groups.staged import BACKEND, SUPPORTED, register_staged_backend

TIMEOUT = 120  # seconds a collective may take before its test fails


def why_not(device: str, world: int) -> str:
    if not SUPPORTED:
        return f'torch {torch.__version__} has no process groups in Python (needs torch>=2.0)'
    if device == 'cuda' and torch.cuda.device_count() < world:
        return f'{world} ranks need as many cards, there are {torch.cuda.device_count()}'
    if device == 'sim':
        return no_simulated_cards() or ''
    if device == 'xla':
        try:
            resolve_accelerator('xla')
        except AcceleratorError as error:
            return f'the xla leg runs this: {error}'
    return ''


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank ``rank``'s data: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


class Case:
    """One collective: what a rank does, and what it must then hold.

    Args:
        run: Called with (device, rank, world_size); returns tensors.
        want: Called with (rank, world_size) in one process; returns the same tensors.
    """

    def __init__(
        self, run: Callable[..., List[torch.Tensor]], want: Callable[..., List[torch.Tensor]]
    ) -> None:
        self.run, self.want = run, want


def every(world: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([numbers(rank, *shape, dtype=dtype) for rank in range(world)])


def all_reduce(op: Any, reduce: Callable, dtype: torch.dtype = torch.float32) -> Case:
    def run(device: str, rank: int, world: int) -> List[torch.Tensor]:
        tensor = numbers(rank, 3, 5, dtype=dtype).to(device)
        dist.all_reduce(tensor, op=op)
        return [tensor]

    return Case(run, lambda rank, world: [reduce(every(world, 3, 5, dtype=dtype))])


def run_asynchronous(device: str, rank: int, world: int) -> List[torch.Tensor]:
    tensors = [(numbers(rank, 4) * scale).to(device) for scale in (1, 2, 3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return tensors


def want_asynchronous(rank: int, world: int) -> List[torch.Tensor]:
    return [every(world, 4).sum(0) * scale for scale in (1, 2, 3)]


def run_coalesced(device: str, rank: int, world: int) -> List[torch.Tensor]:
    tensors = [numbers(rank, 4).to(device), numbers(rank, 2, 3).to(device)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def run_not_contiguous(device: str, rank: int, world: int) -> List[torch.Tensor]:
    tensor = numbers(rank, 2, 3, 4, 5).to(device).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    return [tensor]


def run_broadcast(device: str, rank: int, world: int) -> List[torch.Tensor]:
    tensor = numbers(rank, 6).to(device)
    dist.broadcast(tensor, src=world - 1)
    return [tensor]


def run_reduce(device: str, rank: int, world: int) -> List[torch.Tensor]:
    tensor = numbers(rank, 6).to(device)
    dist.reduce(tensor, dst=1)
    return [tensor] if rank == 1 else []  # elsewhere the result is undefined


def run_all_gather(device: str, rank: int, world: int) -> List[torch.Tensor]:
    outputs = [torch.zeros(2, 3, device=device) for _ in range(world)]
    dist.all_gather(outputs, numbers(rank, 2, 3).to(device))
    return outputs


def run_all_gather_flat(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(2 * world, 3, device=device)
    dist.all_gather_into_tensor(output, numbers(rank, 2, 3).to(device))
    return [output]


def run_all_gather_stacked(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(world, 2, 3, device=device)
    dist.all_gather_into_tensor(output, numbers(rank, 2, 3).to(device))
    return [output]


def run_all_gather_in_a_row(device: str, rank: int, world: int) -> List[torch.Tensor]:
    """As torch's SyncBatchNorm gathers its statistics, into a tensor of one row."""
    output = torch.zeros(1, 5 * world, device=device)
    dist.all_gather_into_tensor(output, numbers(rank, 5).to(device))
    return [output]


def run_gather(device: str, rank: int, world: int) -> List[torch.Tensor]:
    outputs = [torch.zeros(4, device=device) for _ in range(world)] if rank == 1 else None
    dist.gather(numbers(rank, 4).to(device), outputs, dst=1)
    return outputs or []


def run_scatter(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(4, device=device)
    inputs = [numbers(10 + i, 4).to(device) for i in range(world)] if rank == 1 else None
    dist.scatter(output, inputs, src=1)
    return [output]


def run_reduce_scatter(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(3, device=device)
    dist.reduce_scatter(output, list(numbers(rank, world, 3).to(device)))
    return [output]


def run_reduce_scatter_tensor(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(2, 3, device=device)
    dist.reduce_scatter_tensor(output, numbers(rank, 2 * world, 3).to(device))
    return [output]


def want_reduce_scatter_tensor(rank: int, world: int) -> List[torch.Tensor]:
    return [every(world, 2 * world, 3).sum(0)[2 * rank : 2 * rank + 2]]


def run_reduce_scatter_of_a_row(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(5, device=device)
    dist.reduce_scatter_tensor(output, numbers(rank, 1, 5 * world).to(device))
    return [output]


def run_all_to_all_even(device: str, rank: int, world: int) -> List[torch.Tensor]:
    output = torch.zeros(world, 3, device=device)
    dist.all_to_all_single(output, numbers(rank, world, 3).to(device))
    return [output]


def run_all_to_all_uneven(device: str, rank: int, world: int) -> List[torch.Tensor]:
    """Rank r sends r + d rows to rank d; rank 0 sends itself none."""
    sizes_in = [rank + d for d in range(world)]
    sizes_out = [s + rank for s in range(world)]
    output = torch.zeros(sum(sizes_out), 2, device=device)
    dist.all_to_all_single(output, numbers(rank, sum(sizes_in), 2).to(device), sizes_out, sizes_in)
    return [output]


def want_all_to_all_uneven(rank: int, world: int) -> List[torch.Tensor]:
    parts = []
    for source in range(world):
        sizes = [source + d for d in range(world)]
        parts.append(numbers(source, sum(sizes), 2).split(sizes)[rank])
    return [torch.cat(parts)]


def run_all_to_all_list(device: str, rank: int, world: int) -> List[torch.Tensor]:
    outputs = [torch.zeros(source + 1, device=device) for source in range(world)]
    dist.all_to_all(outputs, [(numbers(rank, rank + 1) + d).to(device) for d in range(world)])
    return outputs


def want_all_to_all_list(rank: int, world: int) -> List[torch.Tensor]:
    return [numbers(source, source + 1) + rank for source in range(world)]


def run_send(device: str, rank: int, world: int) -> List[torch.Tensor]:
    received = torch.zeros(3, 2, device=device)
    if rank == 0:
        dist.send(numbers(0, 3, 2).to(device), 1)
        return []
    if rank == 1:
        dist.recv(received, 0)
        return [received]
    return []


def run_any_source(device: str, rank: int, world: int) -> List[torch.Tensor]:
    if rank != 0:
        dist.send(numbers(rank, 3).to(device), 0)
        return []
    rows = torch.zeros(world - 1, 3)
    for _ in range(world - 1):
        received = torch.zeros(3, device=device)
        source = dist.recv(received)
        rows[source - 1] = received.cpu()
    return [rows]


def run_batched_exchange(device: str, rank: int, world: int) -> List[torch.Tensor]:
    """Every rank posts its receive before its send: legal, and it must not deadlock."""
    received = torch.zeros(3, device=device)
    right, left = (rank + 1) % world, (rank - 1) % world
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, left),
            dist.P2POp(dist.isend, numbers(rank, 3).to(device), right),
        ]
    ):
        work.wait()
    return [received]


def run_objects(device: str, rank: int, world: int) -> List[torch.Tensor]:
    gathered: List[Any] = [None] * world
    dist.all_gather_object(gathered, {'rank': rank, 'text': 'x' * (rank * 1000)})
    told = [f'from {rank}']
    dist.broadcast_object_list(told, src=1)
    assert told == ['from 1']
    assert [len(each['text']) for each in gathered] == [1000 * r for r in range(world)]
    return [torch.tensor([each['rank'] for each in gathered])]


def run_barrier(device: str, rank: int, world: int) -> List[torch.Tensor]:
    dist.barrier()
    return []


CASES: Dict[str, Case] = {
    'all_reduce_sum': all_reduce(dist.ReduceOp.SUM, lambda e: e.sum(0)),
    'all_reduce_max': all_reduce(dist.ReduceOp.MAX, lambda e: e.amax(0)),
    'all_reduce_min': all_reduce(dist.ReduceOp.MIN, lambda e: e.amin(0)),
    'all_reduce_product': all_reduce(dist.ReduceOp.PRODUCT, lambda e: e.prod(0)),
    'all_reduce_int64': all_reduce(dist.ReduceOp.SUM, lambda e: e.sum(0), torch.int64),
    'all_reduce_bfloat16': all_reduce(
        dist.ReduceOp.SUM, lambda e: e.float().sum(0).bfloat16(), torch.bfloat16
    ),
    'asynchronous': Case(run_asynchronous, want_asynchronous),
    'coalesced': Case(
        run_coalesced, lambda rank, world: [every(world, 4).sum(0), every(world, 2, 3).sum(0)]
    ),
    'not_contiguous': Case(
        run_not_contiguous, lambda rank, world: [every(world, 2, 3, 4, 5).sum(0)]
    ),
    'broadcast': Case(run_broadcast, lambda rank, world: [numbers(world - 1, 6)]),
    'reduce': Case(run_reduce, lambda rank, world: [every(world, 6).sum(0)][: rank == 1]),
    'all_gather': Case(run_all_gather, lambda rank, world: list(every(world, 2, 3))),
    'all_gather_flat': Case(
        run_all_gather_flat, lambda rank, world: [every(world, 2, 3).flatten(0, 1)]
    ),
    'all_gather_stacked': Case(run_all_gather_stacked, lambda rank, world: [every(world, 2, 3)]),
    'all_gather_in_a_row': Case(
        run_all_gather_in_a_row, lambda rank, world: [every(world, 5).reshape(1, -1)]
    ),
    'gather': Case(run_gather, lambda rank, world: list(every(world, 4)) if rank == 1 else []),
    'scatter': Case(run_scatter, lambda rank, world: [numbers(10 + rank, 4)]),
    'reduce_scatter': Case(
        run_reduce_scatter, lambda rank, world: [every(world, world, 3).sum(0)[rank]]
    ),
    'reduce_scatter_tensor': Case(run_reduce_scatter_tensor, want_reduce_scatter_tensor),
    'reduce_scatter_of_a_row': Case(
        run_reduce_scatter_of_a_row,
        lambda rank, world: [every(world, 1, 5 * world).sum(0).flatten()[5 * rank : 5 * rank + 5]],
    ),
    'all_to_all_even': Case(
        run_all_to_all_even, lambda rank, world: [every(world, world, 3)[:, rank]]
    ),
    'all_to_all_uneven': Case(run_all_to_all_uneven, want_all_to_all_uneven),
    'all_to_all_list': Case(run_all_to_all_list, want_all_to_all_list),
    'send': Case(run_send, lambda rank, world: [numbers(0, 3, 2)][: rank == 1]),
    'any_source': Case(
        run_any_source, lambda rank, world: [every(world, 3)[1:]] if rank == 0 else []
    ),
    'objects': Case(run_objects, lambda rank, world: [torch.arange(world)]),
    'barrier': Case(run_barrier, lambda rank, world: []),
    'batched_exchange': Case(
        run_batched_exchange, lambda rank, world: [numbers((rank - 1) % world, 3)]
    ),
}

# Blocking receives of device tensors: a receive posted before its send waits for ever, and the
# source of an any-source receive is not told.
NOT_STAGED = ('any_source', 'batched_exchange', 'send')


def start_group(device: str) -> torch.device:
    """Join the ranks; return the device of this one."""
    if device == 'cpu':
        register_staged_backend('cpu')
        dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
        return torch.device('cpu')
    accelerator = set_current_accelerator(resolve_accelerator(device))
    init_process_group(accelerator, BACKEND, TIMEOUT)
    return accelerator.device(local_rank())


def collect(device: str) -> Dict[str, Any]:
    """Run every case on one rank; return its tensors, or the text of its error."""
    where = start_group(device)
    rank, world, results = dist.get_rank(), dist.get_world_size(), {}
    for name, case in CASES.items():
        try:
            results[name] = [tensor.cpu() for tensor in case.run(where, rank, world)]
        except Exception as error:  # a case that fails must not hide the others
            results[name] = f'{type(error).__name__}: {error}'
    return results


WORLDS = [(device, world) for device in ('cpu', 'cuda', 'xla') for world in (2, 3)] + [('sim', 3)]


@pytest.fixture(scope='module', params=WORLDS, ids=lambda world: f'{world[0]}-{world[1]}')
def outcome(request: Any, tmp_path_factory: Any) -> List[Dict[str, Any]]:
    """What every case gave on every rank of one world."""
    device, world_size = request.param
    if why_not(device, world_size):
        pytest.skip(why_not(device, world_size))
    folder: Path = tmp_path_factory.mktemp('staged')
    return [
        dict(results, device=device)
        for results in run_ranks(collect, world_size, folder, device, timeout=120)
    ]


@pytest.mark.parametrize('name', CASES)
def test_collective(outcome: List[Dict[str, Any]], name: str) -> None:
    world = len(outcome)
    if name in NOT_STAGED and outcome[0]['device'] != 'cpu':
        refusals = [results[name] for results in outcome if isinstance(results[name], str)]
        assert len(refusals) == (2 if name == 'send' else world)
        assert all('tensors are not staged: send `tensor.cpu()`' in text for text in refusals)
        return
    for rank, results in enumerate(outcome):
        got, want = results[name], CASES[name].want(rank, world)
        assert not isinstance(got, str), f'rank {rank}: {got}'
        assert [t.shape for t in got] == [t.shape for t in want], f'rank {rank}'
        for one, other in zip(got, want):
            assert one.dtype == other.dtype and torch.equal(one, other), f'rank {rank}'


def gradients(device: str) -> Dict[str, torch.Tensor]:
    """Return this rank's gradients after a backward pass through torch's DDP."""
    where = start_group(device)
    model = torch.nn.parallel.DistributedDataParallel(tiny_model().to(where))
    model(numbers(dist.get_rank(), 4, 6).to(where)).pow(2).mean().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.module.named_parameters()}


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


@pytest.mark.parametrize('device, world_size', [('cpu', 2), ('cuda', 2), ('xla', 2), ('sim', 2)])
def test_ddp_averages_gradients(device: str, world_size: int, tmp_path: Path) -> None:
    if why_not(device, world_size):
        pytest.skip(why_not(device, world_size))
    ranks = run_ranks(gradients, world_size, tmp_path, device)
    model = tiny_model()
    torch.stack(
        [model(numbers(rank, 4, 6)).pow(2).mean() for rank in range(world_size)]
    ).mean().backward()
    for name, parameter in model.named_parameters():
        for got in ranks:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(SUPPORTED, reason='this torch can stage')
def test_old_torch_says_what_it_needs() -> None:
    with pytest.raises(AcceleratorError, match='torch>=2.0'):
        register_staged_backend('xla')
