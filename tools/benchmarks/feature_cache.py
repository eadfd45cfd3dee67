"""Training on cached features against encoding each time, and the cache's rate of reading.

    OMP_NUM_THREADS=1 python tools/benchmarks/feature_cache.py [--arch small] [--tiles 32]
        [--accelerator cpu]

First an epoch of a linear head on a frozen DINOv3 with random weights, 224x224: locally, and
from the cache, from the second epoch on; both load the same images, and their losses are compared.
Then all items of 256 MiB of features, shuffled, in batches of 8, against a sequential read of the
same files, in turns; the files are in the page cache. The sequential read fills a new buffer of a
batch's size each time, as a reader who keeps the bytes must; the other fills one small buffer again
and again, which never leaves the processor's cache.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402

from mapsage.engine import MapSageRunner  # noqa: E402
from mapsage.extras.streaming import cache_features  # noqa: E402
from mapsage.extras.streaming.cache.cached import Cached  # noqa: E402
from mapsage.extras.streaming.cache.index import CacheIndex, find_shards, write_index  # noqa: E402
from mapsage.extras.streaming.cache.keys import CacheKeys, ViewSeeds  # noqa: E402
from mapsage.extras.streaming.cache.shards import write_shard  # noqa: E402
from mapsage.extras.streaming.source import Item  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

SIDE, BATCH, EPOCHS = 224, 4, 3
SHARDS, PER_SHARD, DIMS = 4, 53, 384  # 4 x 61 MiB
CONFIG = """
custom_imports = dict(imports=['mapsage'])
default_scope = 'mmseg'
env_cfg = dict(accelerator='cpu')
randomness = dict(seed=7)
pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'),
            dict(type='PackSegInputs')]
train_dataloader = dict(
    batch_size={batch}, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='LoveDADataset', data_root={root!r}, reduce_zero_label=True,
                 pipeline=pipeline,
                 data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train')))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, pad_val=0, seg_pad_val=255,
                           size=({side}, {side})),
    backbone=dict(type='DINOv3ViT', arch={arch!r}, frozen=True),
    decode_head=dict(
        type='LinearHead', in_channels=[{dims}] * 4, in_index=[0, 1, 2, 3],
        input_transform='resize_concat', channels=4 * {dims}, dropout_ratio=0, num_classes=7,
        norm_cfg=dict(type='BN'), align_corners=False, loss_decode=dict(type='CrossEntropyLoss')),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs={epochs})
default_hooks = dict(logger=dict(type='LoggerHook', interval=1),
                     checkpoint=dict(type='CheckpointHook', interval=100))
