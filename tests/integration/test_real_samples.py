"""Real LoveDA and Potsdam samples, with the shipped configs, through the user's launcher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from support import REAL_DATA, ROOT, check_finished, count_class_pixels, launch, main_leg

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


def sample(name: str) -> Path:
    root = REAL_DATA / f'{name}_sample'
    if not root.is_dir():
        pytest.skip(f'{root} is not here: real images lie outside the repository')
    return root


def options(name: str, root: Path, size: int) -> List[str]:
    """The shipped config at a reduced size, on the one folder that a sample has."""
    scale, crop = f'({size * 2},{size * 2})', f'({size},{size})'
    settings = [
        f'model.data_preprocessor.size="{crop}"',
        'train_dataloader.batch_size=2',
        f'train_dataloader.dataset.pipeline.2.scale="{scale}"',
        f'train_dataloader.dataset.pipeline.3.crop_size="{crop}"',
        'train_cfg.max_iters=3',
        'train_cfg.val_interval=3',
        'default_hooks.logger.interval=1',
        'default_hooks.checkpoint.interval=3',
    ]
    for loader in ('train', 'val', 'test'):
        settings += [
            f'{loader}_dataloader.dataset.data_root={root}',
            f'{loader}_dataloader.dataset.data_prefix.img_path=img_dir/train',
            f'{loader}_dataloader.dataset.data_prefix.seg_map_path=ann_dir/train',
            f'{loader}_dataloader.num_workers=0',
            f'{loader}_dataloader.persistent_workers=False',
        ]
        if loader != 'train':
            settings.append(f'{loader}_dataloader.dataset.pipeline.1.scale="{scale}"')
    return [setting.replace('"', '') for setting in settings]


@main_leg
@pytest.mark.parametrize('name, ranks', [('loveda', 2), ('potsdam', 1)])
def test_trains_and_evaluates(name: str, ranks: int, tmp_path: Path) -> None:
    root = sample(name)
    # The subject is the data; lazy devices would compile for most of the time.
    finished = launch(
        f'configs/{name}/efficientnet_lite0_fpn_{name}.py',
        '--work-dir',
        tmp_path,
        '--accelerator',
        'cpu',
        '--cfg-options',
        *options(name, root, 256),
        ranks=ranks,
    )
    check_finished(finished)
    losses = [float(x) for x in re.findall(r'Iter\(train\).* loss: ([\d.]+)', finished.output)]
    assert len(losses) == 3 and np.isfinite(losses).all() and min(losses) > 0
    assert 0 < float(re.findall(r'\bmIoU: ([\d.]+)', finished.output)[-1]) < 100
    weights = torch.load(str(tmp_path / 'iter_3.pth'), **LOAD)
    for class_name in weights['meta']['dataset_meta']['classes']:
        assert re.search(rf'\|\s+{class_name}\s+\|', finished.output), class_name


@pytest.mark.parametrize(
    'name, classes, frequent',
    [
        ('loveda', 7, ['agricultural', 'background', 'water']),
        ('potsdam', 6, ['impervious_surface', 'building', 'low_vegetation']),
    ],
)
def test_labels_are_what_the_pictures_show(name: str, classes: int, frequent: List[str]) -> None:
    """Fields and ponds, a street with houses: seen in the images; a shift by one would not pass."""
    root = sample(name)
    with DefaultScope.overwrite_default_scope(None):
        cfg = Config.fromfile(str(ROOT / f'configs/_base_/datasets/{name}.py'))
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                cfg.val_dataloader.dataset,
                data_root=str(root),
                data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
            )
        )
    counts = count_class_pixels(dataset)
    assert len(counts) == classes
    assert [dataset.metainfo['classes'][i] for i in counts.argsort()[::-1][:3]] == frequent
