"""The plumbing around a vendor's own group and DDP, with CPU tensors: on every leg's torch."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import ACCELERATORS, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.wrappers import OptimWrapper

Cpu: Any = next(kind for kind in ACCELERATORS if kind.name == 'cpu')


class OwnDDP(nn.Module):
    """A vendor's DDP whose constructor spoils the weights, and that averages nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.syncs = module, True
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(-1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True


class OwnGroup(Cpu):
    """A CPU whose vendor brings a process group of its own."""

    native_group = True

    def init_native_group(self, *arguments: Any) -> None:
        self.started = arguments

    def data_parallel(self, module: nn.Module, local_rank: int, **options: Any) -> nn.Module:
        self.options = dict(options, local_rank=local_rank)
        return OwnDDP(module)


class Model(BaseModel):
    """Every kind of tensor a model may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.tied = nn.Linear(3, 2), nn.Linear(3, 2)
        self.tied.weight = self.layer.weight
        self.short = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.register_buffer('scalar', torch.tensor(seed))
        self.register_buffer('mask', torch.tensor([seed > 0, True]), persistent=False)
        self.register_buffer('empty', torch.zeros(0))
        self.register_buffer('turned', torch.randn(3, 4, dtype=torch.float64).t())

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = 'loss') -> Any:
        return dict(loss=self.layer(inputs).pow(2).mean())


def wrap() -> Dict[str, Any]:
    accelerator = set_current_accelerator(OwnGroup())
    init_process_group(accelerator, timeout=30)
    rank = dist.get_rank()
    wrapped = MODEL_WRAPPERS.build(
        dict(
            type='MMDistributedDataParallel',
            module=Model(rank),
            device_ids=[rank],
            find_unused_parameters=True,
        )
    )
    assert type(wrapped).__name__ == 'NativeDataParallel' and is_model_wrapper(wrapped)
    module = wrapped.module
    assert module.tied.weight is module.layer.weight
    weights = {
        name: tensor.detach().clone()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1), accumulative_counts=2)
    optim.initialize_count_status(wrapped, 0, 2)
    with optim.optim_context(wrapped):
        accumulates = not wrapped.data_parallel.syncs
    log = wrapped.train_step(dict(inputs=torch.ones(2, 3)), optim)
    return dict(
        weights=weights,
        started=accelerator.started,
        options=accelerator.options,
        accumulates=accumulates,
        loss=float(log['loss']),
        backend=dist.get_backend(),
    )


def test_rank_0_decides_and_the_vendor_wraps(tmp_path: Path) -> None:
    ranks: List[Dict[str, Any]] = run_ranks(wrap, 2, tmp_path)
    model = Model(0)
    for name, want in [*model.named_parameters(), *model.named_buffers()]:
        for rank in ranks:
            assert torch.equal(rank['weights'][name], want), name
    assert {rank['started'][0] for rank in ranks} == {ranks[0]['started'][0]}
    assert ranks[0]['started'][0].startswith('tcp://127.0.0.1:')
    for number, rank in enumerate(ranks):
        assert rank['started'][1:3] == (number, 2) and rank['started'][3].total_seconds() == 30
        assert rank['options'] == dict(local_rank=number, find_unused_parameters=True)
        assert rank['accumulates'] and rank['backend'] == 'gloo'
        assert rank['loss'] == ranks[0]['loss']
