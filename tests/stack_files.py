"""Small places with images of two sensors at several dates, written as GeoTIFF."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
import torch
from geo_scenes import write_raster
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, DefaultScope
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.datasets import SceneStackDataset

SENSORS: Dict[str, Dict[str, Any]] = dict(
    s2=dict(scenes='s2/{place}_{date}.tif', bands=[1, 2, 3], max_dates=3),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=[1, 2], max_dates=2),
)
METAINFO = dict(classes=('low', 'high'), palette=[[10, 10, 10], [200, 200, 0]])
PIPELINE = [dict(type=name) for name in ('LoadSceneStack', 'LoadGeoTiffLabels', 'PackStackInputs')]
DATES = ('20240115', '20240420', '20240720')
SIZE = 64


def grid(place: int = 0, side: float = 10.0, epsg: int = 32633) -> Dict[str, Any]:
    """Return CRS and transform of a place; places lie 10 km apart."""
    return dict(
        crs=CRS.from_epsg(epsg),
        transform=from_origin(500000.0 + 10000 * place, 5400000.0, side, side),
    )


def write_place(
    root: Path,
    name: str = 'a',
    place: int = 0,
    dates: Sequence[str] = DATES,
    radar_dates: Sequence[str] = DATES[:2],
) -> Dict[str, np.ndarray]:
    """Write the images and the labels of a place; return the values by 'sensor date' and 'labels'.

    Radar has pixels of 20 m, the other sensor and the labels 10 m.
    """
    random = np.random.RandomState(place)
    values: Dict[str, np.ndarray] = {}
    for date in dates:
        values[f's2 {date}'] = random.randint(1, 4000, (3, SIZE, SIZE)).astype('uint16')
        write_raster(root / f's2/{name}_{date}.tif', values[f's2 {date}'], grid(place))
    for date in radar_dates:
        values[f's1 {date}'] = random.normal(-12, 3, (2, SIZE // 2, SIZE // 2)).astype('float32')
        write_raster(root / f's1/{name}_{date}.tif', values[f's1 {date}'], grid(place, 20.0))
    values['labels'] = random.randint(0, 2, (SIZE, SIZE)).astype('uint8')
    write_raster(root / f'labels/{name}.tif', values['labels'], grid(place))
    return values


def build_stacks(root: Path, **arguments: Any) -> SceneStackDataset:
    """Return a ``SceneStackDataset`` of the places below ``root``."""
    config = dict(
        dict(
            type='SceneStackDataset',
            data_root=str(root),
            sensors=SENSORS,
            window=32,
            labels='labels',
            metainfo=METAINFO,
            pipeline=PIPELINE,
        ),
        **arguments,
    )
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(config)


def one_sensor(**settings: Any) -> Dict[str, Dict[str, Any]]:
    """Return the settings of the optical sensor only, with changes."""
    return dict(s2=dict(SENSORS['s2'], **settings))


def write_list(
    path: Path, rows: List[Sequence[str]], columns: str = 'place,sensor,date,path'
) -> str:
    """Write a CSV file; return its name."""
    path.write_text('\n'.join([columns, *(','.join(row) for row in rows)]) + '\n', encoding='utf-8')
    return path.name


def write_model(
    root: Path, sensors: Dict[str, Dict[str, Any]], pool: str = 'attention', frozen: bool = False
) -> Path:
    """Write a config of a small model on the places below ``root``; return its path."""
    encoder = dict(
        type='ResNetV1c',
        depth=18,
        base_channels=8,
        num_stages=1,
        strides=(1,),
        dilations=(1,),
        out_indices=(0,),
        stem_channels=8,
        norm_cfg=dict(type='GN', num_groups=4),
    )
    encoders = {
        name: dict(encoder, in_channels=len(sensor['bands'])) for name, sensor in sensors.items()
    }
    values = {name: [1.0] * len(sensor['bands']) for name, sensor in sensors.items()}
    model = dict(
        type='EncoderDecoder',
        data_preprocessor=dict(
            type='StackDataPreProcessor',
            sensors=sensors,
            size=(32, 32),
            mean=values,
            std={name: [2000.0] * len(value) for name, value in values.items()},
        ),
        backbone=dict(type='StackBackbone', sensors=sensors, encoder=encoders, frozen=frozen),
        neck=dict(
            type='TemporalPool',
            sensors=sensors,
            channels=[8],
            pool=pool,
            attention=dict(heads=2, width=16),
        ),
        decode_head=dict(
            type='FCNHead',
            in_channels=8 * len(sensors),
            in_index=0,
            channels=8 * len(sensors),
            num_convs=0,
            concat_input=False,
            dropout_ratio=0.0,
            num_classes=2,
            align_corners=False,
            loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
        ),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )
    dataset = dict(
        type='SceneStackDataset',
        data_root=str(root),
        sensors=sensors,
        window=32,
        labels='labels',
        metainfo=METAINFO,
        pipeline=PIPELINE,
    )
    loader = dict(batch_size=2, num_workers=0, dataset=dataset)
    settings = dict(
        default_scope='mmseg',
        custom_imports=dict(imports=['mapsage']),
        runner_type='MapSageRunner',
        env_cfg=dict(accelerator='cpu', dist_cfg=dict(backend='auto')),
        model=model,
        log_level='INFO',
        log_processor=dict(by_epoch=False),
        train_dataloader=dict(loader, sampler=dict(type='InfiniteSampler', shuffle=True)),
        val_dataloader=dict(loader, sampler=dict(type='DefaultSampler', shuffle=False)),
        val_evaluator=dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU']),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3)),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=4, val_interval=4),
        val_cfg=dict(type='ValLoop'),
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4)),
    )
    path = root / 'model.py'
    path.write_text(
        ''.join(f'{name} = {value!r}\n' for name, value in settings.items()), encoding='utf-8'
    )
    return path


def save_weights(config: Path, days: Dict[str, List[int]]) -> Path:
    """Write a checkpoint of the model of a config with random weights; return its path."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        torch.manual_seed(0)
        model = MODELS.build(Config.fromfile(str(config)).model)
    path = config.with_suffix('.pth')
    torch.save(
        dict(
            state_dict=model.state_dict(), meta=dict(dataset_meta=dict(METAINFO, stack_days=days))
        ),
        str(path),
    )
    return path
