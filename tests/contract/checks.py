"""The contract: what every accelerator does, each check against an answer computed on the CPU.

Checks run inside a process of their own (test_contract.py). One that cannot apply raises
``NotApplicable`` with the reason, which becomes a visible skip.
"""

from __future__ import annotations

import copy
import io
import os
import traceback
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from mapsage.accelerator import (
    Accelerator,
    AcceleratorError,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.distributed import init_process_group
from mapsage.distributed.wrappers import MMDistributedDataParallel
from mapsage.models import JaccardLoss, SegDiceLoss, SegFocalLoss

Check = Callable[[Accelerator], None]
ONE_PROCESS: Dict[str, Check] = {}
SEVERAL_PROCESSES: Dict[str, Check] = {}


class NotApplicable(Exception):
    """The check has nothing to say about this stack; the message says why."""


def one_process(check: Check) -> Check:
    ONE_PROCESS[check.__name__] = check
    return check


def several_processes(check: Check) -> Check:
    SEVERAL_PROCESSES[check.__name__] = check
    return check


def run_checks(name: str, kind: str) -> Dict[str, str]:
    """Run every check of a kind on this process's accelerator.

    Returns:
        check -> '' when it held, 'skip: ...' or a traceback.
    """
    accelerator = set_current_accelerator(resolve_accelerator(name))
    local_rank = int(os.environ['LOCAL_RANK'])
    checks = ONE_PROCESS
    if kind == 'several':
        checks = SEVERAL_PROCESSES
        init_process_group(accelerator, timeout=30)
    else:
        accelerator.set_device(local_rank)
    return {each: _outcome(check, accelerator) for each, check in checks.items()}


def _outcome(check: Check, accelerator: Accelerator) -> str:
    try:
        check(accelerator)
    except NotApplicable as reason:
        return f'skip: {reason}'
    except Exception:
        return traceback.format_exc()
    return ''


def own_device(accelerator: Accelerator) -> torch.device:
    return accelerator.device(int(os.environ['LOCAL_RANK']))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    )


def some_images(seed: int = 1, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str = '') -> None:
    found = found.detach().cpu()
    assert found.dtype == expected.dtype, f'{what}: {found.dtype}, expected {expected.dtype}'
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), f'{what}: {found} != {expected}'


# ------------------------------------------------------------------------------ one process


@one_process
def device_is_of_the_named_type(accelerator: Accelerator) -> None:
    assert own_device(accelerator).type == accelerator.device_type
    assert accelerator.device_count() >= 1
    assert accelerator.name in accelerator.describe()


@one_process
def tensors_make_the_round_trip(accelerator: Accelerator) -> None:
    device = own_device(accelerator)
    base = torch.arange(24).reshape(2, 3, 4) - 12
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.bool,
    ):
        host = base.abs().to(dtype)
        for tensor in (host, host.transpose(0, 2), host[:, 1:], host[:0], host[0, 0, 0]):
            there = tensor.to(device)
            assert there.device.type == accelerator.device_type
            back = there.cpu()
            assert back.dtype == dtype and back.shape == tensor.shape
            assert torch.equal(back, tensor), (dtype, back, tensor)


@one_process
def wide_numbers_keep_what_is_promised(accelerator: Accelerator) -> None:
    device = own_device(accelerator)
    supports = accelerator.supports
    if supports.int64:
        assert int((torch.tensor([2**40], device=device) + 1).cpu()) == 2**40 + 1
    if supports.float64:
        precise = torch.tensor([1 / 3], dtype=torch.float64).to(device) * 3 - 1
        assert abs(float(precise.cpu())) < 1e-15
        assert float((torch.tensor([1e-12], dtype=torch.float64).to(device) + 1).cpu()) != 1.0
    if not (supports.int64 or supports.float64):
        raise NotApplicable(f'{accelerator.name} promises no 64-bit computing')


@one_process
def a_step_equals_the_cpu(accelerator: Accelerator) -> None:
    device = own_device(accelerator)
    reference = small_model()
    model = copy.deepcopy(reference).to(device)
    for each, where in ((reference, torch.device('cpu')), (model, device)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss = each(some_images(step).to(where)).pow(2).mean()
            loss.backward()
            if where.type == 'cpu' and accelerator.device_type != 'cpu':
                optimizer.step()
            else:
                accelerator.optimizer_step(optimizer)
                accelerator.flush()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters()):
        assert_close(found, expected.detach(), name)


