"""Images with some labels, and scenes, for the model that tells classes by their colors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import cv2
import numpy as np
import torch
from color_model import COLORS, NAMES, paint, write_checkpoint, write_config, write_scene
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from rasterio.transform import Affine

from mapsage.extras.labels import suggest_labels

UTM: Dict[str, Any] = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))

# Half way between red and green: both have the probability 0.5.
UNSURE = np.array([128, 128, 10], np.uint8)

# Class indices in files are shifted by one, as in LoveDA: 0 is no data.
TRAINING = """
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'{reduce}),
    dict(type='RandomFlip', prob=0.5), dict(type='PackSegInputs')]
metainfo = test_dataloader['dataset'].pop('metainfo')
test_dataloader = None
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='BaseSegDataset', data_root={root!r}, img_suffix='.png', reduce_zero_label=True,
        data_prefix=dict(img_path='img/train', seg_map_path='ann/train'), ann_file={names!r},
        metainfo=metainfo, pipeline=train_pipeline))
model['data_preprocessor']['size'] = (64, 64)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1e-4))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2)
"""


def write_image(path: Path, classes: np.ndarray, unsure: np.ndarray) -> None:
    """Write the colors of classes as PNG, another color where ``unsure``."""
    colors = COLORS[classes]
    colors[unsure] = UNSURE
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.ascontiguousarray(colors[..., ::-1]))


def write_tiles(root: Path, count: int = 4) -> Tuple[np.ndarray, np.ndarray]:
    """Write tiles of 64 pixels, ``img/train/tN.png``, the first labeled; return classes, unsure."""
    classes = paint(64, 64)
    unsure = np.zeros((64, 64), bool)
    unsure[:16, 40:] = True
    for number in range(count):
        write_image(root / f'img/train/t{number}.png', classes, unsure)
    (root / 'ann/train').mkdir(parents=True)
    assert cv2.imwrite(str(root / 'ann/train/t0.png'), classes + 1)
    (root / 'labeled.txt').write_text('t0\n')
    return classes, unsure


def write_training(root: Path, reduce: str = '') -> Path:
    """Write the config of a training on the labeled tiles."""
    return write_config(root, TRAINING.format(root=str(root), names='labeled.txt', reduce=reduce))


def write_sure_checkpoint(folder: Path) -> Path:
    """Write weights that are sure of all four colors, also of the dark one."""
    path = write_checkpoint(folder)
    state = torch.load(str(path))
    for name in state['state_dict']:
        state['state_dict'][name] *= 4
    torch.save(state, str(path))
    return path


SCENES = """
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='GeoTiffDataset', data_root={root!r}, scenes='scenes', labels='labels.gpkg',
        window=64, bands=[3, 2, 1], outside=255, metainfo=test_dataloader['dataset']['metainfo'],
        pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'),
                  dict(type='PackSegInputs')]))
test_dataloader = None
model['data_preprocessor']['size'] = (64, 64)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1e-4))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2)
"""


def write_scene_training(root: Path) -> Path:
    """Write the config of a training on ``scenes`` with the polygons of ``labels.gpkg``."""
    return write_config(root, SCENES.format(root=str(root)))


def write_unsure_scene(
    path: Path, classes: np.ndarray, unsure: np.ndarray, place: Dict[str, Any] = UTM
) -> Path:
    """Write a scene of the colors of classes, another color where ``unsure``."""
    import rasterio

    path.parent.mkdir(parents=True, exist_ok=True)
    write_scene(path, classes, **place)
    with rasterio.open(str(path), 'r+') as file:
        values = file.read()
        values[:, unsure] = UNSURE[:, None]
        file.write(values)
    return path


__all__ = [
    'NAMES',
    'UNSURE',
    'UTM',
    'write_image',
    'write_scene_training',
    'write_sure_checkpoint',
    'write_tiles',
    'write_training',
    'write_unsure_scene',
]


def joined(folder: Path) -> Any:
    """Return the training dataset of the config that was written into a folder."""
    cfg = Config.fromfile(str(folder / 'pseudo_labels.py'))
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
    dataset.full_init()
    return dataset


def suggest(model: Tuple[Path, Path], *arguments: Any) -> int:
    """Run tools/suggest_labels.py for a config and a checkpoint; return its status."""
    return suggest_labels.main([*map(str, model), *map(str, arguments), '--accelerator', 'cpu'])
