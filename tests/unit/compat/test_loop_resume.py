"""A resumed loop loads what an uninterrupted one would have loaded next, and nothing else."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import IterBasedTrainLoop, Runner, loops
from torch.utils.data import DataLoader, Dataset

from mapsage.engine.loading.data_order import ResumableSampler


class Recorded(Dataset):
    metainfo: Dict[str, Any] = {}

    def __init__(self) -> None:
        self.loaded: List[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        self.loaded.append(int(index))
        return dict(inputs=torch.tensor(float(index)))


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: List[List[float]] = []

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'loss') -> Any:
        self.seen.append([float(x) for x in inputs])
        return dict(loss=self.weight.sum())


def loader(dataset: Dataset, resumable: bool) -> DataLoader:
    sampler: Any = torch.utils.data.SequentialSampler(dataset)
    if resumable:
        sampler = ResumableSampler(sampler, 0, 0, 1, 2)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


def run(folder: Any, start: int, resumable: bool, monkeypatch: Any) -> Any:
    monkeypatch.setattr(loops.time, 'sleep', lambda _: None)  # two seconds an epoch
    dataset, model = Recorded(), Model()
    runner = Runner(
        model,
        str(folder),
        train_dataloader=loader(dataset, resumable),
        train_cfg=dict(by_epoch=False, max_iters=8),
        experiment_name=f'{start}{resumable}',
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_scope='mmengine',
        log_level='ERROR',
    )
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    assert isinstance(runner.train_loop, IterBasedTrainLoop) and dataset.loaded == []
    runner.train_loop._iter = start
    runner.train()
    return model.seen, dataset.loaded


@pytest.mark.parametrize('resumable', [True, False])
@pytest.mark.parametrize('start', [0, 3, 7])
def test_resumed_loop(tmp_path: Any, start: int, resumable: bool, monkeypatch: Any) -> None:
    whole, _ = run(tmp_path / 'whole', 0, resumable, monkeypatch)
    rest, loaded = run(tmp_path / 'rest', start, resumable, monkeypatch)
    assert rest == whole[start:] and len(whole) == 8
    if resumable:
        assert len(loaded) == 2 * (8 - start)