log_level = 'ERROR'
"""


class Epochs(Hook):
    """Notes the seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: List[float] = []

    def before_train_epoch(self, runner: Any) -> None:
        self._begin = time.perf_counter()

    def after_train_epoch(self, runner: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


def train(path: Path, source: Dict[str, Any], accelerator: str) -> Tuple[List[float], List[float]]:
    """Return the seconds of each epoch and all losses."""
    cfg = Config.fromfile(str(path))
    cfg.feature_source, cfg.env_cfg.accelerator = source, accelerator
    cfg.experiment_name = source['type']
    cfg.work_dir = str(path.parent / source['type'])
    runner, epochs = MapSageRunner.from_cfg(cfg), Epochs()
    runner.register_hook(epochs)
    runner.train()
    file = Path(cfg.work_dir, runner.timestamp, 'vis_data', 'scalars.json')
    return epochs.seconds, [json.loads(line)['loss'] for line in file.read_text().splitlines()]


def compare_epochs(folder: Path, arch: str, tiles: int, accelerator: str) -> None:
    """Print how long an epoch takes locally and from the cache."""
    path = folder / 'config.py'
    path.write_text(
        CONFIG.format(
            batch=BATCH,
            root=str(write_tiles(folder / 'data', tiles, SIDE)),
            side=SIDE,
            arch=arch,
            dims=ARCHS[arch].embed_dims,
            epochs=EPOCHS,
        )
    )
    start = time.perf_counter()
    cache_features.main(
        [
            str(path),
            '--folder',
            str(folder / 'cache'),
            '--work-dir',
            str(folder / 'work'),
            '--accelerator',
            accelerator,
        ]
    )
    made = time.perf_counter() - start
    encoded, losses = train(path, dict(type='Local'), accelerator)
    cached, others = train(path, dict(type='Cached', folder=str(folder / 'cache')), accelerator)
    print(
        f'\n{describe_machine()}\n{arch} on {accelerator}, {tiles} tiles of {SIDE}x{SIDE}, '
        f'batches of {BATCH}; making the cache took {made:.1f} s'
    )
    print('| epoch | local | cached | ratio |\n|---|---|---|---|')
    for number, (one, other) in enumerate(zip(encoded, cached), start=1):
        print(f'| {number} | {one:.2f} s | {other:.3f} s | {one / other:.1f} |')
    far = max(abs(one - other) for one, other in zip(losses, others))
    print(f'largest difference of {len(losses)} losses: {far:.3g}')


def compare_reading(folder: Path, rounds: int) -> None:
    """Print the rate of reading through the cache and of reading the files."""
    items = SHARDS * PER_SHARD
    keys = CacheKeys('', '', tuple(map(str, range(items))), {})
    index = CacheIndex(keys, 1, 0, {})
    for shard in range(SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        write_shard(
            folder,
            index.cache,
            {
                number: [torch.randn(14, 14, DIMS).permute(2, 0, 1) for _ in range(4)]
                for number in numbers
            },
            dict(enumerate(keys.samples)),
        )
    index = find_shards(folder, index)[0]
    write_index(folder, index)
    source = Cached(str(folder), 1, torch.device('cpu'), keys)
    size = sum(entry.bytes for entry in index.shards)
    first = size / read_cached(source, items)
    step = size // items * 8
    rates: Dict[str, List[float]] = dict(cached=[], kept=[], files=[])
    for _ in range(rounds):
        rates['kept'].append(size / read_files(folder, step, True))
        rates['cached'].append(size / read_cached(source, items))
        rates['files'].append(size / read_files(folder, 1 << 20, False))
    cached, kept, files = (statistics.median(each) / 1e9 for each in rates.values())
    print(f'\n{size / 2**20:.0f} MiB in {SHARDS} shards, median of {rounds} rounds:')
    print('| | GB/s | cached is |\n|---|---|---|')
    print(f'| cached, first read, with checksums | {first / 1e9:.2f} | |')
    print(f'| cached | {cached:.2f} | |')
    print(f'| sequential read, bytes kept | {kept:.2f} | {cached / kept:.2f} of it |')
    print(f'| sequential read, one small buffer | {files:.2f} | {cached / files:.2f} of it |')


def read_files(folder: Path, step: int, kept: bool) -> float:
    """Return the seconds of reading all shards from begin to end, ``step`` bytes at a time."""
    buffer = np.empty(step, np.uint8)
    start = time.perf_counter()
    for path in sorted(folder.glob('features-*')):
        with open(path, 'rb', buffering=0) as file:
            while file.readinto(buffer):
                if kept:
                    buffer = np.empty(step, np.uint8)
    return time.perf_counter() - start


def read_cached(source: Cached, items: int) -> float:
    """Return the seconds of reading all items, shuffled, in batches."""
    order, seeds = random.Random(0).sample(range(items), items), ViewSeeds(0, 1)
    start = time.perf_counter()
    for number in range(0, items, 8):
        batch = order[number : number + 8]
        source.features(
            Item(
                number,
                tuple((index, seeds.of(index, 0)) for index in batch),
                torch.empty(len(batch), 0, 0, 0),
            )
        )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='small', help='of DINOv3ViT (default: small)')
    parser.add_argument('--tiles', type=int, default=32, help='images an epoch (default: 32)')
    parser.add_argument('--rounds', type=int, default=9, help='of reading (default: 9)')
    parser.add_argument('--accelerator', default='cpu', help='of the epochs (default: cpu)')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare_epochs(Path(folder), args.arch, args.tiles, args.accelerator)
        shards = Path(folder, 'reading')
        shards.mkdir()
        compare_reading(shards, args.rounds)


if __name__ == '__main__':
    main()
