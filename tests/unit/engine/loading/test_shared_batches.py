"""Batches of workers travel in blocks of shared memory, and arrive as the collate function made them."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset, RepeatDataset, pseudo_collate
from mmengine.structures import PixelData
from mmseg.datasets import BaseSegDataset
from mmseg.structures import SegDataSample
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from mapsage.datasets import packing
from mapsage.datasets.byte_labels import ByteLabels
from mapsage.engine.loading import shared_batches
from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage.engine.loading.shared_batches import SharedCollate


def keyed(dataset: Any, batch_size: int = 2, workers: int = 2, **settings: Any) -> Any:
    settings.setdefault('collate_fn', partial(pseudo_collate))
    return KeyedLoader(
        DataLoader(dataset, batch_size, num_workers=workers, **settings),
        lambda *_: None,
        lambda *_: _[-1],
    )


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for item, counterpart in zip(one, other):
            assert_equal(item, counterpart)
    elif hasattr(one, 'all_items'):
        assert_equal(sorted(one.metainfo.items()), sorted(other.metainfo.items()))
        assert_equal(dict(one.items()), dict(other.items()))
    else:
        assert one == other


class Odd(Dataset):
    """Samples of all kinds: sizes that differ, 16 bits, edge maps, views, other types."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        side = 5 + index
        image = torch.randint(0, 256, (4, side, side + 1), generator=draw)
        sample = SegDataSample(
            gt_sem_seg=PixelData(data=torch.randint(-3, 300, (1, side, side + 1), generator=draw)),
            gt_edge_map=PixelData(data=image[:1].to(torch.uint8)),
        )
        sample.set_metainfo(dict(img_path='影像/é.tif', flip=None, ori_shape=(side, side + 1)))
        sixteen = image.numpy().astype(np.int16)
        twice = torch.rand(3, generator=draw)
        return dict(
            inputs=image.to(torch.uint8) if index % 2 else torch.from_numpy(sixteen),
            data_samples=sample,
            twice=[twice, twice],
            turned=image.permute(1, 2, 0)[::2],
            flags=image > 100,
            half=torch.rand(2, 3, generator=draw).half(),
            empty=torch.zeros(0, 3),
            number=torch.tensor(index),
            complex=torch.tensor([1j * index]),
            weights=torch.ones(2, requires_grad=True),
            array=sixteen,
            name=f'sample {index}',
        )


@pytest.mark.parametrize('pinned', [False, True])
def test_every_batch_arrives_as_it_was_made(monkeypatch: Any, pinned: bool) -> None:
    if pinned:
        monkeypatch.setattr(
            shared_batches.SharedBatch, 'unpack', _unpack_from_a_copy(shared_batches.SharedBatch)
        )
    expected = list(keyed(Odd(), workers=0))
    # All batches are kept, so no block may be used twice.
    batches = list(keyed(Odd()))
    gc.collect()
    assert len(batches) == 4
    for batch, original in zip(batches, expected):
        assert_equal(batch, original)
        assert batch['twice'][0][0] is batch['twice'][1][0]


def _unpack_from_a_copy(kind: Any) -> Any:
    """As the loader does with pinned memory: the batch leaves its block before it is unpacked."""
    original = kind.unpack

    def unpack(batch: Any) -> Any:
        return original(kind(batch.memory.clone(), batch._pickled))

    return unpack


class Large(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Dict[str, Any]:
        return dict(inputs=torch.full((3, 64, 64), index % 256, dtype=torch.uint8))


def inode(tensor: torch.Tensor) -> int:
    """Return the number of the shared memory in which a tensor lies."""
    address = tensor.data_ptr()
    with open('/proc/self/maps') as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split('-'))
            if begin <= address < end:
                return int(line.split()[4])
    raise AssertionError('the tensor lies nowhere')


def test_a_worker_fills_few_blocks_in_turn() -> None:
    blocks = set()
    for number, batch in enumerate(keyed(Large(), workers=1, prefetch_factor=2)):
        assert [int(image.max()) for image in batch['inputs']] == [2 * number, 2 * number + 1]
        blocks.add(inode(batch['inputs'][0]))
        del batch
    assert 0 not in blocks
    # Two batches ahead, one in the loop, and one whose end the worker has not seen yet.
    assert len(blocks) <= 4


