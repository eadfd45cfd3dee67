"""Batches reach the card as bytes from pinned memory while the host continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch
from cards import TEST_CODE, launch_on_cards, logged
from mmengine.dataset import pseudo_collate
from mmseg.registry import MODELS
from small_segmentors import SIDE, batch
from support import check_finished, write_tiny_config
from torch.utils.data import DataLoader
from transfers import Transfers

from mapsage.engine.loading.keyed_loader import KeyedLoader

SHORT = """
custom_imports = dict(imports=['mapsage', 'transfers'])
custom_hooks = [dict(type='TransfersOfBatches')]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=3, val_interval=9)
default_hooks['preview'] = None
"""


def preprocessed(pin_memory: bool, narrow: bool) -> Tuple[List[Tuple[torch.dtype, bool]], Any]:
    samples = [
        dict(inputs=image, data_samples=sample)
        for image, sample in zip(*(batch()[name] for name in ('inputs', 'data_samples')))
    ]
    loader: Any = KeyedLoader(
        DataLoader(
            samples,
            batch_size=2,
            collate_fn=pseudo_collate,  # type: ignore[arg-type]
            pin_memory=pin_memory,
        ),
        lambda *_: None,
        lambda *_: _[-1],
    )
    loader.samples.narrow = narrow
    preprocessor = MODELS.build(dict(type='SegDataPreProcessor', size=(SIDE, SIDE))).to('cuda')
    data = next(iter(loader))
    with Transfers() as transfers:
        return transfers.copies, preprocessor(data, True)


@pytest.mark.parametrize('narrow', [True, False])
@pytest.mark.parametrize('pin_memory', [True, False])
def test_images_and_labels(pin_memory: bool, narrow: bool) -> None:
    copies, moved = preprocessed(pin_memory, narrow)
    waits = not pin_memory
    labels = torch.uint8 if narrow else torch.int64
    assert copies == [(torch.uint8, waits)] * 2 + [(labels, waits)] * 2
    torch.cuda.synchronize()
    expected = batch()
    assert torch.equal(moved['inputs'].cpu(), torch.stack(expected['inputs']).float())
    for sample, original in zip(moved['data_samples'], expected['data_samples']):
        assert sample.gt_sem_seg.data.is_cuda and sample.gt_sem_seg.data.dtype == torch.int64
        assert torch.equal(sample.gt_sem_seg.data.cpu(), original.gt_sem_seg.data)
        assert sample.img_shape == original.img_shape


@pytest.mark.parametrize('workers', [0, 2])
def test_no_copy_of_a_batch_makes_a_training_wait(
    tiny_data: Path, tmp_path: Path, workers: int
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    losses = []
    for pinned in (True, False):
        work, report = tmp_path / str(pinned), tmp_path / f'{pinned}.json'
        settings = [
            f'train_dataloader.num_workers={workers}',
            'train_dataloader.persistent_workers=False',
        ]
        check_finished(
            launch_on_cards(
                config,
                '--work-dir',
                work,
                '--cfg-options',
                *settings,
                *([] if pinned else ['train_dataloader.pin_memory=False']),
                cards=1,
                environ={
                    'MAPSAGE_TEST_TRANSFERS': str(report),
                    'PYTHONPATH': f'{Path(__file__).parent}:{TEST_CODE}',
                },
            )
        )
        seen = json.loads(report.read_text())
        assert len(seen['copies']) >= 3 * 2
        assert {tuple(copy) for copy in seen['copies']} == {('torch.uint8', not pinned)}
        assert set(seen['labels']) == {'torch.int64'}
        losses.append(logged(work))
    assert len(losses[0]) == 3 and losses[0] == losses[1]
