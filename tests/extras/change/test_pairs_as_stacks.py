"""A pair of GeoTIFFs as a stack of two dates: windows of scenes, with the transforms of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import numpy as np
from geo_scenes import write_raster
from mmengine.registry import MODELS, DefaultScope

from mapsage.datasets import SceneStackDataset

SENSORS = dict(image=dict(scenes='{place}_{date}.tif', bands=[1, 2, 3], max_dates=2))
METAINFO = dict(classes=('unchanged', 'changed'), palette=[[255] * 3, [230, 25, 75]])


def write_pair(root: Path) -> Dict[str, np.ndarray]:
    """Write two dates of a town of 64 x 64 pixels, and what has changed; return the values."""
    rng = np.random.default_rng(0)
    before = rng.integers(1, 255, (3, 64, 64), np.uint8)
    after = before.copy()
    after[:, 40:, 40:] = 255 - after[:, 40:, 40:]
    changed = np.zeros((1, 64, 64), np.uint8)
    changed[:, 40:, 40:] = 1
    values = dict(town_20190614=before, town_20230702=after)
    for name, pixels in values.items():
        write_raster(root / f'{name}.tif', pixels)
    (root / 'labels').mkdir()
    write_raster(root / 'labels' / 'town.tif', changed)
    return dict(values, changed=changed[0])


def stacks(root: Path, *transforms: Dict[str, Any]) -> Any:
    pipeline: List[Dict[str, Any]] = [
        dict(type='LoadSceneStack'),
        dict(type='LoadGeoTiffLabels'),
        *transforms,
        dict(type='PackStackInputs'),
    ]
    with DefaultScope.overwrite_default_scope('mmseg'):
        return SceneStackDataset(
            sensors=SENSORS,
            window=32,
            data_root=str(root),
            labels='labels',
            metainfo=METAINFO,
            pipeline=pipeline,
        )


def test_a_window_of_two_dates_is_a_pair(tmp_path: Path) -> None:
    values = write_pair(tmp_path)
    sample = stacks(tmp_path)[3]
    inputs = sample['inputs'].numpy()
    assert (inputs[:3] == values['town_20190614'][:, 32:, 32:]).all()
    assert (inputs[3:6] == values['town_20230702'][:, 32:, 32:]).all()
    assert (sample['data_samples'].gt_sem_seg.data[0].numpy() == values['changed'][32:, 32:]).all()


def test_transforms_and_backbone_of_pairs_take_it(tmp_path: Path) -> None:
    values = write_pair(tmp_path)
    dataset = stacks(
        tmp_path,
        dict(type='ExchangeDates', prob=1.0),
        dict(type='ShiftDate', fixed=(1, 0)),
        dict(type='JitterDates', prob=0.0),
    )
    sample = dataset[3]
    inputs = sample['inputs'].numpy()
    assert (inputs[:3] == values['town_20230702'][:, 32:, 32:]).all()
    assert (inputs[3:6, :, 1:] == values['town_20190614'][:, 32:, 32:63]).all()
    with DefaultScope.overwrite_default_scope('mmseg'):
        preprocessor = MODELS.build(
            dict(
                type='StackDataPreProcessor',
                sensors=SENSORS,
                size_divisor=1,
                mean=dict(image=[127.0] * 3),
                std=dict(image=[60.0] * 3),
            )
        )
        backbone = MODELS.build(
            dict(
                type='SiameseBackbone',
                sensors=SENSORS,
                fusion='abs_diff',
                encoder=dict(type='EfficientNetLite', out_indices=(0,)),
            )
        )
    batch = preprocessor(dict(inputs=[sample['inputs']], data_samples=[sample['data_samples']]))
    (level,) = backbone(batch['inputs'])
    assert level.shape == (1, 24, 8, 8) and level.abs().sum() > 0
