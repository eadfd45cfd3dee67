"""Sums over virtual ranks have the same bits on any number of processes: on real gloo ranks."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from forked import DIED, fork_scenarios
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from sampling_ranks import Answers, answers_of
from support import no_simulated_cards, on_host
from torch import nn
from toy_runs import ToyRegression, same_weights, toy_train

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import (
    Fold,
    OrderedSum,
    RankLostError,
    init_process_group,
    lost_ranks_named,
    resolve_reduction,
)
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers import AmpOptimWrapper, MMDistributedDataParallel, OptimWrapper

pytestmark = on_host
SIM = no_simulated_cards()
# Virtual ranks and processes: whole subtrees, cut ones, uneven blocks, one each.
WORLDS = [(8, 1), (8, 2), (8, 3), (8, 5), (8, 8), (12, 5), (3, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 7, 40, 1001]  # shorter than the processes, with and without a rest
STEPS = 4
# Small buckets, which DDP lays out again after the first step.
SMALL: Dict[str, Any] = dict(bucket_cap_mb=0.0005)
OPTIONS: Dict[str, Dict[str, Any]] = {
    'plain': SMALL,
    'one bucket': {},
    'views': dict(SMALL, gradient_as_bucket_view=True),
    'unused': dict(SMALL, find_unused_parameters=True),
}
HAS_AUTOCAST = hasattr(torch, 'autocast') and torch.__version__ >= '2'  # with bfloat16 on the CPU


def summands(virtual_rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of mixed size, so that no two orders of adding them give the same bits."""
    generator = torch.Generator().manual_seed(virtual_rank)
    return (torch.randn(length, generator=generator) * 10.0 ** (virtual_rank % 4)).to(dtype)


def along_the_tree(parts: List[torch.Tensor]) -> torch.Tensor:
    """Return the sum; left of each node stands the largest power of two below its length."""
    if len(parts) == 1:
        return parts[0].clone()
    left = 1
    while 2 * left < len(parts):
        left *= 2
    return along_the_tree(parts[:left]) + along_the_tree(parts[left:])


def differing_sums(count: int, world: int, name: str = 'cpu') -> List[Tuple[str, int]]:
    """Return the dtypes and lengths for which the bits are not those of one process."""
    accelerator = set_current_accelerator(resolve_accelerator(name))
    init_process_group(accelerator, 'auto' if name == 'cpu' else 'staged', timeout=30)
    device = accelerator.device(dist.get_rank())
    ranks, rank = VirtualRanks(count, world), dist.get_rank()
    ordered, wrong = OrderedSum(ranks, rank), []
    # Simulated cards round float64 to float32, as an S60 does.
    dtypes = [
        dtype for dtype in DTYPES if accelerator.supports.float64 or dtype is not torch.float64
    ]
    for dtype, length in itertools.product(dtypes, LENGTHS):
        fold = Fold(ranks, ranks.block(rank))
        for virtual_rank in ranks.block(rank):
            fold.add([summands(virtual_rank, length, dtype).to(device)])
        parts = [tensors[0] for tensors in fold.partials()]
        got = ordered.sum(parts).clone()
        want = along_the_tree([summands(each, length, dtype) for each in range(count)])
        mean = ordered.mean(parts, out=parts[0])  # in the memory of a summand, as in a DDP bucket
        if not (
            torch.equal(got.cpu(), want)
            and torch.equal(mean.cpu(), want / count)
            and got.dtype == mean.dtype == dtype
        ):
            wrong.append((str(dtype), length))
    return wrong