@one_process
def losses_for_unequal_classes_equal_the_cpu(accelerator: Accelerator) -> None:
    labels = torch.arange(2 * 8 * 8).reshape(2, 8, 8) % 5
    labels[labels == 4] = 255
    for kind in (
        SegDiceLoss,
        SegFocalLoss,
        partial(JaccardLoss, 0.5, 0.1),
    ):
        found = []
        for where in (torch.device('cpu'), own_device(accelerator)):
            logits = some_images(3).repeat(1, 2, 1, 1)[:, :4, :8, :8].to(where).requires_grad_()
            value = kind(class_weight=[1, 2, 0.5, 1])(logits, labels.to(where))
            value.backward()
            found.append((value.detach().cpu(), logits.grad.cpu()))
        for one, other in zip(*found):
            assert_close(other, one, str(kind))


@one_process
def a_seed_repeats_the_numbers(accelerator: Accelerator) -> None:
    device = own_device(accelerator)

    def draw(seed: int) -> List[torch.Tensor]:
        accelerator.seed(seed)
        drawn = [
            torch.rand(64, device=device),
            torch.randn(64, device=device),
            nn.functional.dropout(torch.ones(64, device=device), 0.5),
            torch.rand(64),
        ]
        return [each.cpu() for each in drawn]

    first, second, other = draw(11), draw(11), draw(12)
    for a, b, c in zip(first, second, other):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@one_process
def a_random_state_comes_back(accelerator: Accelerator) -> None:
    """Also by way of a checkpoint, whatever the number of bytes of a device's state."""
    if accelerator.lazy:
        raise NotApplicable(f'{accelerator.name} records operations, also random ones')
    file = io.BytesIO()
    accelerator.seed(5)
    torch.rand(7, device=own_device(accelerator))
    torch.save(accelerator.random_state(), file)
    file.seek(0)

    def draw() -> List[torch.Tensor]:
        on_device = torch.rand(64, device=own_device(accelerator))
        dropped = nn.functional.dropout(torch.ones(64, device=own_device(accelerator)), 0.5)
        return [on_device.cpu(), dropped.cpu(), torch.rand(64)]

    first = draw()
    accelerator.set_random_state(torch.load(file))
    for one, other in zip(first, draw()):
        assert torch.equal(one, other)


@one_process
def a_seed_reaches_every_device(accelerator: Accelerator) -> None:
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        raise NotApplicable(f'{accelerator.name} has one device a process')
    if accelerator.device_count() < 2:
        raise NotApplicable('one device')
    last = accelerator.device(accelerator.device_count() - 1)

    def draw() -> torch.Tensor:
        accelerator.seed(11)
        return nn.functional.dropout(torch.ones(64, device=last), 0.5).cpu()

    first = draw()
    torch.rand(7, device=last)
    assert torch.equal(first, draw())


@one_process
def autocast_lowers_matrix_products_only(accelerator: Accelerator) -> None:
    device = own_device(accelerator)
    layer = nn.Linear(8, 8).to(device)
    inputs = torch.randn(4, 8).to(device)
    with accelerator.autocast(torch.bfloat16):
        product = layer(inputs)
        total = torch.softmax(product.float(), dim=-1).sum()
    assert product.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    total.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(inputs).dtype == torch.float32
    exact = torch.nn.functional.linear(inputs.cpu(), layer.weight.cpu(), layer.bias.cpu())
    error = (product.detach().float().cpu() - exact.detach()).abs().max()
    assert 0 < float(error) < 0.1, 'bfloat16 keeps 8 bits'


@one_process
def bfloat16_needs_no_scaler(accelerator: Accelerator) -> None:
    assert not accelerator.grad_scaler(torch.bfloat16).is_enabled()


@one_process
def flush_and_synchronize_keep_values(accelerator: Accelerator) -> None:
    value = torch.zeros(4, device=own_device(accelerator))
    for step in range(3):
        value += 1
        accelerator.flush()
        assert value.cpu().tolist() == [step + 1.0] * 4
    value *= 2
    accelerator.synchronize()
    assert value.cpu().tolist() == [6.0] * 4


