"""Options and data with which the configs of this repository train two steps in seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch
from dinov3_states import hub_state
from mini_archives import draw, png
from mmengine.config import Config
from support import ROOT

# 24 blocks and 16 heads as ViT-L, so that whatever a config says of blocks and heads still holds.
DIMS, SIDE = 64, 64
ARCH = dict(embed_dims=DIMS, num_layers=24, num_heads=16, feedforward_channels=32)
# By variable of the data root: number of classes, what a mask adds to a class, end of its name.
DATA = dict(
    MAPSAGE_LOVEDA=(7, 1, '.png'),
    MAPSAGE_DEMO=(7, 1, '.png'),
    MAPSAGE_POTSDAM=(6, 1, '.png'),
    MAPSAGE_VAIHINGEN=(6, 1, '.png'),
    MAPSAGE_ISAID=(16, 0, '_instance_color_RGB.png'),
)
SIZES = ('scale', 'crop_size')


def shipped_configs() -> List[str]:
    """Return the paths of all configs that can be trained, relative to the repository."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / 'configs').glob('*/*.py')
        if path.parent.name != '_base_'
    )


def write_data(root: Path) -> Dict[str, str]:
    """Write tiles of every data set, and weights of a small ViT under the names of the official.

    Returns:
        Environment variables that lead the configs to them.
    """
    for name, (classes, offset, suffix) in DATA.items():
        names = _listed('demo') if name == 'MAPSAGE_DEMO' else []
        _write_tiles(root / name, classes, offset, suffix, names)
    _write_polygons(root / 'nwpu', _listed('nwpu'))
    weights = root / 'weights'
    weights.mkdir()
    for name in ('lvd1689m-8aa4cbdd', 'sat493m-eadcf0ff'):
        torch.save(hub_state(ARCH), str(weights / f'dinov3_vitl16_pretrain_{name}.pth'))
    return {
        **{name: str(root / name) for name in DATA},
        'MAPSAGE_NWPU': str(root / 'nwpu'),
        'MAPSAGE_DINOV3': str(weights),
    }


def small_options(cfg: Config) -> Dict[str, Any]:
    """Return what ``--cfg-options`` would have to say for two steps of a small model."""
    size = (SIDE, SIDE)
    options: Dict[str, Any] = {
        'train_cfg.max_iters': 2,
        'train_cfg.val_interval': 2,
        'env_cfg.accelerator': 'cpu',
        'model.data_preprocessor.size': size,
        'default_hooks.logger.interval': 1,
        'default_hooks.checkpoint.interval': 2,
        'vis_backends': [],
        'visualizer.vis_backends': [],
    }
    if cfg.model.test_cfg.mode == 'slide':
        options.update({'model.test_cfg.crop_size': size, 'model.test_cfg.stride': (48, 48)})
    for loader in ('train_dataloader', 'val_dataloader'):
        options.update({f'{loader}.num_workers': 0, f'{loader}.persistent_workers': False})
        options.update(dict.fromkeys(_sizes(cfg[loader].dataset, f'{loader}.dataset'), size))
    if cfg.model.backbone.get('arch') == 'large':
        options['model.backbone.arch'] = dict(_delete_=True, **ARCH)
        if cfg.model.get('neck'):
            options['model.neck.embed_dim'] = DIMS
        channels = cfg.model.decode_head.in_channels
        options['model.decode_head.in_channels'] = (
            DIMS if isinstance(channels, int) else [DIMS] * len(channels)
        )
        if 'channels' in cfg.model.decode_head:
            options['model.decode_head.channels'] = DIMS
    return options


def _sizes(value: Any, key: str) -> Iterator[str]:
    """Yield the keys of all sizes in the pipelines of a dataset."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in SIZES:
                yield f'{key}.{name}'
            else:
                yield from _sizes(item, f'{key}.{name}')
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _sizes(item, f'{key}.{index}')


def _listed(folder: str) -> List[str]:
    """Return the names in the lists of labeled images of a folder of configs."""
    return sorted(
        {
            line
            for path in (ROOT / 'configs' / folder / 'splits').glob('*.txt')
            for line in path.read_text().splitlines()
            if re.match(r'[^#\s]', line)
        }
    )


def _write_tiles(root: Path, classes: int, offset: int, suffix: str, names: List[str]) -> None:
    for split in ('train', 'val'):
        images, masks = (root / kind / split for kind in ('img_dir', 'ann_dir'))
        for folder in (images, masks):
            folder.mkdir(parents=True)
        for number, name in enumerate(['P0', 'P1', *names]):
            image, mask = draw(number, SIDE, SIDE, classes)
            (images / f'{name}.png').write_bytes(png(image))
            stored = np.where(mask == 255, 0 if offset else 255, mask + offset)
            (masks / f'{name}{suffix}').write_bytes(png(stored.astype(np.uint8)))


def _write_polygons(root: Path, names: List[str]) -> None:
    """Write images in the layout of NWPU VHR-10, a square of each of its ten objects in each."""
    (root / 'images').mkdir(parents=True)
    classes = (
        'airplane',
        'ship',
        'storage_tank',
        'baseball_diamond',
        'tennis_court',
        'basketball_court',
        'ground_track_field',
        'harbor',
        'bridge',
        'vehicle',
    )
    splits: Dict[str, List[Tuple[int, str]]] = {
        'train': [(0, '0'), *((number + 2, name) for number, name in enumerate(names))],
        'val': [(1, '1')],
    }
    for split, images in splits.items():
        for number, name in images:
            (root / 'images' / f'{name}.png').write_bytes(png(draw(number, SIDE, SIDE, 3)[0]))
        squares = [(6.0 * i, 6.0 * i, 6.0 * i + 9, 6.0 * i + 9) for i in range(10)]
        (root / f'{split}.json').write_text(
            json.dumps(
                dict(
                    images=[
                        dict(id=number, file_name=f'{name}.png', width=SIDE, height=SIDE)
                        for number, name in images
                    ],
                    categories=[dict(id=i + 1, name=name) for i, name in enumerate(classes)],
                    annotations=[
                        dict(
                            id=100 * number + i,
                            image_id=number,
                            category_id=i + 1,
                            iscrowd=0,
                            area=81,
                            bbox=[x, y, 9, 9],
                            segmentation=[[x, y, right, y, right, low, x, low]],
                        )
                        for number, _ in images
                        for i, (x, y, right, low) in enumerate(squares)
                    ],
                )
            )
        )
