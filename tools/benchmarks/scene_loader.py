"""Processor time per sample of GeoTiffDataset, paired with another checkout of this repository.

    OMP_NUM_THREADS=1 python tools/benchmarks/scene_loader.py --against /path/to/other/checkout

Windows of 512 pixels of a made scene in the order of a training: read, label, mirror, pack, check.
Both checkouts run in processes that take turns on the same files and seeds, so that other work on
the machine slows both. Their samples must have the same bits, or the program ends with status 1.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [os.environ.get('MEASURED_CHECKOUT', str(ROOT)), str(ROOT / 'tools' / 'benchmarks')]

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import pyogrio.raw  # noqa: E402
import rasterio  # noqa: E402
import shapely  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402
from rasterio.transform import from_origin  # noqa: E402

CLASSES = ('ground', 'wood', 'house', 'water', 'road', 'field', 'bare')
GRID = dict(crs='EPSG:32650', transform=from_origin(5e5, 4e6, 0.5, 0.5))
CASES: Dict[str, Dict[str, Any]] = {
    '3 x uint8, label raster': dict(scenes='u8.tif', labels='labels.tif'),
    '4 x uint16, label raster': dict(scenes='u16.tif', labels='labels.tif'),
    '3 x uint8, 1,000 polygons': dict(scenes='u8.tif', labels='1000.gpkg'),
    '3 x uint8, 100,000 polygons': dict(scenes='u8.tif', labels='100000.gpkg'),
}


def write_data(root: Path, size: int) -> None:
    """Write two scenes, a label raster, and two files of polygons."""
    random = np.random.RandomState(0)
    coarse = random.randint(0, 256, (size // 64, size // 64), np.uint8)
    smooth = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
    noise = random.randint(0, 12, (4, size, size), np.uint8)
    labels = smooth // 40
    labels[: size // 8, : size // 8] = 255
    for name, values in (
        ('u8', noise[:3] + (smooth // 2)[None]),
        ('labels', labels[None]),
        ('u16', (noise + smooth[None] // 2).astype(np.uint16) * 9),
    ):
        with rasterio.open(
            root / f'{name}.tif',
            'w',
            driver='GTiff',
            height=size,
            width=size,
            count=len(values),
            dtype=values.dtype,
            tiled=True,
            blockxsize=512,
            blockysize=512,
            compress='deflate',
            interleave='pixel',
            **GRID,
        ) as file:
            file.write(values)
    for count in (1000, 100_000):
        places = np.column_stack(
            (random.uniform(5e5, 5e5 + size / 2, count), random.uniform(4e6 - size / 2, 4e6, count))
        )
        shapes = shapely.buffer(shapely.points(places), random.uniform(1, 8, count), quad_segs=4)
        names = np.array(CLASSES, object)[random.randint(1, len(CLASSES), count)]
        pyogrio.raw.write(
            str(root / f'{count}.gpkg'),
            shapely.to_wkb(shapes),
            [names],
            ['class_name'],
            geometry_type='Polygon',
            crs='EPSG:32650',
            driver='GPKG',
        )


def serve(root: Path, case: str, samples: int) -> None:
    """Load ``samples`` windows for each line of the input; print milliseconds and a digest."""
    from mapsage.engine.loading.build import build_keyed_loader

    cv2.setNumThreads(1)
    pipeline = [
        dict(type='LoadGeoTiffWindow'),
        dict(type='LoadGeoTiffLabels'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackSegInputs'),
    ]
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                type='GeoTiffDataset',
                data_root=str(root),
                window=512,
                stride=384,
                **CASES[case],
                metainfo=dict(classes=CLASSES, palette=[[8 * n] * 3 for n in range(len(CLASSES))]),
                pipeline=pipeline,
            )
        )
        batches = iter(
            build_keyed_loader(
                dict(
                    dataset=dataset,
                    batch_size=1,
                    num_workers=0,
                    collate_fn=dict(type='pseudo_collate'),
                    sampler=dict(type='InfiniteSampler', shuffle=True),
                ),
                0,
            )
        )
    for _ in sys.stdin:
        spent, digest = 0.0, hashlib.blake2b(digest_size=8)
        for _ in range(samples):
            start = time.process_time()
            batch = next(batches)
            spent += time.process_time() - start
            digest.update(batch['inputs'][0].numpy().tobytes())
            digest.update(batch['data_samples'][0].gt_sem_seg.data.long().numpy().tobytes())
        print(f'{spent / samples * 1e3} {digest.hexdigest()}', flush=True)


def measure(
    root: Path, case: str, checkouts: List[Path], samples: int, rounds: int
) -> List[List[float]]:
    """Return the milliseconds per sample of each round, of each checkout."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                '-W',
                'ignore',
                str(Path(__file__).resolve()),
                '--serve',
                str(root),
                case,
                '--samples',
                str(samples),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=str(checkout),
            env=dict(os.environ, MEASURED_CHECKOUT=str(checkout)),
        )
        for checkout in checkouts
    ]
    times: List[List[float]] = [[] for _ in checkouts]
    for number in range(rounds + 1):
        digests = []
        for spent, process in zip(times, processes):
            assert process.stdin and process.stdout
            process.stdin.write('\n')
            process.stdin.flush()
            milliseconds, digest = process.stdout.readline().split()
            digests.append(digest)
            # The first round fills GDAL's cache of blocks.
            if number:
                spent.append(float(milliseconds))
        if len(set(digests)) > 1:
            sys.exit(f'{case}: round {number} has other samples: {digests}')
    for process in processes:
        process.communicate()
    return times


def main() -> None:
    """Measure the cases in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--against', type=Path, default=ROOT, help='folder of the other checkout')
    parser.add_argument('--size', type=int, default=4096, help='side of the scene in pixels')
    parser.add_argument('--samples', type=int, default=40, help='windows in a round')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--serve', nargs=2, metavar=('DATA', 'CASE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), args.serve[1], args.samples)
        return
    print(
        f'{describe_machine()}, rasterio {rasterio.__version__}, GDAL '
        f'{rasterio.__gdal_version__}\n| samples | other checkout, ms | this checkout, ms | '
        f'ratio |\n|---|---|---|---|'
    )
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), args.size)
        for case in CASES:
            before, after = measure(
                Path(folder), case, [args.against.resolve(), ROOT], args.samples, args.rounds
            )
            ratios = [new / old for old, new in zip(before, after)]
            print(
                f'| {case} | {statistics.median(before):.2f} | {statistics.median(after):.2f} | '
                f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |',
                flush=True,
            )


if __name__ == '__main__':
    main()
