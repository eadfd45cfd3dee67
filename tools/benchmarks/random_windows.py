"""Samples per second of GeoTiffDataset alone: random windows, balanced by class, against the grid.

    OMP_NUM_THREADS=1 python tools/benchmarks/random_windows.py [--blocks 256 512] [--rounds 5]

Two made scenes of three bands with label rasters, deflated in tiles, and larger together than the
blocks that GDAL keeps. One class covers 0.1 % of them. The grid has the step of
docs/reference/datasets.md, half a window. Both loaders have the sampler and the seeds of a
training and take turns; each round continues where the last one stopped. Rates are by the
processor time of one process without workers, since files are in the page cache; so they hold on a
machine that others use, too.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import rasterio  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402
from rasterio.transform import from_origin  # noqa: E402

from mapsage.engine.loading.build import build_keyed_loader  # noqa: E402

CLASSES = dict(
    classes=('ground', 'wood', 'house'), palette=[[120, 160, 90], [0, 90, 0], [200, 0, 0]]
)
READ = [
    dict(type='LoadGeoTiffWindow'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='RandomFlip', prob=0.5),
]
PIPELINES = {
    'flips': READ,
    'flips and PhotoMetricDistortion': [*READ, dict(type='PhotoMetricDistortion')],
}


def write_scenes(root: Path, size: int, block: int) -> None:
    """Write two scenes and their labels."""
    random = np.random.RandomState(0)
    for name in 'ab':
        coarse = random.randint(0, 256, (size // 64, size // 64), np.uint8)
        smooth = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
        labels = (smooth > 140).astype(np.uint8)
        for row, column in random.randint(0, size - 32, (size * size // 1_000_000, 2)):
            labels[row : row + 32, column : column + 32] = 2  # 0.1 % of the area
        noise = random.randint(0, 12, (3, size, size), np.uint8)
        values = noise + (smooth // 2 + labels * 40)[None]
        for folder, bands in (('scenes', values), ('labels', labels[None])):
            (root / folder).mkdir(exist_ok=True)
            with rasterio.open(
                root / folder / f'{name}.tif',
                'w',
                driver='GTiff',
                height=size,
                width=size,
                count=len(bands),
                dtype='uint8',
                crs='EPSG:32650',
                transform=from_origin(5e5 + ord(name) * size, 4e6, 0.5, 0.5),
                tiled=True,
                blockxsize=block,
                blockysize=block,
                compress='deflate',
                interleave='pixel',
            ) as file:
                file.write(bands)


def stream(
    root: Path, window: int, pipeline: List[Any], arguments: Dict[str, Any]
) -> Iterator[Any]:
    """Return the batches of an endless loader."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                type='GeoTiffDataset',
                data_root=str(root),
                scenes='scenes',
                labels='labels',
                window=window,
                metainfo=CLASSES,
                pipeline=[*pipeline, dict(type='PackSegInputs')],
                **arguments,
            )
        )
        return iter(
            build_keyed_loader(
                dict(
                    dataset=dataset,
                    batch_size=4,
                    num_workers=0,
                    sampler=dict(type='InfiniteSampler', shuffle=True),
                    collate_fn=dict(type='pseudo_collate'),
                ),
                0,
            )
        )


def measure(
    root: Path, window: int, pipeline: List[Any], rounds: int, batches: int
) -> List[List[float]]:
    """Return the samples per second of each round, of the grid and of random windows."""
    streams = [
        stream(root, window, pipeline, each)
        for each in (dict(stride=window // 2), dict(windows=dict(type='random', balance='classes')))
    ]
    rates: List[List[float]] = [[], []]
    for number in range(rounds + 1):
        for kind, each in enumerate(streams):
            start = time.process_time()
            for _ in itertools.islice(each, batches):
                pass
            if number:  # the first round warms up
                rates[kind].append(4 * batches / (time.process_time() - start))
    return rates


def main() -> None:
    """Measure both loaders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--size', type=int, default=8192, help='side of a scene in pixels')
    parser.add_argument('--window', type=int, default=512)
    parser.add_argument('--blocks', type=int, nargs='+', default=[256, 512])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--batches', type=int, default=30, help='batches of 4 windows in a round')
    args = parser.parse_args()
    print(
        describe_machine() + f', rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}'
    )
    print(
        '| tiles of the files | pipeline | grid | random, balanced | of the grid |\n'
        '|---|---|---|---|---|'
    )
    for block in args.blocks:
        with tempfile.TemporaryDirectory() as folder:
            write_scenes(Path(folder), args.size, block)
            for name, pipeline in PIPELINES.items():
                grid, random = measure(
                    Path(folder), args.window, pipeline, args.rounds, args.batches
                )
                ratios = [one / other for one, other in zip(random, grid)]
                print(
                    f'| {block} | {name} | {statistics.median(grid):.1f} | '
                    f'{statistics.median(random):.1f} | {statistics.median(ratios):.2f} '
                    f'({min(ratios):.2f}-{max(ratios):.2f}) |',
                    flush=True,
                )


if __name__ == '__main__':
    main()
