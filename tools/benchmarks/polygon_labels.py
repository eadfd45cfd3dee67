"""Processor time of burning polygons as labels of a window, by their number.

    OMP_NUM_THREADS=1 python tools/benchmarks/polygon_labels.py [--polygons 1000 10000 100000]

A scene of 8,192 pixels of 0.5 m, windows of 512 on its grid in random order, and polygons with a
radius of 1 to 8 m. All polygons lie in the scene, so that a window has more of them the more there
are; or only the first number does, and the others lie next to the scene: then every window has the
same polygons, and only the search for them can take longer. The numbers take turns. To measure
another checkout, name it in MEASURED_CHECKOUT.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [os.environ.get('MEASURED_CHECKOUT', str(ROOT)), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import pyogrio.raw  # noqa: E402
import rasterio  # noqa: E402
import shapely  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402
from mmseg.datasets import BaseSegDataset  # noqa: E402

import mapsage  # noqa: E402, F401

SIDE, WINDOW, PIXEL = 8192, 512, 0.5
CLASSES = tuple(f'class {number}' for number in range(7))
LEFT, TOP = 5e5, 4e6


def write_scene(path: Path) -> None:
    """Write an uncompressed scene in tiles, which takes little time to read."""
    path.parent.mkdir(parents=True)
    values = np.random.RandomState(0).randint(0, 256, (3, SIDE, SIDE), np.uint8)
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=SIDE,
        height=SIDE,
        count=3,
        dtype='uint8',
        crs='EPSG:32650',
        tiled=True,
        blockxsize=WINDOW,
        blockysize=WINDOW,
        interleave='pixel',
        transform=rasterio.transform.from_origin(LEFT, TOP, PIXEL, PIXEL),
    ) as file:
        file.write(values)


def write_polygons(path: Path, inside: int, beside: int) -> None:
    """Write polygons of random places, sizes and classes, in the scene and next to it."""
    random = np.random.RandomState(1)
    count, extent = inside + beside, SIDE * PIXEL
    x = random.uniform(LEFT, LEFT + extent, count)
    x[inside:] += 2 * extent
    shapes = shapely.buffer(
        shapely.points(x, random.uniform(TOP - extent, TOP, count)),
        random.uniform(1, 8, count),
        quad_segs=4,
    )
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(shapes),
        [random.randint(1, len(CLASSES), count).astype(np.int32)],
        ['class'],
        geometry_type='Polygon',
        crs='EPSG:32650',
        driver='GPKG',
    )


def build(scene: Path, labels: Path) -> BaseSegDataset:
    """Return the dataset of the scene with the polygons of one file."""
    metainfo = dict(classes=CLASSES, palette=[[8 * n] * 3 for n in range(len(CLASSES))])
    pipeline = [
        dict(type='LoadGeoTiffWindow'),
        dict(type='LoadGeoTiffLabels'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackSegInputs'),
    ]
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(
            dict(
                type='GeoTiffDataset',
                scenes=str(scene),
                labels=str(labels),
                window=WINDOW,
                class_field='class',
                metainfo=metainfo,
                pipeline=pipeline,
            )
        )


def milliseconds(dataset: BaseSegDataset, numbers: np.ndarray) -> float:
    """Return the processor time of a sample."""
    begin = time.process_time()
    for number in numbers:
        dataset[int(number)]
    return (time.process_time() - begin) / len(numbers) * 1e3


def main() -> None:
    """Measure every number of polygons and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--polygons', type=int, nargs='+', default=[1000, 10_000, 100_000])
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--samples', type=int, default=40)
    parser.add_argument('--profile', action='store_true', help='profile the last number')
    args = parser.parse_args()
    print(f'{describe_machine()}, rasterio {rasterio.__version__}, shapely {shapely.__version__}')
    datasets: Dict[str, BaseSegDataset] = {}
    with tempfile.TemporaryDirectory() as folder:
        scene = Path(folder) / 'scenes' / 'scene.tif'
        write_scene(scene)
        for count in args.polygons:
            for name, inside in (
                (f'{count:,} in the scene', count),
                (f'{args.polygons[0]:,} in the scene, of {count:,}', args.polygons[0]),
            ):
                if name.endswith(f'of {args.polygons[0]:,}'):
                    continue
                path = Path(folder) / f'{inside}_{count}.gpkg'
                write_polygons(path, inside, count - inside)
                begin = time.process_time()
                datasets[name] = build(scene, path)
                print(f'{name}: built in {time.process_time() - begin:.2f} s', flush=True)
        times: Dict[str, List[float]] = {name: [] for name in datasets}
        random = np.random.RandomState(2)
        for _ in range(args.rounds):
            numbers = random.randint(0, (SIDE // WINDOW) ** 2, args.samples)
            for name, dataset in datasets.items():
                times[name].append(milliseconds(dataset, numbers))
        print('| polygons | ms a sample | range |\n|---|---|---|')
        for name, values in times.items():
            print(
                f'| {name} | {statistics.median(values):.2f} | {min(values):.2f}-'
                f'{max(values):.2f} |'
            )
        if args.profile:
            profile = cProfile.Profile()
            profile.enable()
            milliseconds(list(datasets.values())[-2], np.arange(100))
            profile.disable()
            pstats.Stats(profile).sort_stats('tottime').print_stats(22)


if __name__ == '__main__':
    main()
