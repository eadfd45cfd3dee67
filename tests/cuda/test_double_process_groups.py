"""NCCL's double under PyTorch's own ProcessGroupNCCL: collectives, DDP, synchronized BatchNorm."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 8
TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def join() -> torch.device:
    """Join the process group with the device of this rank."""
    device = torch.device('cuda', int(os.environ['RANK']))
    torch.cuda.set_device(device)
    dist.init_process_group('cpu:gloo,cuda:nccl', timeout=timedelta(seconds=120))
    return device


def numbers_of(rank: int) -> Tensor:
    return torch.arange(6.0) * (rank + 1)


class Answers:
    """The collectives of one group, and what they should give, from every rank's numbers."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.every = torch.stack([numbers_of(rank) for rank in range(self.size)])

    def local(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers_of(self.rank).to(dtype).to(self.device)

    def check_reductions(self) -> None:
        for dtype in TYPES:
            for operation, answer in (
                (dist.ReduceOp.SUM, self.every.sum(0)),
                (dist.ReduceOp.MAX, self.every.amax(0)),
                (dist.ReduceOp.MIN, self.every.amin(0)),
            ):
                tensor = self.local(dtype)
                dist.all_reduce(tensor, operation, group=self.group)
                assert torch.equal(tensor.cpu(), answer.to(dtype)), (dtype, operation)
        tensor = self.local()
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=self.group)
        assert torch.equal(tensor.cpu(), self.every.sum(0) / self.size)
        tensor = self.local()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group=self.group)
        assert torch.equal(tensor.cpu(), self.every.sum(0) / 2)
        tensor = self.local()
        dist.reduce(tensor, group=self.group, group_dst=self.size - 1)
        is_root = self.rank == self.size - 1
        assert torch.equal(tensor.cpu(), self.every.sum(0) if is_root else self.every[self.rank])

    def check_moves(self) -> None:
        tensor = self.local()
        dist.broadcast(tensor, group=self.group, group_src=self.size - 1)
        assert torch.equal(tensor.cpu(), self.every[-1])
        gathered = [torch.zeros(6, device=self.device) for _ in range(self.size)]
        dist.all_gather(gathered, self.local(), group=self.group)
        assert torch.equal(torch.stack(gathered).cpu(), self.every)
        # in place: a rank's numbers are a part of the result's memory
        whole = torch.zeros(self.size, 6, device=self.device)
        whole[self.rank] = self.local()
        dist.all_gather_into_tensor(whole.view(-1), whole[self.rank], group=self.group)
        assert torch.equal(whole.cpu(), self.every)
        parts = torch.arange(2.0 * self.size, device=self.device) + self.rank
        answer = torch.arange(2.0 * self.size) * self.size + sum(range(self.size))
        local = slice(2 * self.rank, 2 * self.rank + 2)
        part = torch.zeros(2, device=self.device)
        dist.reduce_scatter_tensor(part, parts, group=self.group)
        assert torch.equal(part.cpu(), answer[local])
        dist.reduce_scatter_tensor(parts[local], parts, group=self.group)
        assert torch.equal(parts[local].cpu(), answer[local])
        # of different lengths: PyTorch makes a group of broadcasts, or of messages, of them
        gathered = [torch.zeros(rank + 1, device=self.device) for rank in range(self.size)]
        dist.all_gather(
            gathered, self.local()[:1].expand(self.rank + 1) + self.rank, group=self.group
        )
        assert [one.tolist() for one in gathered] == [
            [float(rank)] * (rank + 1) for rank in range(self.size)
        ]
        lengths = [rank + 1 for rank in range(self.size)]
        received = torch.zeros((self.rank + 1) * self.size, device=self.device)
        dist.all_to_all_single(
            received,
            torch.full((sum(lengths),), float(self.rank), device=self.device),
            [self.rank + 1] * self.size,
            lengths,
            group=self.group,
        )
        assert received.view(self.size, -1)[:, 0].tolist() == list(range(self.size))
        received = torch.zeros(self.size, device=self.device)
        sent = torch.arange(float(self.size), device=self.device) + 100 * self.rank
        dist.all_to_all_single(received, sent, group=self.group)
        assert torch.equal(received.cpu(), torch.arange(self.size) * 100.0 + self.rank)
        gathered = [torch.zeros(6, device=self.device) for _ in range(self.size)]
        dist.gather(
            self.local(), gathered if self.rank == 0 else None, group=self.group, group_dst=0
        )
        if self.rank == 0:
            assert torch.equal(torch.stack(gathered).cpu(), self.every)
        tensor = torch.zeros(6, device=self.device)
        dist.scatter(
            tensor,
            list(self.every.to(self.device)) if self.rank == 0 else None,
            group=self.group,
            group_src=0,
        )
        assert torch.equal(tensor.cpu(), self.every[self.rank])

    def check_messages(self) -> None:
        right = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        left = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        # longer than what a channel carries at a time
        sent = torch.arange(100_000.0, device=self.device) + self.rank
        received = torch.zeros(100_000, device=self.device)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, right, self.group),
                dist.P2POp(dist.irecv, received, left, self.group),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(received.cpu(), torch.arange(100_000.0) + (self.rank - 1) % self.size)

    def check_coalesced(self) -> None:
        first, second = self.local(), self.local() * 2
        with dist._coalescing_manager(self.group, self.device, async_ops=True) as works:
            dist.all_reduce(first, group=self.group)
            dist.all_reduce(second, group=self.group)
        works.wait()
        assert torch.equal(first.cpu(), self.every.sum(0))
        assert torch.equal(second.cpu(), self.every.sum(0) * 2)

    def check_a_chain(self) -> None:
        """Collectives that use each other's results, submitted while the first still runs."""
        tensor, copies = torch.ones(500_000, device=self.device), []
        for _ in range(3):
            dist.all_reduce(tensor, group=self.group, async_op=True)
            copies.append(torch.zeros(500_000 * self.size, device=self.device))
            work = dist.all_gather_into_tensor(copies[-1], tensor, group=self.group, async_op=True)
        work.wait()
        for step, copy in enumerate(copies, 1):
            assert float(copy.min()) == float(copy.max()) == self.size**step

    def check_two_streams(self) -> None:
        """One communicator on two streams: NCCL keeps the order of the calls."""
        streams = [torch.cuda.Stream() for _ in range(2)]
        sums, gathered = [], []
        for step in range(20):
            with torch.cuda.stream(streams[0]):
                sums.append(torch.full((50_000,), float(step), device=self.device))
                dist.all_reduce(sums[-1], group=self.group)
            with torch.cuda.stream(streams[1]):
                gathered.append(torch.zeros(self.size * 9, device=self.device))
                number = torch.full((9,), float(self.rank), device=self.device)
                dist.all_gather_into_tensor(gathered[-1], number, group=self.group)
        torch.cuda.synchronize()
        for step in range(20):
            assert sums[step].unique().tolist() == [step * self.size]
            assert gathered[step].view(self.size, 9)[:, 0].tolist() == list(range(self.size))


