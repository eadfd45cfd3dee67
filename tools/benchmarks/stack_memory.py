#!/usr/bin/env python
"""Largest resident set of tools/predict.py for a place of two sensors and twelve dates.

    python tools/benchmarks/stack_memory.py [--width 10000] [--height 10000] [--window 512]

Optical images of four bands in 16 bits and radar images of two bands in 32 bits, tiled; the model
averages pixels and costs little. Memory depends on the width of the place and not on its height, so
few rows say as much as all. The bound is printed before the prediction starts (docs/how-to/
scene-stacks.md has it), and the program ends with status 1 if it is exceeded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.model import BaseModule  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from rasterio.windows import Window  # noqa: E402

from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.commands import cli  # noqa: E402
from mapsage.commands.checkpoint_model import choose_batch  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.geo.stacks import StackLayout  # noqa: E402

TILE, CLASSES = 512, 6
# Python, PyTorch and GDAL with its cache of blocks, and pixels that wait to be predicted.
PROGRAM, AHEAD = 1 << 30, 512 << 20
CONFIG = """
custom_imports = dict(imports=['mapsage', 'stack_memory'])
default_scope = 'mmseg'
sensors = dict(
    s2=dict(scenes='s2/{place}_{date}.tif', bands=[1, 2, 3, 4], max_dates=DATES),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=[1, 2], max_dates=DATES))
test_dataloader = dict(dataset=dict(
    type='SceneStackDataset', sensors=sensors, window=WINDOW, metainfo=dict(
        classes=[str(i) for i in range(6)], palette=[[i] * 3 for i in range(6)])))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors,
                           mean=dict(s2=[900.] * 4, s1=[-10.] * 2),
                           std=dict(s2=[400.] * 4, s1=[3.] * 2)),
    backbone=dict(type='StackBackbone', sensors=sensors, encoder=dict(
        s2=dict(type='AveragesOfImages'), s1=dict(type='AveragesOfImages'))),
    neck=dict(type='TemporalPool', sensors=sensors, channels=dict(s2=[4], s1=[2]), pool='mean'),
    decode_head=dict(
        type='FCNHead', in_channels=6, in_index=0, channels=6, num_convs=0, concat_input=False,
        dropout_ratio=0, num_classes=6, align_corners=False),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
"""


@MODELS.register_module(force=True)
class AveragesOfImages(BaseModule):
    """Averages of squares of 16 pixels of each band: no computation to speak of."""

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor]:
        """Return one level, (N, bands, H / 16, W / 16)."""
        return (torch.nn.functional.avg_pool2d(images, 16),)


def write_place(root: Path, width: int, height: int, dates: int) -> None:
    """Write the images of a place; tiles repeat, so that writing is quick."""
    random = np.random.RandomState(0)
    kinds: Dict[str, Tuple[int, str]] = dict(s2=(4, 'uint16'), s1=(2, 'float32'))
    for sensor, (bands, dtype) in kinds.items():
        (root / sensor).mkdir(parents=True)
        noise = random.randint(1, 3000, (bands, TILE // 16, TILE // 16)).astype(dtype)
        noise = noise.repeat(16, 1).repeat(16, 2)
        for date in range(dates):
            with rasterio.open(
                root / sensor / f'a_2024{date + 1:02}15.tif',
                'w',
                driver='GTiff',
                width=width,
                height=height,
                count=bands,
                dtype=dtype,
                crs='EPSG:32633',
                tiled=True,
                transform=rasterio.Affine(10, 0, 4e5, 0, -10, 5e6),
                blockxsize=TILE,
                blockysize=TILE,
                compress='deflate',
                zlevel=1,
            ) as file:
                for row in range(0, height, TILE):
                    for column in range(0, width, TILE):
                        rows, columns = min(TILE, height - row), min(TILE, width - column)
                        file.write(
                            noise[:, :rows, :columns], window=Window(column, row, columns, rows)
                        )


def bound(channels: int, window: int, batch: int, width: int) -> int:
    """Return the bytes that a prediction may take (docs/how-to/scene-stacks.md)."""
    readers, threads = min(8, len(os.sched_getaffinity(0))), torch.get_num_threads()
    one = 4 * channels * window**2
    windows = max(readers, min(4 * readers, AHEAD // one)) + 1 + readers
    batches = batch * (3 + 4 * threads)
    scores = 4 * CLASSES * (2 * window * width + 4 * batch * window**2)
    return PROGRAM + one * (windows + batches) + scores


def main() -> None:
    """Write place and weights, print the bound, run the command, and print what the kernel counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--width', type=int, default=10000)
    parser.add_argument('--height', type=int, default=10000)
    parser.add_argument('--window', type=int, default=512)
    parser.add_argument('--dates', type=int, default=12)
    parser.add_argument(
        '--options', nargs=argparse.REMAINDER, default=[], help='options of tools/predict.py'
    )
    args = parser.parse_args()
    print(describe_machine(), f'rasterio {rasterio.__version__}', sep=', ', flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / 'averages.py'
        config.write_text(
            CONFIG.replace('DATES', str(args.dates)).replace('WINDOW', str(args.window))
        )
        write_place(folder / 'place', args.width, args.height, args.dates)
        torch.manual_seed(0)
        cfg = cli.load_config(cli.build_parser('').parse_args([str(config)]))
        model = build_model(cfg)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'model.pth')
        layout = StackLayout.of_config(cfg.sensors)
        batch = choose_batch(
            None,
            (args.window, args.window),
            CLASSES,
            resolve_accelerator('cpu'),
            layout.input_channels,
        )
        limit = bound(layout.input_channels, args.window, batch, args.width)
        print(
            f'{layout.input_channels} channels, {batch} window(s) in a batch: bound '
            f'{limit / 1e9:.2f} GB',
            flush=True,
        )
        log, start = folder / 'log', time.monotonic()
        process = os.fork()
        if process == 0:
            with open(log, 'w') as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ['PYTHONPATH'] = str(ROOT / 'tools' / 'benchmarks')
            os.execv(
                sys.executable,
                [
                    sys.executable,
                    str(ROOT / 'tools' / 'predict.py'),
                    str(config),
                    str(folder / 'model.pth'),
                    str(folder / 'place'),
                    '--out',
                    str(folder / 'maps'),
                    '--window',
                    str(args.window),
                    '--accelerator',
                    'cpu',
                    *args.options,
                ],
            )
        _, status, usage = os.wait4(process, 0)
        print(log.read_text()[-1500:])
        if status:
            sys.exit('the command failed')
        peak = usage.ru_maxrss * 1024
        print(
            f'{args.width:,} x {args.height:,} pixels, {args.dates} dates of two sensors: '
            f'largest resident set {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB, '
            f'{usage.ru_utime + usage.ru_stime:.0f} s of processor time, '
            f'{time.monotonic() - start:.0f} s'
        )
        if peak > limit:
            sys.exit('more memory than the bound')


if __name__ == '__main__':
    main()
