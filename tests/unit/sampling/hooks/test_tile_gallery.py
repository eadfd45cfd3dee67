"""Pictures of the windows of scenes that dynamic sampling kept and dropped, in a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from geotiff_data import METAINFO, build_dataset, write_scene
from label_pairs import data_sample
from mmengine.config import Config
from support import write_tiny_config

from mapsage.engine import MapSageRunner
from mapsage.pictures.tiles import display_rgb
from mapsage.sampling.hooks.sampling_report import SIDE, TileGallery
from mapsage.sampling.pool import Candidate

pytestmark = pytest.mark.usefixtures('own_environment')

CONFIG = """
train_dataloader['dataset'] = dict(
    type='GeoTiffDataset', data_root={root!r}, scenes='scenes', labels='labels', window=96,
    stride=48, bands=[1, 2, 3, 4], metainfo={metainfo!r}, pipeline=[
        dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'), dict(type='PackSegInputs')])
model['data_preprocessor'] = dict(
    type='BandDataPreProcessor', mean=[90.] * 4, std=[40.] * 4, size=(96, 96), seg_pad_val=255)
model['backbone'] = dict(
    type='DINOv3ViT', in_channels=4, out_indices=(0, ),
    arch=dict(embed_dims=12, num_layers=1, num_heads=3, feedforward_channels=12))
model['decode_head'].update(in_channels=12, in_index=0, num_classes=3)
train_cfg.update(max_iters=4)
val_dataloader = val_cfg = val_evaluator = None
custom_hooks = [dict(type='DynamicSamplingHook', score=dict(type='LabelScore'),
                     validity=dict(low=1e-9))]
"""


@pytest.mark.parametrize(
    'kind, bands, channels',
    [
        ('uint8', None, [0, 1, 2]),
        ('uint16', dict(rgb=(2, 1, 0)), [2, 1, 0]),
        ('float32', dict(rgb=(3, 1, 2)), [3, 1, 2]),
    ],
)
def test_windows_of_four_bands_are_shown(
    kind: str, bands: Any, channels: Any, tmp_path: Path
) -> None:
    write_scene(tmp_path, bands=4, values=kind)
    cfg = Config.fromfile(
        str(
            write_tiny_config(
                tmp_path / 'scenes.py',
                tmp_path,
                CONFIG.format(root=str(tmp_path), metainfo=METAINFO),
            )
        )
    )
    cfg.merge_from_dict(
        {
            'env_cfg.accelerator': 'cpu',
            'work_dir': str(tmp_path / 'work'),
            'launcher': 'none',
            'experiment_name': tmp_path.name,
            'model.backbone.bands': bands,
        }
    )
    MapSageRunner.from_cfg(cfg).train()
    expected: Dict[bytes, np.ndarray] = {}
    for sample in build_dataset(tmp_path, window=96, stride=48, bands=[1, 2, 3, 4]):
        picture = display_rgb(sample['inputs'].numpy()[channels].transpose(1, 2, 0))
        expected[picture.tobytes()] = sample['data_samples'].gt_sem_seg.data[0].numpy()
    with np.load(str(tmp_path / 'work/dynamic_sampling/tiles.npz')) as tiles:
        for kind_of_tile, classes in (('kept', 2), ('dropped', 1)):
            images, labels = (tiles[f'{kind_of_tile}_{name}'] for name in ('images', 'labels'))
            assert len(images) >= 1
            for image, label in zip(images, labels):
                found = expected.get(image.tobytes())
                assert found is not None and (label == found).all()
                assert min(len(np.unique(label)), 2) == classes


def test_around_a_small_tile_nothing_is_labeled(tmp_path: Path) -> None:
    gallery = TileGallery()
    labels = torch.ones(10, 12, dtype=torch.uint8)
    sample = dict(
        inputs=torch.full((3, 10, 12), 9, dtype=torch.uint8),
        data_samples=data_sample(labels, labels),
    )
    gallery.add(Candidate(sample, score=0.5), '', 1)
    gallery.save(tmp_path / 'tiles.npz', ['a', 'b'], [[0] * 3, [9] * 3])
    with np.load(str(tmp_path / 'tiles.npz')) as tiles:
        [kept] = tiles['kept_labels']
    expected = np.full((SIDE, SIDE), 255)
    expected[43:53, 42:54] = 1
    np.testing.assert_array_equal(kept, expected)
