"""Label maps travel as uint8 where that loses nothing, and come back as they were packed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch.utils.data import DataLoader

from mapsage.datasets import SegDataPreProcessor
from mapsage.datasets.byte_labels import ByteLabels, narrow_labels, widen_labels
from mapsage.engine.loading.keyed_loader import KeyedLoader


def packed(labels: torch.Tensor, **fields: Any) -> dict:
    sample = SegDataSample(metainfo=dict(img_path='0.png'))
    sample.gt_sem_seg = PixelData(data=labels, **fields)
    return dict(inputs=torch.zeros(3, *labels.shape[1:], dtype=torch.uint8), data_samples=sample)


def test_all_bytes_come_back_also_from_another_process() -> None:
    labels = torch.arange(256).reshape(1, 16, 16)
    sample = narrow_labels(packed(labels))['data_samples']
    assert sample.gt_sem_seg.data.dtype == torch.uint8
    moved = pickle.loads(pickle.dumps(sample)).to('cpu')
    assert isinstance(moved.gt_sem_seg, ByteLabels)
    for widened in (widen_labels(moved), widen_labels(copy.deepcopy(sample))):
        assert type(widened.gt_sem_seg) is PixelData
        assert widened.gt_sem_seg.data.dtype == torch.int64
        assert torch.equal(widened.gt_sem_seg.data, labels) and widened.img_path == '0.png'


@pytest.mark.parametrize(
    'sample',
    [
        packed(torch.tensor([[[0, -100]]])),
        packed(torch.tensor([[[0, 256]]])),
        packed(torch.zeros(1, 0, 4, dtype=torch.int64)),
        packed(torch.zeros(1, 2, 2)),
        packed(torch.zeros(1, 2, 2, dtype=torch.uint8)),
        packed(torch.zeros(1, 1, 2, dtype=torch.int64), weights=torch.ones(1, 1, 2)),
        packed(torch.zeros(1, 1, 2, dtype=torch.int64), metainfo=dict(source='a')),
        dict(inputs=torch.zeros(3, 2, 2), data_samples=SegDataSample()),
        dict(inputs=torch.zeros(3, 2, 2)),
        (torch.zeros(3, 2, 2), 1),
    ],
)
def test_what_would_lose_something_stays(sample: Any) -> None:
    before = copy.deepcopy(sample)
    narrowed = narrow_labels(sample)
    assert narrowed is sample
    if isinstance(sample, dict) and 'gt_sem_seg' in sample.get('data_samples', ()):
        labels, original = sample['data_samples'].gt_sem_seg, before['data_samples'].gt_sem_seg
        assert type(labels) is PixelData and labels.data.dtype == original.data.dtype
        assert widen_labels(sample['data_samples']).gt_sem_seg is labels


@pytest.mark.parametrize('workers', [0, 1])
def test_the_preprocessor_gives_the_bits_of_a_loader_that_does_not_narrow(workers: int) -> None:
    batches = []
    for narrow in (False, True):
        draw = torch.Generator().manual_seed(0)
        samples: Any = [
            packed(torch.randint(0, 9, (1, 5 + n, 6), generator=draw)) for n in range(3)
        ]
        loader: Any = KeyedLoader(
            DataLoader(samples, 3, collate_fn=pseudo_collate, num_workers=workers),
            lambda *_: None,
            lambda *_: _[-1],
        )
        loader.samples.narrow = narrow
        (batch,) = loader
        dtypes = {sample.gt_sem_seg.data.dtype for sample in batch['data_samples']}
        assert dtypes == {torch.uint8 if narrow else torch.int64}
        batches.append(SegDataPreProcessor(size=(8, 8))(batch, True))
    for one, other in zip(*(batch['data_samples'] for batch in batches)):
        assert one.gt_sem_seg.data.dtype == other.gt_sem_seg.data.dtype == torch.int64
        assert torch.equal(one.gt_sem_seg.data, other.gt_sem_seg.data)
