"""Every kind of ``model_wrapper_cfg`` trains on two ranks as the default does, or is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel as HostDataParallel
from mmengine.registry import MODEL_WRAPPERS
from ranks import run_ranks
from support import main_leg, no_simulated_cards, on_host
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_runs import ToyRegression, toy_train

from mapsage.accelerator import resolve_accelerator
from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.engine import ConfigError
from mapsage.engine.wrapping import wrap_for_ranks

SIM_ABSENT = no_simulated_cards()


@MODEL_WRAPPERS.register_module(force=True)
class UsersDataParallel(HostDataParallel):
    """A user's subclass of MMEngine's wrapper."""


@MODEL_WRAPPERS.register_module(force=True)
class UsersMean(nn.Module):
    """A user's wrapper without torch's DDP: it averages the gradients of two ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_hook(self._mean)

    @staticmethod
    def _mean(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.cpu()
        dist.all_reduce(total)
        return (total / 2).to(gradient.device)

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return self.module.train_step(data, optim_wrapper)

    def val_step(self, data: Any) -> Any:
        return self.module.val_step(data)

    test_step = val_step


DDP = dict(type='MMDistributedDataParallel')
VARIANTS: Dict[str, Any] = {
    'default': None,
    'by name': DDP,
    'by class': dict(type=HostDataParallel),
    'find_unused_parameters': dict(find_unused_parameters=True),
    'static_graph': dict(static_graph=True),
    'gradient_as_bucket_view': dict(gradient_as_bucket_view=True),
    'broadcast_buffers': dict(broadcast_buffers=False),
    'detect_anomalous_params': dict(DDP, detect_anomalous_params=True),
    "a subclass of the user's": dict(type='UsersDataParallel'),
    "a subclass of the user's, as a class": dict(type=UsersDataParallel),
    "a wrapper of the user's": dict(type='UsersMean'),
    'parts': dict(type='MMSeparateDistributedDataParallel'),
}
if 'static_graph' not in inspect.signature(DistributedDataParallel).parameters:
    del VARIANTS['static_graph']  # torch 1.10
REFUSED: Dict[str, Any] = {
    "'MMFullyShardedDataParallel' leaves each rank a part of every weight": dict(
        type='MMFullyShardedDataParallel'
    ),
    "has no such option. Did you mean 'find_unused_parameters'?": dict(find_unused_parameter=True),
    "has no such option. Did you mean 'bucket_cap_mb'?": dict(
        type='UsersDataParallel', bucket_cap=1
    ),
    'has no such option. Remove it.': dict(type='UsersDataParallel', pasta=1),
    "not registered in MODEL_WRAPPERS. Did you mean 'MMDistributedDataParallel'?": dict(
        type='MMDistributedDataParalel'
    ),
    'not registered in MODEL_WRAPPERS. Name the module': dict(type='mmseg.Spaghetti'),
}


def train_variants(folder: str, accelerator: str) -> List[Dict[str, Any]]:
    """Return losses, weights and devices of the variants, and the errors of the refused."""
    runs, errors = {}, {}
    changes: Any = {
        'model.dropout': 0.0,
        'train_cfg.max_iters': 3,
        'env_cfg.accelerator': accelerator,
    }
    for name, wrapper in VARIANTS.items():
        runner, record = toy_train(
            Path(folder) / str(len(runs)), model_wrapper_cfg=wrapper, **changes
        )
        parameters = list(runner.model.parameters())
        runs[name] = dict(
            losses=record.losses,
            devices={str(each.device) for each in parameters},
            weights=[each.detach().cpu() for each in parameters],
        )
    for sentence, wrapper in REFUSED.items():
        try:
            toy_train(Path(folder) / 'refused', model_wrapper_cfg=wrapper, **changes)
        except ConfigError as error:
            errors[sentence] = str(error)
    return [runs, errors]


@pytest.mark.parametrize(
    'accelerator',
    [
        pytest.param('cpu', marks=on_host),
        pytest.param(
            'sim',
            marks=[main_leg, pytest.mark.skipif(SIM_ABSENT is not None, reason=str(SIM_ABSENT))],
        ),
    ],
)
def test_each_wrapper_trains_as_the_default_or_is_refused(accelerator: str, tmp_path: Path) -> None:
    results = run_ranks(train_variants, 2, tmp_path, str(tmp_path), accelerator)
    for rank, (runs, errors) in enumerate(results):
        device = 'cpu' if accelerator == 'cpu' else f'gcu:{rank}'
        expected = runs['default']
        assert len(expected['losses']) == 3
        for name, run in runs.items():
            assert run['devices'] == {device}, name
            assert run['losses'] == expected['losses'], name
            assert all(map(torch.equal, run['weights'], expected['weights'])), name
            assert all(map(torch.equal, run['weights'], results[0][0][name]['weights'])), name
        for sentence in REFUSED:
            assert sentence in errors.get(sentence, ''), sentence


class OwnGroup(CpuAccelerator):
    """A CPU with a process group of its vendor, which torch.distributed does not know."""

    native_group = True


def wrap_beside_a_native_group(kind: str) -> str:
    """Return the error of wrapping a model for two ranks."""
    init_process_group(resolve_accelerator('cpu'))
    # A rank that ends at once may close its connection before the other has accepted it.
    dist.barrier()
    try:
        wrap_for_ranks(
            ToyRegression(), dict(type=kind), False, OwnGroup(), VirtualRanks(2, 2), True, None
        )
    except ConfigError as error:
        return str(error)
    return ''


def test_a_users_ddp_is_refused_where_the_vendors_group_alone_reaches_the_devices(
    tmp_path: Path,
) -> None:
    for message in run_ranks(wrap_beside_a_native_group, 2, tmp_path, 'UsersDataParallel'):
        assert "'UsersDataParallel' adds gradients up over torch.distributed" in message
