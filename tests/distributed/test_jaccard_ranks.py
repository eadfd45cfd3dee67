"""The gradients of losses that count the global batch are those of one process, over real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from label_pairs import data_sample
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper as AnyOptimWrapper
from mmengine.registry import DATASETS, MODELS
from sampling_ranks import Answers, answers_of, start
from torch import nn
from toy_runs import toy_train

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.distributed.wrappers import (
    AmpOptimWrapper,
    MMDistributedDataParallel,
    OptimWrapper,
    VirtualDataParallel,
)
from mapsage.distributed.wrappers.rank_batches import pack_rank_batches
from mapsage.models.losses import CenterlineDiceLoss, JaccardLoss

SIDE = 10
SIZES = {3: (1, 3, 2), 5: (2, 1, 3, 1, 2)}  # images of each rank; rank 1 has no label at all


@MODELS.register_module(force=True)
class JaccardToy(BaseModel):
    """A convolution with its loss; ``state`` adds dropout, batch statistics and a third loss."""

    def __init__(self, state: bool = False, forgetful: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.more = nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.2)) if state else nn.Sequential()
        self.losses = nn.ModuleList(
            [JaccardLoss(band_weight=0.5, dilation_ratio=0.07), CenterlineDiceLoss(iterations=3)]
        )
        if state:
            self.losses.append(JaccardLoss(class_weight=[1, 2, 0, 4]))
        self.forgetful, self.calls = forgetful, 0

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        images = torch.stack(list(inputs)) if isinstance(inputs, (list, tuple)) else inputs
        logits = self.more(self.convolution(images))
        if mode != 'loss':
            return data_samples
        self.calls += 1
        if self.forgetful:
            logits = logits * self.calls
        labels = torch.stack([each.gt_sem_seg.data[0] for each in data_samples])
        return {f'loss_{place}': loss(logits, labels) for place, loss in enumerate(self.losses)}


@DATASETS.register_module(force=True)
class JaccardTiles(torch.utils.data.Dataset):
    metainfo = dict(classes=('a', 'b', 'c', 'd'))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Dict[str, Any]:
        return tile(int(index), nothing=index % 7 == 0)


def tile(number: int, nothing: bool = False) -> Dict[str, Any]:
    """Return an image and labels; class 3 is in every fourth tile alone."""
    generator = torch.Generator().manual_seed(number)
    coarse = torch.randint(0, 4 if number % 4 == 0 else 3, (4, 4), generator=generator)
    labels = coarse.repeat_interleave(3, 0).repeat_interleave(3, 1)[:SIDE, :SIDE].clone()
    labels[torch.rand(SIDE, SIDE, generator=generator) < 0.2] = 255
    if nothing:
        labels[:] = 255
    image = torch.randn(3, SIDE, SIDE, generator=generator) + (labels == 2) + number % 3
    sample = data_sample(labels, labels)
    sample.set_metainfo(dict(number=number))
    return dict(inputs=image, data_samples=sample)


def parts_of(ranks: int, step: int) -> List[Dict[str, Any]]:
    """Return the batch of each rank."""
    first = step * 20
    batches = []
    for rank, size in enumerate(SIZES[ranks]):
        tiles = [tile(first + place, nothing=rank == 1) for place in range(size)]
        first += size
        batches.append(joined(tiles))
    return batches


def joined(tiles: Any) -> Dict[str, Any]:
    return {key: [each[key] for each in tiles] for key in ('inputs', 'data_samples')}


def wrapper_of(model: nn.Module, kind: str) -> AnyOptimWrapper:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper: Any = (
        AmpOptimWrapper(dtype='bfloat16', optimizer=optimizer)
        if kind == 'amp'
        else OptimWrapper(optimizer, accumulative_counts=2 if kind == 'accumulated' else 1)
    )
    wrapper.initialize_count_status(model, 0, 2)
    return wrapper


def weights_after(model: Any, steps: List[Any], kind: str) -> List[float]:
    torch.set_num_threads(1)
    wrapper = wrapper_of(model, kind)
    for batch in steps:
        model.train_step(batch, wrapper)
    inner = getattr(model, 'module', model)
    return [float(each) for value in inner.parameters() for each in value.detach().reshape(-1)]


def on_ranks(kind: str) -> List[float]:
    rank = start()
    set_current_accelerator(resolve_accelerator('cpu'))
    world = dist.get_world_size()
    return weights_after(
        MMDistributedDataParallel(JaccardToy()),
        [parts_of(world, step)[rank] for step in range(2)],
        kind,
    )


def whole(ranks: int, kind: str) -> List[float]:
    batches = [
        {
            key: sum((each[key] for each in parts_of(ranks, step)), [])
            for key in ('inputs', 'data_samples')
        }
        for step in range(2)
    ]
    return weights_after(JaccardToy(), batches, kind)


def in_turns(processes: int, ranks: int, kind: str) -> List[float]:
    """Several virtual ranks in each process."""
    rank = start() if processes > 1 else 0
    set_current_accelerator(resolve_accelerator('cpu'))
    virtual = VirtualRanks(ranks, processes)
    model = VirtualDataParallel(JaccardToy(), virtual)
    steps = [[parts_of(ranks, step)[each] for each in virtual.block(rank)] for step in range(2)]
    return weights_after(model, [pack_rank_batches(batches) for batches in steps], kind)


def trained(folder: Path, processes: int) -> Any:
    """Return losses and weights of a run with random numbers and running statistics."""
    if processes == 1:
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)
    torch.set_num_threads(1)
    runner, record = toy_train(
        folder,
        **{
            'env_cfg.virtual_ranks': 5,
            'env_cfg.reduction': 'ordered',
            'model': dict(type='JaccardToy', state=True, _delete_=True),
            'train_dataloader.dataset': dict(type='JaccardTiles', _delete_=True),
            'val_dataloader': None,
            'val_evaluator': None,
            'val_cfg': None,
            'test_dataloader': None,
            'test_evaluator': None,
            'test_cfg': None,
            'optim_wrapper.accumulative_counts': 2,
            # EMAHook copies the model with its losses.
            'train_cfg': dict(by_epoch=False, max_iters=5),
            'custom_hooks': [dict(type='EMAHook')],
        },
    )
    state = getattr(runner.model, 'module', runner.model).state_dict()
    return record.losses, {name: value.tolist() for name, value in state.items()}


def forgetful() -> str:
    """Return the error of a model that is another one in the second pass."""
    set_current_accelerator(resolve_accelerator('cpu'))
    model = VirtualDataParallel(JaccardToy(forgetful=True), VirtualRanks(3, 1))
    try:
        model.train_step(pack_rank_batches(parts_of(3, 0)), wrapper_of(model, ''))
    except VirtualRanksError as error:
        return str(error)
    return ''


CASES = ((3, 'plain'), (5, 'accumulated'), (5, 'amp'))


def run_scenarios(folder: Path) -> Dict[str, Any]:
    scenarios: Dict[str, Any] = {'forgetful': (forgetful, 1)}
    for ranks, kind in CASES:
        scenarios[f'{ranks} {kind}'] = on_ranks, ranks, kind
        scenarios[f'whole of {ranks} {kind}'] = whole, 1, ranks, kind
    scenarios['5 in 2'] = in_turns, 2, 2, 5, 'accumulated'
    scenarios['3 in 1'] = in_turns, 1, 1, 3, 'plain'
    for processes in (1, 3, 5):
        scenarios[f'run of {processes}'] = trained, processes, folder / str(processes), processes
    return fork_scenarios(scenarios, folder / 'forked')


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('jaccard'))


def start_weights() -> List[float]:
    return [
        float(each) for value in JaccardToy().parameters() for each in value.detach().reshape(-1)
    ]


@pytest.mark.parametrize(('ranks', 'kind'), CASES)
def test_uneven_ranks_train_as_one_process_does(ranks: int, kind: str, answers: Answers) -> None:
    """Rank 1 has no label; class 3 is on one rank alone, and on none in a step of three ranks."""
    expected = torch.tensor(answers.of(f'whole of {ranks} {kind}')[0])
    moved = expected - torch.tensor(start_weights())
    assert float(moved.abs().max()) > 1e-2
    for weights in answers.of(f'{ranks} {kind}'):
        found = torch.tensor(weights) - torch.tensor(start_weights())
        # bfloat16 has 8 bits, and rounds the gradients of the parts and not of the whole
        tolerance = (3e-2 if kind == 'amp' else 1e-4) * float(moved.abs().max())
        torch.testing.assert_close(found, moved, rtol=0, atol=tolerance)


def test_virtual_ranks_in_turn_train_as_one_process_does(answers: Answers) -> None:
    for name, of in (('3 in 1', 'whole of 3 plain'), ('5 in 2', 'whole of 5 accumulated')):
        for weights in answers.of(name):
            assert weights == pytest.approx(answers.of(of)[0], abs=1e-5)


def test_the_same_bits_with_and_without_a_first_pass(answers: Answers) -> None:
    """Dropout, running statistics, two losses, accumulation; five virtual ranks."""
    losses, weights = answers.of('run of 5')[0]  # a collective in each loss, and no first pass
    assert len(set(losses)) == 5
    for processes in (3, 1):
        other = answers.of(f'run of {processes}')[0]
        assert other[0] == losses
        assert other[1] == weights


def test_a_model_that_forgets_is_refused_by_the_second_pass(answers: Answers) -> None:
    [text] = answers.of('forgetful')
    assert 'counted something else in the second pass' in text and 'Start 3 processes' in text
