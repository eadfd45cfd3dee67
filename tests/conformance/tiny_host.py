"""A segmentation config that costs a fraction of a second a run, and its images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict

import cv2
import numpy as np

SIDE, CLASSES, TRAIN, VAL = 16, 3, 8, 4
IGNORED = 254  # in the masks of the folder ann254, 255 elsewhere
LOAD = (dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'))
PIPELINE = (*LOAD, dict(type='PackSegInputs'))


def write_tiny_images(root: Path) -> Path:
    """Write images and masks of ``SIDE`` pixels, with two ignored rows in each mask."""
    random = np.random.RandomState(3)
    for split, count in (('train', TRAIN), ('val', VAL)):
        for kind in ('img', 'ann', 'ann254'):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            mask = random.randint(0, CLASSES, (4, 4)).astype(np.uint8).repeat(4, 0).repeat(4, 1)
            image = random.randint(0, 120, (SIDE, SIDE, 3)).astype(np.uint8) + mask[..., None] * 60
            cv2.imwrite(str(root / 'img' / split / f'{number}.png'), image)
            for kind, ignored in (('ann', 255), ('ann254', IGNORED)):
                mask[:2] = ignored
                cv2.imwrite(str(root / kind / split / f'{number}.png'), mask)
    (root / 'train.txt').write_text(''.join(f'{number}\n' for number in range(1, TRAIN)))
    return root


def tiles(split: str = 'train', **changes: Any) -> Dict[str, Any]:
    """Return the config of a dataset; ``{data}`` stands for the folder of the images."""
    return dict(
        dict(
            type='BaseSegDataset',
            data_root='{data}',
            pipeline=list(PIPELINE),
            img_suffix='.png',
            metainfo=dict(
                classes=('soil', 'water', 'wood'), palette=[[90, 60, 0], [0, 0, 200], [0, 99, 0]]
            ),
            data_prefix=dict(img_path=f'img/{split}', seg_map_path=f'ann/{split}'),
        ),
        **changes,
    )


def tiny_host_config() -> Dict[str, Any]:
    """Return the config as plain containers: 6 iterations of two samples, validation at the end."""
    val_dataloader = dict(
        batch_size=2,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=tiles('val'),
    )
    evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
    return dict(
        default_scope='mmseg',
        randomness=dict(seed=5),
        model=dict(
            type='EncoderDecoder',
            data_preprocessor=dict(
                type='SegDataPreProcessor',
                mean=[120.0] * 3,
                std=[60.0] * 3,
                bgr_to_rgb=True,
                pad_val=0,
                seg_pad_val=255,
                size=(SIDE, SIDE),
            ),
            backbone=dict(type='TinyBackbone'),
            decode_head=dict(
                type='FCNHead',
                in_channels=4,
                in_index=0,
                channels=4,
                num_convs=1,
                kernel_size=1,
                concat_input=False,
                dropout_ratio=0,
                num_classes=CLASSES,
                norm_cfg=None,
                align_corners=False,
            ),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
        ),
        train_dataloader=dict(
            batch_size=2,
            num_workers=0,
            sampler=dict(type='InfiniteSampler', shuffle=True),
            dataset=tiles('train'),
        ),
        val_dataloader=val_dataloader,
        test_dataloader=copy.deepcopy(val_dataloader),
        val_evaluator=evaluator,
        test_evaluator=dict(evaluator),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9)),
        param_scheduler=[dict(type='PolyLR', eta_min=1e-4, power=0.9, end=6, by_epoch=False)],
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=6, val_interval=6),
        val_cfg=dict(type='ValLoop'),
        test_cfg=dict(type='TestLoop'),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=False),
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=3),
        ),
        custom_hooks=[dict(type='RecordHook')],
        visualizer=dict(type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')]),
        log_processor=dict(by_epoch=False, window_size=3),
    )


def changed(config: Dict[str, Any], changes: Dict[str, Any]) -> Dict[str, Any]:
    """Return a config in which the values at dotted paths are those of ``changes``.

    ``...`` as a value removes the key, and ``+`` as the last part of a path appends to a list.
    """
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, name = path.split('.')
        place: Any = config
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        if value is ...:
            place.pop(name, None)
        elif name == '+':
            place.append(copy.deepcopy(value))
        else:
            place[int(name) if isinstance(place, list) else name] = copy.deepcopy(value)
    return config


def placed(value: Any, **folders: Any) -> Any:
    """Replace ``{data}`` and ``{work_dir}`` in every text of a config."""
    if isinstance(value, dict):
        return {placed(key, **folders): placed(each, **folders) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(placed(each, **folders) for each in value)
    if isinstance(value, str):
        for name, folder in folders.items():
            value = value.replace('{%s}' % name, str(folder))
    return value