def test_what_the_rank_keeps_is_not_overwritten() -> None:
    kept = []
    for batch in keyed(Large(), workers=1):
        # A view of a view, without the batch.
        kept.append(batch['inputs'][1][0, 3])
        del batch
    assert [int(row.min()) for row in kept] == list(range(1, 24, 2))
    assert [int(row.max()) for row in kept] == list(range(1, 24, 2))


def test_a_forked_process_frees_nothing() -> None:
    memory = torch.ones(80, dtype=torch.uint8).share_memory_()
    batch = shared_batches._receive(memory, b'')
    pid = os.fork()
    if not pid:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(memory[0]) == 1
    del batch
    assert int(memory[0]) == 0


def as_candidates(samples: List[Any]) -> List[Any]:
    return samples


def test_the_batches_of_another_collate_function_travel_as_torch_sends_them() -> None:
    assert SharedCollate.around(as_candidates) is as_candidates
    (first, *_) = keyed(Large(), workers=1, collate_fn=as_candidates)
    assert inode(first[0]['inputs']) != inode(first[1]['inputs'])


class Packed(BaseSegDataset):
    METAINFO = dict(classes=('a', 'b'), palette=[[0] * 3, [9] * 3])

    def __init__(self) -> None:
        super().__init__(lazy_init=True, pipeline=[dict(type=packing.PackSegInputs)])
        self._fully_initialized = True

    def load_data_list(self) -> List[Dict[str, Any]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return 4

    def get_data_info(self, idx: int) -> Dict[str, Any]:
        return dict(
            img=np.full((6, 5, 3), idx, np.uint8),
            gt_seg_map=np.full((6, 5), idx % 2, np.uint8)[:, ::-1],
            seg_fields=['gt_seg_map'],
        )


class Shifted(Packed):
    """A user's subclass that computes with int64 labels."""

    def prepare_data(self, idx: int) -> Any:
        sample = super().prepare_data(idx)
        sample['data_samples'].gt_sem_seg.data.sub_(300)
        return sample


class Wrapper(Dataset):
    """A user's wrapper that computes with int64 labels."""

    def __init__(self) -> None:
        self.dataset = Packed()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        sample['data_samples'].gt_sem_seg.data.sub_(300)
        return sample


@pytest.mark.parametrize(
    'build',
    [
        Packed,
        lambda: RepeatDataset(Packed(), 2),
        lambda: ConcatDataset([Packed(), RepeatDataset(Packed(), 1)]),
        Shifted,
        Wrapper,
    ],
)
@pytest.mark.parametrize('narrow', [False, True])
def test_the_loop_gets_the_labels_of_the_host(build: Any, narrow: bool) -> None:
    dataset = build()
    loaders = [keyed(dataset, workers=workers) for workers in (0, 1)]
    for loader in loaders:
        loader.samples.narrow = narrow
    for one, other in zip(*loaders):
        assert_equal(other, one)
        changed = int(one['data_samples'][0].gt_sem_seg.data.min()) < 0
        kind = ByteLabels if narrow and not changed else PixelData
        assert {type(sample.gt_sem_seg) for sample in other['data_samples']} == {kind}
    # The dataset of the rank is not touched.
    assert not any(packer.keeps_bytes for packer in packing.last_packers(dataset))


def test_labels_stay_bytes_only_where_nobody_computes_with_them() -> None:
    counts = [
        len(packing.last_packers(dataset))
        for dataset in (
            Packed(),
            ConcatDataset([Packed(), RepeatDataset(Packed(), 1)]),
            Shifted(),
            Wrapper(),
            ConcatDataset([Packed(), Wrapper()]),
            Large(),
            [],
        )
    ]
    assert counts == [1, 2, 0, 0, 1, 0, 0]
    assert BaseDataset.prepare_data.__module__.startswith('mmengine')
