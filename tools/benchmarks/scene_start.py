"""Processor time and memory of building GeoTiffDataset over many scenes, before the first sample.

    OMP_NUM_THREADS=1 python tools/benchmarks/scene_start.py [--scenes 1000 8000] [--against DIR]

Scenes of 1,024 pixels with label rasters, deflated in tiles of 512, a few of them linked under many
names. A new process builds the dataset for every figure: on a grid, with random windows for the
first time (the labels of all scenes are read), and with random windows again (the counts of the
labels are cached). The memory is the growth of the largest resident set during that.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [os.environ.get('MEASURED_CHECKOUT', str(ROOT)), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402
from rasterio.transform import from_origin  # noqa: E402

CLASSES = ('ground', 'wood', 'house')
SIDE = 1024
# Number of files that are written; the other scenes are links to them.
WRITTEN = 16
STARTS: Dict[str, Dict[str, Any]] = {
    'grid': {},
    'grid, no-data value': dict(scenes='gaps'),
    'random windows, first start': dict(windows=dict(type='random', balance='classes')),
    'random windows, later start': dict(windows=dict(type='random', balance='classes')),
}


def write_scenes(root: Path, count: int) -> None:
    """Write ``count`` scenes, with and without a no-data value, and their labels."""
    for folder in ('scenes', 'gaps', 'labels'):
        (root / folder).mkdir()
    for number in range(count):
        names = [root / folder / f'{number:05d}.tif' for folder in ('scenes', 'gaps', 'labels')]
        if number >= WRITTEN:
            for path in names:
                os.link(str(path.with_name(f'{number % WRITTEN:05d}.tif')), str(path))
            continue
        random = np.random.RandomState(number)
        classes = random.randint(0, 3, (16, 16)).repeat(64, 0).repeat(64, 1).astype(np.uint8)
        values = random.randint(1, 13, (3, SIDE, SIDE), np.uint8) + classes * 40
        for path, bands, nodata in zip(names, (values, values, classes[None]), (None, 0, None)):
            with rasterio.open(
                path,
                'w',
                driver='GTiff',
                height=SIDE,
                width=SIDE,
                nodata=nodata,
                count=len(bands),
                dtype='uint8',
                crs='EPSG:32650',
                tiled=True,
                blockxsize=512,
                blockysize=512,
                compress='deflate',
                interleave='pixel',
                transform=from_origin(5e5 + number * SIDE, 4e6, 0.5, 0.5),
            ) as file:
                file.write(bands)


def start(root: str, name: str) -> None:
    """Build the dataset; print its processor seconds and the growth of the resident set in MB."""
    import mapsage  # noqa: F401

    metainfo = dict(classes=CLASSES, palette=[[120, 160, 90], [0, 90, 0], [200, 0, 0]])
    with DefaultScope.overwrite_default_scope('mmseg'):
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        DATASETS.build(
            dict(
                dict(
                    type='GeoTiffDataset',
                    data_root=root,
                    scenes='scenes',
                    labels='labels',
                    window=512,
                    metainfo=metainfo,
                    pipeline=[],
                ),
                **STARTS[name],
            )
        )
        spent = time.process_time() - begin
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f'{spent} {(after - before) / 1024}')


def measure(root: Path, name: str, checkout: Path, cache: str) -> Tuple[float, float]:
    """Return processor seconds and megabytes of a start in a new process."""
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', str(Path(__file__).resolve()), '--start', str(root), name],
        env=dict(os.environ, MEASURED_CHECKOUT=str(checkout), MAPSAGE_SCENE_CACHE=cache),
        cwd=str(checkout),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, megabytes = result.stdout.split()[-2:]
    return float(seconds), float(megabytes)


def describe(name: str, starts: List[Tuple[float, float]]) -> str:
    """Return the cells of a table for the starts of one checkout."""
    seconds, megabytes = zip(*starts)
    return (
        f'{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) | '
        f'{statistics.median(megabytes):.0f}'
    )


def main() -> None:
    """Measure every start and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--scenes', type=int, nargs='+', default=[1000, 8000])
    parser.add_argument('--starts', nargs='+', default=list(STARTS), choices=list(STARTS))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--against', type=Path, help='folder of another checkout')
    parser.add_argument('--start', nargs=2, metavar=('DATA', 'NAME'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(*args.start)
        return
    checkouts = [ROOT] if args.against is None else [args.against.resolve(), ROOT]
    print(f'{describe_machine()}, rasterio {rasterio.__version__}')
    print(
        '| scenes | start |'
        + ''.join(
            f' {title}, s | MB |'
            for title in ('other checkout', 'this checkout')[-len(checkouts) :]
        )
    )
    print('|---|---|' + '---|---|' * len(checkouts))
    for count in args.scenes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_scenes(root, count)
            for name in args.starts:
                starts: List[List[Tuple[float, float]]] = [[] for _ in checkouts]
                for number in range(args.rounds):
                    for position, checkout in enumerate(checkouts):
                        # A later start finds the counts of the first one.
                        cache = root / f'cache-{position}-{number}'
                        starts[position].append(measure(root, name, checkout, str(cache)))
                print(
                    f'| {count:,} | {name} | '
                    + ' | '.join(describe(name, single) for single in starts)
                    + ' |',
                    flush=True,
                )


if __name__ == '__main__':
    main()