class Model(BaseModel):
    """Three layers, and one that takes no part in the loss."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(3, 37), nn.ReLU(), nn.Linear(37, 11), nn.ReLU(), nn.Linear(11, 2)
        )
        if unused:
            self.idle = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = 'loss') -> Any:
        return dict(loss=self.layers(inputs).pow(2).mean())


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, generator=generator) * 10.0 ** (rank % 3)


def weights(module: nn.Module) -> Dict[str, Any]:
    return {name: value.cpu().numpy().tobytes() for name, value in module.state_dict().items()}


def train_as_ranks(
    name: str, options: Dict[str, Any], accumulate: int = 1, amp: bool = False
) -> Any:
    """Return this rank's weights and the way in which gradients are added up by default."""
    accelerator = set_current_accelerator(resolve_accelerator(name))
    init_process_group(accelerator, 'auto' if name == 'cpu' else 'staged', timeout=30)
    rank = dist.get_rank()
    model = MMDistributedDataParallel(Model('find_unused_parameters' in options), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapper: Any = (
        AmpOptimWrapper(optimizer=optimizer, dtype='bfloat16')
        if amp
        else OptimWrapper(optimizer, accumulative_counts=accumulate)
    )
    for step in range(STEPS):
        data = batch(rank, step).to(accelerator.device(rank))
        model.train_step(dict(inputs=data), wrapper)
    return weights(model.module), resolve_reduction(None, accelerator)


def train_alone(
    name: str, world: int, unused: bool = False, accumulate: int = 1, amp: bool = False
) -> Dict[str, Any]:
    """Do the same in one process, with plain torch."""
    accelerator = set_current_accelerator(resolve_accelerator(name))
    device = accelerator.device(0)
    model = Model(unused).to(device)
    parameters = list(model.layers.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    sums: List[Any] = [None] * world
    for step in range(STEPS):
        for rank in range(world):
            for index, parameter in enumerate(parameters):
                parameter.grad = sums[rank] and sums[rank][index]
            with accelerator.autocast(torch.bfloat16) if amp else nullcontext():
                loss = model(batch(rank, step).to(device))['loss']
            (loss / accumulate).backward()
            sums[rank] = [parameter.grad for parameter in parameters]
        if (step + 1) % accumulate == 0:
            for index, parameter in enumerate(parameters):
                parameter.grad = along_the_tree([each[index] for each in sums]) / world
            optimizer.step()
            sums = [None] * world
    return weights(model)


@MODELS.register_module(force=True)
class WideRegression(ToyRegression):
    """A model with enough weights that another order of adding shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 200),
            nn.ReLU(),
            nn.Linear(200, 30),
            nn.BatchNorm1d(30),
            nn.ReLU(),
            nn.Linear(30, 1),
        )


def whole_and_resumed(folder: Path, reduction: Any, options: Dict[str, Any]) -> Any:
    """Return whether a run that was resumed in the middle has the weights of a whole one."""
    changes = {
        'model.type': 'WideRegression',
        'env_cfg.reduction': reduction,
        'model_wrapper_cfg': dict(
            type='MMDistributedDataParallel', broadcast_buffers=False, **options
        ),
    }
    whole, seen = toy_train(folder / 'whole', **changes)
    if whole.rank == 0:
        (folder / 'rest').mkdir(exist_ok=True)
        shutil.copy(str(folder / 'whole' / 'iter_4.pth'), str(folder / 'rest'))
    rest, left = toy_train(folder / 'rest', resume='must', **changes)
    return (
        rest.iter == 8 and seen.losses[4:] == left.losses,
        same_weights(
            dict(whole.model.module.named_parameters()), dict(rest.model.module.named_parameters())
        ),
    )


def lose_rank_1() -> str:
    """Return the error of a rank whose neighbor dies before the second backward pass."""
    accelerator = set_current_accelerator(resolve_accelerator('cpu'))
    init_process_group(accelerator, timeout=30)
    try:
        with lost_ranks_named('training'):
            model = MMDistributedDataParallel(Model(False))
            for step in range(2):
                if step and dist.get_rank() == 1:
                    os._exit(1)
                model(batch(0, step), mode='loss')['loss'].backward()
    except RankLostError as error:
        return str(error)
    return 'no error'


def run_scenarios(folder: Path) -> Dict[Any, Any]:
    scenarios: Dict[Any, Any] = {
        ('sum', *each): (differing_sums, each[1], *each) for each in WORLDS
    }
    for name, options in OPTIONS.items():
        scenarios['ranks', name] = (train_as_ranks, 3, 'cpu', options)
    scenarios['alone'] = (train_alone, 1, 'cpu', 3)
    scenarios['alone', 'unused'] = (train_alone, 1, 'cpu', 3, True)
    scenarios['ranks', 'native'] = (train_as_ranks, 3, 'cpu', dict(SMALL, reduction='native'))
    scenarios['ranks', 'accumulated'] = (train_as_ranks, 5, 'cpu', SMALL, 2)
    scenarios['alone', 'accumulated'] = (train_alone, 1, 'cpu', 5, False, 2)
    if HAS_AUTOCAST:
        scenarios['ranks', 'amp'] = (train_as_ranks, 3, 'cpu', SMALL, 1, True)
        scenarios['alone', 'amp'] = (train_alone, 1, 'cpu', 3, False, 1, True)
    if SIM is None:
        scenarios['sum', 8, 3, 'sim'] = differing_sums, 3, 8, 3, 'sim'
        scenarios['ranks', 'sim'] = (train_as_ranks, 3, 'sim', SMALL)
        scenarios['alone', 'sim'] = (train_alone, 1, 'sim', 3)
    scenarios['lost'] = (lose_rank_1, 3)
    for reduction in (None, 'native'):
        scenarios['resumed', reduction] = (
            whole_and_resumed,
            3,
            folder / f'resumed {reduction}',
            reduction,
            SMALL,
        )
    return fork_scenarios(scenarios, folder)


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('ordered'))


@pytest.mark.parametrize(
    'world',
    [
        *WORLDS,
        pytest.param((8, 3, 'sim'), marks=pytest.mark.skipif(SIM is not None, reason=str(SIM))),
    ],
)
def test_a_sum_has_the_bits_of_the_tree(world: Any, answers: Answers) -> None:
    assert answers.of(('sum', *world)) == [[]] * world[1]


@pytest.mark.parametrize(
    'name, alone',
    [
        ('plain', 'alone'),
        ('one bucket', 'alone'),
        ('views', 'alone'),
        ('unused', ('alone', 'unused')),
        ('accumulated', ('alone', 'accumulated')),
        pytest.param(
            'amp',
            ('alone', 'amp'),
            marks=pytest.mark.skipif(
                not HAS_AUTOCAST, reason='torch 1.10 has no bfloat16 autocast for the linear layers'
            ),
        ),
        pytest.param(
            'sim', ('alone', 'sim'), marks=pytest.mark.skipif(SIM is not None, reason=str(SIM))
        ),
    ],
)
def test_ranks_train_as_one_process(name: str, alone: Any, answers: Answers) -> None:
    [want] = answers.of(alone)
    for got, default in answers.of(('ranks', name)):
        assert got == want
        assert default == 'ordered'


def test_the_native_sum_has_other_bits(answers: Answers) -> None:
    """Else the tests above would pass with any order."""
    [want] = answers.of('alone')
    assert all(got != want for got, _ in answers.of(('ranks', 'native')))


def test_a_rank_that_is_lost_is_named(answers: Answers) -> None:
    first, lost, last = answers.of('lost')
    assert lost == DIED
    for told in (first, last):
        assert ') [1] did not come' in told or ') [1, 0] did not come' in told  # 0 fails and leaves
        assert 'Rank 1 on host ' in told


def test_a_resumed_run_has_the_bits_of_a_whole_one(answers: Answers) -> None:
    """DDP lays its buckets out again after the first step, of a resumed run as well."""
    assert answers.of(('resumed', None)) == [(True, True)] * 3
    assert answers.of(('resumed', 'native')) != [(True, True)] * 3
