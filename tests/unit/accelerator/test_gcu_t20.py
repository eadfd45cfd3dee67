"""The T20 accelerator on real lazy devices, behind a double of the vendor's API.

Every test runs in processes of its own: importing the double here would make torch_gcu "installed"
for the rest of the session.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from doubles import T20
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import (
    AcceleratorError,
    current_accelerator,
    explain,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.distributed import (
    BackendError,
    WeightsDifferError,
    check_equal_weights,
    init_process_group,
)
from mapsage.distributed.wrappers import MMDistributedDataParallel, OptimWrapper

pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')


def check_double() -> None:
    """The double has the traps of the real package, so that passing here means avoiding them."""
    import torch_gcu

    tensor, optimizer = torch.ones(2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    with torch_gcu.device(1):
        assert torch_gcu.current_device() == 1
    assert torch_gcu.current_device() == 0
    torch_gcu.set_device(99)
    assert torch_gcu.current_device() == 0
    assert torch_gcu.gcu_device(1) == torch.device('xla:1') and not hasattr(torch, 'gcu')
    assert not hasattr(torch_gcu, 'empty_cache') and not hasattr(torch_gcu, 'max_memory_allocated')
    for error, trap in (
        (TypeError, lambda: tensor.to(torch_gcu.device(0))),
        (RuntimeError, lambda: torch.device('gcu')),
        (RuntimeError, lambda: tensor.to(torch_gcu.gcu_device(99))),
        (IndexError, lambda: torch_gcu.sync_lived_tensor(99)),
        (ValueError, lambda: torch_gcu.manual_seed_all(2**32)),
        (TypeError, lambda: torch_gcu.optimizer_step(OptimWrapper(optimizer))),
        (TypeError, lambda: torch_gcu.unlazy([tensor])),
        (RuntimeError, lambda: torch_gcu.amp.autocast(dtype=torch.float64)),
    ):
        with pytest.raises(error):
            trap()


def check_double_scaler() -> None:
    import torch_gcu

    for use_zero_grad in (False, True):
        weight = torch.ones(2, device=torch_gcu.gcu_device(0), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1)
        scaler = torch_gcu.amp.GradScaler(init_scale=4.0, use_zero_grad=use_zero_grad)
        scaler.scale((weight * 1).sum()).backward()
        if not use_zero_grad:
            with pytest.raises(TypeError, match='device'):
                scaler.step(optimizer)
            continue
        scaler.step(optimizer)
        scaler.update()
        torch_gcu.unlazy(torch_gcu.collect_amp_training_params(nn.Identity(), optimizer, scaler))
        assert weight.tolist() == [0, 0]


def check_accelerator() -> None:
    accelerator = resolve_accelerator('auto')
    assert accelerator.name == 'gcu_t20' and 'gradients over eccl' in explain(accelerator)
    set_current_accelerator(accelerator).set_device(1)
    assert torch.ones(1).to(current_accelerator().device(1)).device == torch.device('xla:1')
    with pytest.raises(AcceleratorError, match=r'local rank 2 .* 2 device\(s\)'):
        accelerator.device(2)
    with pytest.raises(AcceleratorError, match=r'local rank 2 .* 2 device\(s\)'):
        accelerator.set_device(2)

    held = torch.ones(1000, device=accelerator.device(1))
    accelerator.synchronize()
    assert accelerator.memory_allocated() >= 4000 and held.sum().item() == 1000
    assert accelerator.max_memory_allocated() is None
    draws = []
    for seed in (3, 3, 4, 2**32 - 1):
        accelerator.seed(seed)
        draws.append(nn.functional.dropout(torch.ones(64, device=accelerator.device(1))).tolist())
    assert draws[0] == draws[1] != draws[2] != draws[3]


def check_mixed_precision() -> None:
    accelerator = resolve_accelerator('gcu_t20')
    weight = torch.ones(4, 4, device=accelerator.device(0), requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16):
        with accelerator.autocast(dtype):
            assert (weight @ weight).dtype == dtype and torch.is_autocast_enabled()
        assert (weight @ weight).dtype == torch.float32 and not torch.is_autocast_enabled()
    assert not accelerator.grad_scaler(torch.bfloat16).is_enabled()

    optimizer = torch.optim.SGD([weight], lr=1)
    scaler = accelerator.grad_scaler(torch.float16, init_scale=8.0)
    for factor, want in ((float('inf'), 1.0), (1.0, 0.0)):  # the overflow changes nothing
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        accelerator.flush()
        assert weight.tolist() == [[want] * 4] * 4
    assert scaler.get_scale() == 4.0


class Model(BaseModel):
    """A linear layer behind a batch norm, and on request a layer that no loss reaches."""

    def __init__(self, seed: int, idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer('step', torch.tensor([seed]), persistent=False)
        self.register_buffer('mask', torch.tensor([seed > 0, True]))
        self.idle = nn.Linear(2, 2) if idle else None

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = 'loss') -> Any:
        return dict(loss=self.layer(self.norm(inputs)).pow(2).mean())


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def start(**arguments: Any) -> None:
    set_current_accelerator(resolve_accelerator('gcu_t20'))
    init_process_group(current_accelerator(), timeout=30, **arguments)


def to_host(tensors: Any) -> Dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


def wrap_and_train() -> Dict[str, Any]:
    """Wrap a model that every rank initialized otherwise; accumulate two batches; step."""
    rank = dist.get_rank()
    wrapped = MODEL_WRAPPERS.build(dict(type='MMDistributedDataParallel', module=Model(rank)))
    assert type(wrapped).__name__ == 'NativeDataParallel' and is_model_wrapper(wrapped)
    first = to_host([*wrapped.module.named_parameters(), *wrapped.module.named_buffers()])
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1), accumulative_counts=2)
    optim.initialize_count_status(wrapped, 0, 2)
    for step in range(2):
        log = wrapped.train_step(dict(inputs=data(rank, step)), optim)
        if step == 0:
            alone = to_host((n, p.grad) for n, p in wrapped.module.named_parameters())
    return dict(
        first=first,
        alone=alone,
        loss=float(log['loss']),
        last=to_host(wrapped.module.named_parameters()),
    )


def refuse() -> None:
    """Options and models that cannot be wrapped, and weights that drift apart."""
    with pytest.raises(AcceleratorError, match=r'no static_graph: .*broadcast_buffers'):
        MMDistributedDataParallel(Model(0), static_graph=True)
    with pytest.raises(WeightsDifferError, match=r'rank\(s\) \[1\] built another model .*idle'):
        MMDistributedDataParallel(Model(0, idle=dist.get_rank() == 1))
    wrapped = MMDistributedDataParallel(
        Model(0, idle=True),
        find_unused_parameters=True,
        broadcast_buffers=True,
        gradient_as_bucket_view=False,
        detect_anomalous_params=True,
    )
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    wrapped.train_step(dict(inputs=data(dist.get_rank())), optim)
    with torch.no_grad():
        next(wrapped.module.parameters()).add_(dist.get_rank())
    with pytest.raises(WeightsDifferError):
        check_equal_weights(wrapped.module, 'now')


def use_vendor_group() -> List[float]:
    """What the vendor's own group does in the double, told apart from torch's."""
    import torch_gcu
    import torch_gcu.distributed as eccl

    rank, device = dist.get_rank(), current_accelerator().device(dist.get_rank())
    assert eccl.is_initialized() and torch_gcu.current_device() == rank
    assert dist.get_backend() == 'gloo' and eccl.get_backend() == 'eccl'
    assert not hasattr(eccl, 'all_gather_object') and eccl.ReduceOp is not dist.ReduceOp
    tensor = torch.full((2,), rank + 1.0, device=device)
    with pytest.raises(RuntimeError, match='on GCU'):
        eccl.all_reduce(torch.ones(2))
    with pytest.raises(TypeError, match='ReduceOp'):
        eccl.all_reduce(tensor, dist.ReduceOp.SUM)
    gathered = [torch.zeros(2, device=device) for _ in range(2)]
    eccl.all_gather(gathered, tensor)
    share = torch.zeros(1, device=device)
    eccl.reduce_scatter(share, list(tensor.clone().split(1)))
    swapped = [torch.zeros(1, device=device) for _ in range(2)]
    eccl.all_to_all(swapped, [torch.full((1,), 10.0 * rank + k, device=device) for k in range(2)])
    assert (eccl.new_group([1]) is None) == (rank == 0)
    eccl.all_reduce(tensor)
    model = nn.Linear(1, 1, bias=False).to(device)
    with torch.no_grad():
        model.weight.fill_(rank)
    ddp = torch_gcu.nn.parallel.DistributedDataParallel
    with pytest.raises(RuntimeError, match='device_ids=None'):
        ddp(model)
    with pytest.raises(RuntimeError, match='gradient_as_bucket_view'):
        ddp(model, device_ids=[rank], gradient_as_bucket_view=True)
    ddp(model, device_ids=[rank])  # and leaves each rank its own weights
    parts = [*gathered, share, *swapped, tensor, model.weight.detach()]
    return torch.cat([part.cpu().reshape(-1) for part in parts]).tolist()


def on_two_ranks() -> Dict[str, Any]:
    start()
    refuse()
    return dict(training=wrap_and_train(), collectives=use_vendor_group())


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> List[dict]:
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp('two'), environ=T20)


def test_two_ranks_take_the_step_of_one(two_ranks: List[dict]) -> None:
    ranks = [rank['training'] for rank in two_ranks]
    reference = Model(0)
    for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
        for rank in ranks:
            assert torch.equal(rank['first'][name], tensor), name
    # while accumulating, ranks keep gradients of their own
    assert not torch.equal(ranks[0]['alone']['layer.weight'], ranks[1]['alone']['layer.weight'])
    model = Model(0)
    torch.stack(
        [model(data(rank, step))['loss'] for rank in range(2) for step in range(2)]
    ).mean().backward()
    for name, parameter in model.named_parameters():
        want = parameter.detach() - 0.1 * parameter.grad
        for rank in ranks:
            torch.testing.assert_close(rank['last'][name], want, rtol=1e-5, atol=1e-6)


def test_the_vendors_group_in_the_double(two_ranks: List[dict]) -> None:
    assert [rank['collectives'] for rank in two_ranks] == [
        [1, 1, 2, 2, 3, 0, 10, 3, 3, 0],
        [1, 1, 2, 2, 3, 1, 11, 3, 3, 1],
    ]


def check_too_few_cards() -> None:
    """Ranks, of which this is one, on a node that shows each fewer cards; one may be its own."""
    os.environ.update(LOCAL_WORLD_SIZE='3', TOPS_VISIBLE_DEVICES='0,1')
    with pytest.raises(AcceleratorError, match="3 ranks .* 'gcu_t20' shows 2"):
        start()
    os.environ.update(LOCAL_WORLD_SIZE='2', TOPS_VISIBLE_DEVICES='0')
    assert current_accelerator().one_card_a_rank()
    os.environ.update(LOCAL_WORLD_SIZE='1')
    with pytest.raises(BackendError, match="'nccl'"):
        start(backend='nccl')


def check_one_port() -> None:
    """Why the vendor's group gets a port of its own: MASTER_PORT already serves torch's."""
    import torch_gcu.distributed as eccl

    dist.init_process_group('gloo')
    with pytest.raises(RuntimeError, match='EADDRINUSE|in use'):
        eccl.init_process_group('eccl', init_method='env://')
    with pytest.raises(AcceleratorError, match='rank 0 of 1 cannot start the eccl group at udp:'):
        resolve_accelerator('gcu_t20').init_native_group(
            'udp://127.0.0.1:1', 0, 1, timedelta(seconds=60)
        )
    dist.destroy_process_group()


def check_staged() -> None:
    """The vendor's group can be left out: gradients then go through host memory."""
    import torch_gcu

    start(backend='staged')
    wrapped = MMDistributedDataParallel(Model(dist.get_rank()))
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert dist.get_backend() == 'cpu:gloo,xla:staged'
    assert not torch_gcu.distributed.is_initialized()


def in_one_process() -> None:
    for check in (
        check_double,
        check_double_scaler,
        check_accelerator,
        check_mixed_precision,
        check_too_few_cards,
        check_one_port,
        check_staged,
    ):
        print('now', check.__name__, flush=True)
        check()


def test_in_one_process(tmp_path: Path) -> None:
    run_ranks(in_one_process, 1, tmp_path, environ={**T20, 'TOPS_VISIBLE_DEVICES': '0,1'})
