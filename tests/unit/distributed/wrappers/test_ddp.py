"""The wrapper places, reverts, proves and trains: on real gloo ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import MODEL_WRAPPERS
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.wrappers import MMDistributedDataParallel, OptimWrapper


class Model(BaseModel):
    """Mean squared output of one linear layer behind a batch norm."""

    def __init__(self, seed: int = 0, norm: Any = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.layer = norm(3), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = 'loss') -> Any:
        return dict(loss=self.layer(self.norm(inputs)).pow(2).mean())


class Notes(logging.Handler):
    """Keeps the warnings of the current MMLogger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen() -> List[str]:
    notes = Notes()
    MMLogger.get_instance('ddp').addHandler(notes)
    return notes.lines


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def wrap_and_step(device_ids: Any) -> Dict[str, Any]:
    """Wrap a model that every rank initialized differently, and take one step."""
    set_current_accelerator(resolve_accelerator('cpu'))
    init_process_group(resolve_accelerator('cpu'), timeout=30)
    warnings = listen()
    wrapped = MODEL_WRAPPERS.build(
        dict(
            type='MMDistributedDataParallel',
            module=Model(dist.get_rank(), nn.SyncBatchNorm),
            device_ids=device_ids,
        )
    )
    assert type(wrapped) is MMDistributedDataParallel
    start = {k: v.clone() for k, v in wrapped.module.state_dict().items()}
    optim = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    log = wrapped.train_step(dict(inputs=data(dist.get_rank())), optim)
    return dict(
        start=start,
        end=dict(wrapped.module.state_dict()),
        log=log,
        warnings=warnings,
        norm=type(wrapped.module.norm).__mro__[1].__name__,
    )


@pytest.fixture(scope='module')
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list:
    return run_ranks(wrap_and_step, 2, tmp_path_factory.mktemp('ddp'), [5])


def test_all_ranks_start_from_rank_0(ranks: list) -> None:
    want = Model(0, nn.BatchNorm1d).state_dict()
    for rank in ranks:
        assert all(torch.equal(rank['start'][name], want[name]) for name in want)


def test_sync_batchnorm_is_reverted_with_a_warning(ranks: list) -> None:
    for rank in ranks:
        assert 'Sync' not in rank['norm']
        assert sum('SyncBatchNorm does not compute on cpu' in w for w in rank['warnings']) == 1


def test_device_ids_of_another_device_are_ignored_with_a_warning(ranks: list) -> None:
    assert all(sum('ignores device_ids=[5]' in w for w in rank['warnings']) == 1 for rank in ranks)


def test_step_is_that_of_the_mean_gradient(ranks: list) -> None:
    model = Model(0, nn.BatchNorm1d)
    torch.stack([model(data(rank))['loss'] for rank in range(2)]).mean().backward()
    for name, parameter in model.named_parameters():
        want = parameter.detach() - 0.1 * parameter.grad
        for rank in ranks:
            torch.testing.assert_close(rank['end'][name], want, rtol=1e-5, atol=1e-6)


def own_device_ids() -> List[str]:
    accelerator = set_current_accelerator(resolve_accelerator('cpu'))
    init_process_group(accelerator, timeout=30)
    warnings = listen()
    for own in (None, [], [0], 0, ['cpu'], torch.device('cpu')):
        MMDistributedDataParallel(Model(), device_ids=own, output_device=own)
    return warnings


def test_own_device_is_no_reason_to_warn(tmp_path: Path) -> None:
    assert run_ranks(own_device_ids, 1, tmp_path) == [[]]