@one_process
def memory_is_counted_in_bytes(accelerator: Accelerator) -> None:
    before = accelerator.memory_allocated()
    if before is None:
        raise NotApplicable(f'{accelerator.name} keeps no account of memory here')
    size = 8 * 2**20
    tensor = torch.ones(size // 4, device=own_device(accelerator))
    accelerator.synchronize()
    held = accelerator.memory_allocated()
    assert size <= held - before < 2 * size, (before, held)
    peak = accelerator.max_memory_allocated()
    assert peak is None or peak >= held
    total = accelerator.memory_total()
    assert total is None or total >= held
    del tensor
    accelerator.synchronize()
    assert accelerator.memory_allocated() < before + size
    peak_after = accelerator.max_memory_allocated()
    assert peak_after is None or peak_after >= held


@one_process
def a_checkpoint_goes_by_way_of_the_cpu(accelerator: Accelerator) -> None:
    device = own_device(accelerator)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        model(some_images(seed).to(device)).pow(2).mean().backward()
        accelerator.optimizer_step(optimizer)
        accelerator.flush()

    model = small_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    to_cpu = _to_cpu(dict(model=model.state_dict(), optimizer=optimizer.state_dict()))
    file = io.BytesIO()
    torch.save(to_cpu, file)
    file.seek(0)
    saved = torch.load(file, map_location='cpu')

    twin = small_model().to(device)
    twin.load_state_dict(saved['model'])
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    twin_optimizer.load_state_dict(saved['optimizer'])
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(each, its_optimizer, 2)
    for found, expected in zip(twin.parameters(), model.parameters()):
        assert found.device.type == accelerator.device_type
        assert torch.equal(found.cpu(), expected.cpu())


def _to_cpu(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.cpu()
    if isinstance(item, dict):
        return {key: _to_cpu(value) for key, value in item.items()}
    return [_to_cpu(value) for value in item] if isinstance(item, list) else item


@one_process
def an_absent_device_is_an_error(accelerator: Accelerator) -> None:
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        raise NotApplicable(f'any number of ranks may share the {accelerator.name} device')
    count = accelerator.device_count()
    for ask in (accelerator.device, accelerator.set_device):
        try:
            ask(count)
        except AcceleratorError as error:
            assert str(count) in str(error) and 'NPROC_PER_NODE' in str(error)
        else:
            raise AssertionError(f'{ask.__name__}({count}) with {count} devices')


# ------------------------------------------------------------------------ several processes


def numbers_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings: known to every other, so that each computes the answer alone."""
    return (torch.arange(6) * (rank + 1) + rank).to(dtype)


def all_numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([numbers_of(rank, dtype) for rank in range(dist.get_world_size())])


def on_host_and_device(accelerator: Accelerator) -> List[torch.device]:
    """Where collectives of torch.distributed take tensors from."""
    devices = [torch.device('cpu')]
    if accelerator.device_type != 'cpu' and accelerator.name != 'gcu_t20':
        devices.append(own_device(accelerator))  # T20: eccl lives outside torch.distributed
    return devices


def named(name: str) -> Callable[..., Any]:
    function = getattr(dist, name, None)
    if function is None:
        raise NotApplicable(f'torch {torch.__version__} has no dist.{name}')
    return function


def supported(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective; what the backend says it cannot do is a skip, in its own words."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        words = str(error)
        if 'not support' in words or 'nsupported' in words or 'mplemented' in words:
            raise NotApplicable(words.splitlines()[0]) from error
        raise


@several_processes
def all_reduce(accelerator: Accelerator) -> None:
    for device in on_host_and_device(accelerator):
        for op, answer in (
            (dist.ReduceOp.SUM, lambda t: t.sum(0)),
            (dist.ReduceOp.MAX, lambda t: t.amax(0)),
            (dist.ReduceOp.MIN, lambda t: t.amin(0)),
        ):
            for dtype in (torch.float32, torch.int32, torch.int64):
                tensor = numbers_of(dist.get_rank(), dtype).to(device)
                dist.all_reduce(tensor, op=op)
                assert tensor.device.type == device.type
                assert_close(tensor, answer(all_numbers(dtype)).to(dtype), f'{op} {dtype}')


@several_processes
def broadcast(accelerator: Accelerator) -> None:
    for device in on_host_and_device(accelerator):
        for source in range(dist.get_world_size()):
            tensor = numbers_of(dist.get_rank()).to(device)
            dist.broadcast(tensor, src=source)
            assert_close(tensor, numbers_of(source))


@several_processes
def all_gather(accelerator: Accelerator) -> None:
    for device in on_host_and_device(accelerator):
        gathered = [torch.zeros(6).to(device) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, numbers_of(dist.get_rank()).to(device))
        for rank, tensor in enumerate(gathered):
            assert_close(tensor, numbers_of(rank))


@several_processes
def all_gather_into_tensor(accelerator: Accelerator) -> None:
    gather = named('all_gather_into_tensor')
    for device in on_host_and_device(accelerator):
        output = torch.zeros(6 * dist.get_world_size()).to(device)
        supported(gather, output, numbers_of(dist.get_rank()).to(device))
        assert_close(output, all_numbers().reshape(-1))


@several_processes
def reduce_scatter_tensor(accelerator: Accelerator) -> None:
    scatter = named('reduce_scatter_tensor')
    world, rank = dist.get_world_size(), dist.get_rank()
    for device in on_host_and_device(accelerator):
        whole = torch.cat([numbers_of(rank) * (part + 1) for part in range(world)]).to(device)
        output = torch.zeros(6).to(device)
        supported(scatter, output, whole)
        assert_close(output, all_numbers().sum(0) * (rank + 1))


@several_processes
def all_to_all_single(accelerator: Accelerator) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()

    def count(source: int, destination: int) -> int:
        return (source + 2 * destination) % 3  # uneven, with nothing now and then

    for device in on_host_and_device(accelerator):
        sent = [count(rank, to) for to in range(world)]
        received = [count(source, rank) for source in range(world)]
        inputs = torch.cat([torch.full((n,), 10.0 * rank + to) for to, n in enumerate(sent)])
        output = torch.zeros(sum(received)).to(device)
        supported(dist.all_to_all_single, output, inputs.to(device), received, sent)
        assert_close(
            output,
            torch.cat(
                [torch.full((n,), 10.0 * source + rank) for source, n in enumerate(received)]
            ),
        )


@several_processes
def reduce_gather_and_scatter(accelerator: Accelerator) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for device in on_host_and_device(accelerator):
        tensor = numbers_of(rank).to(device)
        dist.reduce(tensor, dst=1)
        if rank == 1:
            assert_close(tensor, all_numbers().sum(0))
        # eccl may leave outputs as they were (docs/reference/simulator.md, row 19); MapSage uses
        # neither.
        if device.type == 'gcu':
            continue
        gathered = [torch.zeros(6).to(device) for _ in range(world)] if rank == 0 else None
        dist.gather(numbers_of(rank).to(device), gathered, dst=0)
        for source, each in enumerate(gathered or []):
            assert_close(each, numbers_of(source))
        parts = [(numbers_of(each) + 5).to(device) for each in range(world)] if rank == 0 else None
        part = torch.zeros(6).to(device)
        dist.scatter(part, parts, src=0)
        assert_close(part, numbers_of(rank) + 5)


@several_processes
def objects_and_barrier(accelerator: Accelerator) -> None:
    gathered: List[Optional[dict]] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(rank=dist.get_rank(), wide=2**40 + dist.get_rank()))
    assert gathered == [dict(rank=r, wide=2**40 + r) for r in range(dist.get_world_size())]
    told = ['from rank 1' if dist.get_rank() == 1 else None]
    dist.broadcast_object_list(told, src=1)
    assert told == ['from rank 1']
    dist.barrier()


@several_processes
def ddp_gradients_are_the_mean_over_all_samples(accelerator: Accelerator) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    wrapped = MMDistributedDataParallel(small_model())
    images = [some_images(seed=each) for each in range(world)]
    wrapped(images[rank].to(own_device(accelerator))).pow(2).mean().backward()
    accelerator.flush()
    reference = small_model()
    reference(torch.cat(images)).pow(2).mean().backward()
    for (name, found), expected in zip(wrapped.module.named_parameters(), reference.parameters()):
        assert found.device.type == accelerator.device_type
        assert_close(found.grad, expected.grad, name)
