#!/usr/bin/env python
"""Training on cached features of all dates against encoding them: seconds of an epoch.

    OMP_NUM_THREADS=1 python tools/benchmarks/stack_features.py [--dates 6] [--windows 32]

Made places of one sensor with four bands, windows of 224 pixels, a frozen DINOv3 ViT-S with random
weights for every date, attention over dates and a linear head. Both runs train on the same windows
and must have the same losses. Times are processor time of the whole epoch: loading, preprocessing,
encoding or reading, and the training of neck and head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402

from mapsage.engine import MapSageRunner  # noqa: E402
from mapsage.extras.streaming import cache_features  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

SIDE, BATCH, BANDS, EPOCHS = 224, 4, 4, 3
CONFIG = """
custom_imports = dict(imports=['mapsage'])
default_scope = 'mmseg'
env_cfg = dict(accelerator='cpu')
randomness = dict(seed=7)
sensors = dict(s2=dict(scenes='s2/{{place}}_{{date}}.tif', bands=[1, 2, 3, 4], max_dates={dates}))
train_dataloader = dict(
    batch_size={batch}, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='SceneStackDataset', data_root={root!r}, sensors=sensors, labels='labels',
                 window={side}, metainfo=dict(classes=['a', 'b', 'c'], palette=[[0, 0, 0]] * 3),
                 pipeline=[dict(type='LoadSceneStack'), dict(type='LoadGeoTiffLabels'),
                           dict(type='PackStackInputs')]))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors, size=({side}, {side}),
                           mean=dict(s2=[1500.] * 4), std=dict(s2=[900.] * 4)),
    backbone=dict(type='StackBackbone', sensors=sensors, frozen=True,
                  encoder=dict(type='DINOv3ViT', arch={arch!r}, in_channels=4, frozen=True)),
    neck=dict(type='TemporalPool', sensors=sensors, channels=[{dims}] * 4, pool='attention'),
    decode_head=dict(
        type='LinearHead', in_channels=[{dims}] * 4, in_index=[0, 1, 2, 3],
        input_transform='resize_concat', channels=4 * {dims}, dropout_ratio=0, num_classes=3,
        norm_cfg=dict(type='BN'), align_corners=False, loss_decode=dict(type='CrossEntropyLoss')),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs={epochs})
default_hooks = dict(logger=dict(type='LoggerHook', interval=1),
                     checkpoint=dict(type='CheckpointHook', interval=100))
log_level = 'ERROR'
"""


class Epochs(Hook):
    """Processor seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: List[float] = []

    def before_train_epoch(self, runner: Any) -> None:
        self._begin = time.process_time()

    def after_train_epoch(self, runner: Any) -> None:
        self.seconds.append(time.process_time() - self._begin)


def write_places(root: Path, windows: int, dates: int) -> None:
    """Write places of 4 windows each, with images of every month and labels."""
    random = np.random.RandomState(0)
    side = 2 * SIDE
    (root / 's2').mkdir(parents=True)
    (root / 'labels').mkdir()
    for place in range(-(-windows // 4)):
        grid = dict(
            driver='GTiff',
            width=side,
            height=side,
            crs='EPSG:32633',
            tiled=True,
            blockxsize=256,
            blockysize=256,
            compress='deflate',
            predictor=2,
            transform=rasterio.Affine(10, 0, 4e5 + place * 1e4, 0, -10, 5e6),
        )
        ground = random.randint(300, 4000, (BANDS, side // 16, side // 16))
        for date in range(dates):
            values = (ground * random.uniform(0.7, 1.3)).repeat(16, 1).repeat(
                16, 2
            ) + random.randint(0, 60, (BANDS, side, side))
            with rasterio.open(
                root / f's2/p{place}_2024{date + 1:02}15.tif',
                'w',
                count=BANDS,
                dtype='uint16',
                **grid,
            ) as file:
                file.write(values.astype(np.uint16))
        with rasterio.open(
            root / f'labels/p{place}.tif', 'w', count=1, dtype='uint8', **dict(grid, predictor=1)
        ) as file:
            file.write((ground[:1] % 3).repeat(16, 1).repeat(16, 2).astype(np.uint8))


def train(path: Path, source: Dict[str, Any]) -> Tuple[List[float], List[float]]:
    """Return the seconds of each epoch and all losses."""
    cfg = Config.fromfile(str(path))
    cfg.feature_source, cfg.experiment_name = source, source['type']
    cfg.work_dir = str(path.parent / source['type'])
    runner, epochs = MapSageRunner.from_cfg(cfg), Epochs()
    runner.register_hook(epochs)
    runner.train()
    file = Path(cfg.work_dir, runner.timestamp, 'vis_data', 'scalars.json')
    return epochs.seconds, [json.loads(line)['loss'] for line in file.read_text().splitlines()]


def main() -> None:
    """Write places, make the cache, train twice, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='small', help='of DINOv3ViT (default: small)')
    parser.add_argument('--dates', type=int, default=6)
    parser.add_argument('--windows', type=int, default=16, help='samples of an epoch')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_places(folder / 'data', args.windows, args.dates)
        path = folder / 'config.py'
        path.write_text(
            CONFIG.format(
                batch=BATCH,
                root=str(folder / 'data'),
                side=SIDE,
                arch=args.arch,
                dates=args.dates,
                dims=ARCHS[args.arch].embed_dims,
                epochs=EPOCHS,
            )
        )
        start = time.process_time()
        cache_features.main(
            [
                str(path),
                '--folder',
                str(folder / 'cache'),
                '--work-dir',
                str(folder / 'work'),
                '--accelerator',
                'cpu',
            ]
        )
        making = time.process_time() - start
        encoded, losses = train(path, dict(type='Local'))
        cached, cached_losses = train(path, dict(type='Cached', folder=str(folder / 'cache')))
    print(
        f'\n{describe_machine()}\n{args.arch}, {args.windows} windows of {SIDE}x{SIDE}, '
        f'{args.dates} dates, batches of {BATCH}; making the cache took {making:.1f} s of '
        f'processor time\n| epoch | encoded | cached | ratio |\n|---|---|---|---|'
    )
    for number, (one, other) in enumerate(zip(encoded, cached), start=1):
        print(f'| {number} | {one:.2f} s | {other:.3f} s | {one / other:.1f} |')
    ratio = statistics.median(one / other for one, other in zip(encoded, cached))
    far = max(abs(one - other) for one, other in zip(losses, cached_losses))
    print(f'median ratio {ratio:.1f}; largest difference of {len(losses)} losses: {far:.3g}')
    print(f'seeds of the run 7, torch threads {torch.get_num_threads()}')


if __name__ == '__main__':
    main()
