"""Whole runs on a user's data: a hook that changes it, a split without labels, and a resume."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Dict, List

import cv2
import numpy as np
import pytest
import torch
from geo_scenes import write_raster
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, TRANSFORMS
from support import write_tiny_config, write_tiny_data

from mapsage.engine import MapSageRunner
from mapsage.engine.loading.data_checks import DataError

PACK = dict(type='PackSegInputs')


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tiny_data(tmp_path / 'data', train=4, val=2, size=32)


def build(work: Path, data: Path, **changes: Any) -> MapSageRunner:
    cfg = Config.fromfile(str(write_tiny_config(work.parent / 'tiny.py', data)))
    cfg.merge_from_dict(
        dict(
            {
                'work_dir': str(work),
                'env_cfg.accelerator': 'cpu',
                'train_cfg.max_iters': 4,
                'train_cfg.val_interval': 4,
                'default_hooks.checkpoint.interval': 2,
                'experiment_name': f'{work.name}{time.time_ns()}',
            },
            **changes,
        )
    )
    return MapSageRunner.from_cfg(cfg)


@TRANSFORMS.register_module()
class White:
    """Makes every image white."""

    def __call__(self, results: dict) -> dict:
        results['img'] = np.full_like(results['img'], 255)
        return results


@HOOKS.register_module()
class LatePipeline(Hook):
    """Switches the augmentation off for the last steps, as a close-mosaic hook does."""

    def __init__(self) -> None:
        self.seen: List[float] = []

    def before_train(self, runner: Any) -> None:
        dataset = runner.train_loop.dataloader.dataset
        *before, pack = dataset.pipeline.transforms
        dataset.pipeline = Compose([*before, dict(type='White'), pack])

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.seen += [float(image.float().mean()) for image in data_batch['inputs']]


def test_a_hook_that_changes_the_pipeline_changes_what_is_trained_on(
    data: Path, tmp_path: Path
) -> None:
    runner = build(tmp_path / 'work', data, custom_hooks=[dict(type='LatePipeline')])
    runner.train()
    hook = next(hook for hook in runner.hooks if isinstance(hook, LatePipeline))
    assert hook.seen == [255.0] * 8


def test_a_head_with_fewer_classes_than_the_data_is_named_before_the_first_step(
    data: Path, tmp_path: Path
) -> None:
    runner = build(tmp_path / 'work', data, **{'model.decode_head.num_classes': 6})
    with pytest.raises(
        DataError,
        match=r'model.decode_head \(FCNHead\) has num_classes=6, and '
        r'LoveDADataset has 7 classes \(background.*set num_classes=7',
    ):
        runner.train()


@pytest.mark.parametrize('metric', ['IoUMetric', 'ConfusionMatrixMetric'])
@pytest.mark.parametrize(
    'prefix',
    [
        dict(img_path='img_dir/val'),
        dict(img_path='img_dir/val', seg_map_path='ann_dir/val'),
        dict(img_path='img_dir/val', seg_map_path=''),
    ],
)
def test_a_split_without_labels_is_tested_with_format_only(
    metric: str, prefix: Dict[str, str], data: Path, tmp_path: Path
) -> None:
    shutil.rmtree(str(data / 'ann_dir' / 'val'))
    cfg = Config.fromfile(str(write_tiny_config(tmp_path / 'tiny.py', data)))
    dataset = dict(
        cfg.test_dataloader.dataset,
        data_prefix=dict(prefix, _delete_=True),
        pipeline=[dict(type='LoadImageFromFile'), PACK],
    )
    runner = build(
        tmp_path / 'work',
        data,
        test_dataloader=dict(cfg.test_dataloader, dataset=dataset),
        test_evaluator=dict(type=metric, format_only=True, output_dir=str(tmp_path / 'masks')),
    )
    runner.test()
    assert sorted(path.name for path in (tmp_path / 'masks').iterdir()) == ['0.png', '1.png']
    assert cv2.imread(str(tmp_path / 'masks' / '0.png'), cv2.IMREAD_UNCHANGED).shape == (32, 32)


def test_one_cycle_and_nested_metainfo_come_back_on_resume(data: Path, tmp_path: Path) -> None:
    changes: Dict[str, Any] = {
        'param_scheduler': [dict(type='OneCycleLR', eta_max=0.1, total_steps=4, by_epoch=False)],
        'train_dataloader.dataset.metainfo': dict(sensor=dict(name='S2', gains=[1.5, dict(b=2)])),
    }
    whole = build(tmp_path / 'whole', data, **changes)
    whole.train()
    (tmp_path / 'whole' / 'iter_4.pth').unlink()
    (tmp_path / 'whole' / 'last_checkpoint').write_text(str(tmp_path / 'whole' / 'iter_2.pth'))
    resumed = build(tmp_path / 'whole', data, resume=True, **changes)
    resumed.train()
    assert resumed.iter == 4
    for one, other in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    'loop, wrapped, mirrored',
    [('val', False, False), ('val', True, False), ('test', False, False), ('test', True, True)],
)
def test_windows_that_overlap_are_scored_once(
    loop: str, wrapped: bool, mirrored: bool, data: Path, tmp_path: Path
) -> None:
    place = dict(crs=None, transform=None)
    write_raster(tmp_path / 'scene.tif', np.zeros((3, 45, 50), 'uint8'), place)
    write_raster(tmp_path / 'labels.tif', np.ones((45, 50), 'uint8'), place)
    cfg = Config.fromfile(str(write_tiny_config(tmp_path / 'tiny.py', data)))
    dataset = dict(
        type='GeoTiffDataset',
        data_root=str(tmp_path),
        scenes='scene.tif',
        window=32,
        labels='labels.tif',
        stride=8,
        metainfo=dict(classes=list('abcdefg'), palette=[[i] * 3 for i in range(7)]),
        pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'), PACK],
    )
    changes = {}
    if mirrored:
        load, labels, pack = dataset['pipeline']
        dataset['pipeline'] = [
            load,
            dict(
                type='TestTimeAug',
                transforms=[
                    [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)],
                    [labels],
                    [pack],
                ],
            ),
        ]
        changes['model'] = dict(_delete_=True, type='SegTTAModel', module=cfg.model)
    if wrapped:
        dataset = dict(type='ConcatDataset', datasets=[dataset])
    runner = build(
        tmp_path / 'work',
        data,
        **{
            f'{loop}_dataloader': dict(cfg.test_dataloader, dataset=dict(dataset, _delete_=True)),
            f'{loop}_evaluator': dict(type='ConfusionMatrixMetric'),
            **changes,
        },
    )
    getattr(runner, loop)()
    metric = getattr(runner, f'{loop}_loop').evaluator.metrics[0]
    assert metric.matrix.sum() == 45 * 50