def run_collectives(sizes: List[int]) -> List[int]:
    device = join()
    done = []
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            answers = Answers(group, device)
            answers.check_reductions()
            answers.check_moves()
            answers.check_messages()
            answers.check_coalesced()
            answers.check_a_chain()
            answers.check_two_streams()
            done.append(size)
        dist.barrier()
    objects: List[Any] = [None] * RANKS
    dist.all_gather_object(objects, {'rank': dist.get_rank()})
    assert [one['rank'] for one in objects] == list(range(RANKS))
    assert not list(Path('/dev/shm').glob(f'cuda-double-nccl-{os.getpid()}-*'))
    return done


def test_collectives_of_2_3_5_and_8_ranks_give_the_known_answers(tmp_path: Path) -> None:
    done = run_ranks(
        run_collectives, RANKS, tmp_path, [2, 3, 5, 8], environ={'CUDA_DOUBLE_DEVICES': str(RANKS)}
    )
    assert done == [[2, 3, 5, 8], [2, 3, 5, 8], [3, 5, 8], [5, 8], [5, 8], [8], [8], [8]]


def make_network(sync: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 5, 1)
    )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model


def batch_of(rank: int, step: int) -> Any:
    random = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(2, 3, 8, 8, generator=random),
        torch.randint(0, 5, (2, 8, 8), generator=random),
    )


def train(
    model: nn.Module, network: nn.Module, device: torch.device, ranks: List[int]
) -> Dict[str, Tensor]:
    """Take four steps on the samples of these ranks; return the network's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        batches = [batch_of(rank, step) for rank in ranks]
        images, labels = (torch.cat(parts).to(device) for parts in zip(*batches))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return {name: value.detach().cpu() for name, value in network.state_dict().items()}


def train_ddp(sync: bool = False, on_cpu: bool = False, **options: Any) -> Dict[str, Tensor]:
    device = torch.device('cpu') if on_cpu else torch.device('cuda', dist.get_rank())
    network = make_network(sync).to(device)
    model = DistributedDataParallel(
        network, device_ids=None if on_cpu else [device.index], **options
    )
    return train(model, network, device, [dist.get_rank()])


def run_ddp() -> Dict[str, Dict[str, Tensor]]:
    join()
    return dict(
        gloo=train_ddp(on_cpu=True),
        nccl=train_ddp(),
        small_buckets=train_ddp(
            gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=0.0005
        ),
        sync=train_ddp(sync=True),
    )


@pytest.fixture(scope='module')
def states(tmp_path_factory: Any) -> List[Dict[str, Dict[str, Tensor]]]:
    """What trainings of three ranks have left, by rank."""
    return run_ranks(
        run_ddp, 3, tmp_path_factory.mktemp('ddp'), environ={'CUDA_DOUBLE_DEVICES': '3'}
    )


def assert_close(state: Dict[str, Tensor], expected: Dict[str, Tensor], tolerance: float) -> None:
    assert state.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize('name', ['nccl', 'small_buckets'])
def test_ddp_over_nccl_equals_ddp_over_gloo(states: Any, name: str) -> None:
    for state in states:
        assert_close(state[name], state['gloo'], 1e-7)  # the order of three summands differs
        assert all(
            torch.equal(state[name][key], states[0][name][key])
            for key in state[name]
            if 'running' not in key
        )


def test_synchronized_batch_norm_equals_that_of_the_whole_batch(states: Any) -> None:
    network = make_network()
    expected = train(network, network, torch.device('cpu'), [0, 1, 2])
    for state in states:
        assert_close(state['sync'], expected, 1e-5)
        assert all(torch.equal(state['sync'][key], states[0]['sync'][key]) for key in expected)
    assert not torch.allclose(states[0]['nccl']['1.running_var'], expected['1.running_var'])
