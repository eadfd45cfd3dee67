#!/usr/bin/env python
"""Processor time of a loader of stacks of six dates against six loaders of single dates.

    OMP_NUM_THREADS=1 python tools/benchmarks/stack_loader.py [--size 1024] [--rounds 40]

Windows of 512 pixels in the order of a training: read, mirror, pack, check; the blocks of the files
are decoded already, so that only the work of the loaders counts. One of the six loaders
reads the labels, as the stack does once. The rounds take turns on the same files and windows, so
that other work on the machine slows both. The pixels of both must be equal, or the program ends
with status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402

import mapsage  # noqa: E402, F401  (registers the classes)
from mapsage.engine.loading.build import build_keyed_loader  # noqa: E402

WINDOW, DATES = 512, 6
META = dict(classes=('a', 'b', 'c'), palette=[[0, 0, 0]] * 3)
FLIP = dict(type='RandomFlip', prob=0.5)
CASES: Dict[str, Dict[str, Any]] = {
    '4 x uint16': dict(bands=4, dtype='uint16'),
    '4 x uint16, no-data value 0': dict(bands=4, dtype='uint16', nodata=0),
    '3 x uint8': dict(bands=3, dtype='uint8'),
    '10 x uint16': dict(bands=10, dtype='uint16'),
}


def write_dates(
    root: Path, size: int, bands: int, dtype: str, nodata: Optional[int] = None
) -> None:
    """Write six images and the labels of a place."""
    random = np.random.RandomState(0)
    coarse = random.randint(1, 200, (size // 64, size // 64), np.uint8)
    smooth = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC).clip(1, 220)
    grid = dict(
        driver='GTiff',
        height=size,
        width=size,
        tiled=True,
        blockxsize=512,
        blockysize=512,
        compress='deflate',
        crs='EPSG:32650',
        transform=rasterio.Affine(10, 0, 5e5, 0, -10, 4e6),
    )
    for folder in ('s2', 'labels'):
        (root / folder).mkdir(parents=True)
    with rasterio.open(root / 'labels/a.tif', 'w', count=1, dtype='uint8', **grid) as file:
        file.write((smooth // 80)[None])
    scale = 1 if dtype == 'uint8' else 15
    for date in range(DATES):
        values = (random.randint(1, 12, (bands, size, size)) + smooth).astype(dtype) * scale
        with rasterio.open(
            root / f's2/a_2024{date + 1:02}01.tif',
            'w',
            count=bands,
            dtype=dtype,
            nodata=nodata,
            interleave='pixel',
            **grid,
        ) as file:
            file.write(values)


def loader(dataset: Dict[str, Any]) -> Iterator[Any]:
    """Return the batches of a dataset, one window each, in the order of seed 0.

    All windows are loaded once first, because the first reader of a block decodes it for all.
    """
    with DefaultScope.overwrite_default_scope('mmseg'):
        built = DATASETS.build(dict(dataset, window=WINDOW, stride=384, metainfo=META))
        batches = iter(
            build_keyed_loader(
                dict(
                    dataset=built,
                    batch_size=1,
                    num_workers=0,
                    collate_fn=dict(type='pseudo_collate'),
                    sampler=dict(type='InfiniteSampler', shuffle=True),
                ),
                0,
            )
        )
    for _ in range(len(built)):
        next(batches)
    return batches


def measure(root: Path, bands: int, samples: int, rounds: int) -> List[List[float]]:
    """Return the milliseconds per stack of each round: of the stack, and of six loaders."""
    names = list(range(1, bands + 1))
    sensors = dict(s2=dict(scenes='s2/{place}_{date}.tif', bands=names, max_dates=DATES))
    labels = dict(type='LoadGeoTiffLabels')
    stacks = loader(
        dict(
            type='SceneStackDataset',
            data_root=str(root),
            sensors=sensors,
            labels='labels',
            pipeline=[dict(type='LoadSceneStack'), labels, FLIP, dict(type='PackStackInputs')],
        )
    )
    singles = []
    for date, path in enumerate(sorted((root / 's2').glob('*.tif'))):
        arguments: Dict[str, Any] = dict(scenes=str(path), bands=names, data_root=str(root))
        if date == 0:
            arguments['labels'] = str(root / 'labels' / 'a.tif')
        singles.append(
            loader(
                dict(
                    type='GeoTiffDataset',
                    **arguments,
                    pipeline=[
                        dict(type='LoadGeoTiffWindow'),
                        *([labels] if date == 0 else []),
                        FLIP,
                        dict(type='PackSegInputs'),
                    ],
                )
            )
        )
    times: List[List[float]] = [[], []]
    for number in range(rounds):
        start = time.process_time()
        stack_batches = [next(stacks)['inputs'][0] for _ in range(samples)]
        middle = time.process_time()
        single_batches = [[next(single)['inputs'][0] for _ in range(samples)] for single in singles]
        end = time.process_time()
        for sample, stack in enumerate(stack_batches):
            expected = torch.cat([images[sample] for images in single_batches])
            if not torch.equal(stack[: len(expected)].float(), expected.float()):
                sys.exit(f'round {number}: sample {sample} of the stack has other pixels')
        times[0].append((middle - start) / samples * 1e3)
        times[1].append((end - middle) / samples * 1e3)
    return times


def main() -> None:
    """Measure the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--size', type=int, default=1024, help='side of the place in pixels')
    parser.add_argument('--samples', type=int, default=2, help='stacks in a round')
    parser.add_argument('--rounds', type=int, default=40)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    print(
        f'{describe_machine()}, rasterio {rasterio.__version__}, GDAL '
        f'{rasterio.__gdal_version__}\n| window of {WINDOW}, {DATES} dates | stack, ms | six '
        f'loaders, ms | speed |\n|---|---|---|---|'
    )
    for case, settings in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_dates(Path(folder), args.size, **settings)
            stack, singles = measure(Path(folder), settings['bands'], args.samples, args.rounds)
        ratios = [other / one for one, other in zip(stack, singles)]
        print(
            f'| {case} | {statistics.median(stack):.1f} | {statistics.median(singles):.1f} | '
            f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |',
            flush=True,
        )


if __name__ == '__main__':
    main()
