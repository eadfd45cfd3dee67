"""Windows a second: GeoTiffDataset against the same windows cut beforehand into PNG tiles.

    python tools/benchmarks/geotiff_windows.py [--size 4096] [--window 512] [--passes 2]

One scene of three bands, with labels, is written tiled (COG-like, 256 pixels), striped, and as PNG
tiles. Every pass reads each window once, image and label; the ways to read take turns. The files
are in the page cache: it is decoding that is measured. GDAL's cache of decoded blocks, 256 MB by
default, is cut to a fifth of the scene, as it would be for a scene of 20,000 x 20,000 pixels.
"""
import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import rasterio
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _common import describe_machine  # noqa: E402
from mmengine.registry import DATASETS, DefaultScope  # noqa: E402
from rasterio.transform import from_origin  # noqa: E402

import mapsage  # noqa: E402, F401

METAINFO = dict(classes=('a', 'b', 'c', 'd'), palette=[[0] * 3, [80] * 3, [160] * 3, [240] * 3])
LAYOUTS = dict(
    tiled=dict(tiled=True, blockxsize=256, blockysize=256), striped=dict(tiled=False))


def write(root: Path, size: int, window: int) -> None:
    random = np.random.RandomState(0)
    coarse = random.randint(0, 255, (size // 16, size // 16, 3)).astype(np.uint8)
    image = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
    image = cv2.add(image, random.randint(0, 12, image.shape).astype(np.uint8))  # sensor noise
    labels = cv2.resize(coarse[..., 0] // 64, (size, size), interpolation=cv2.INTER_NEAREST)
    for name, layout in LAYOUTS.items():
        for kind, values in (('scenes', image.transpose(2, 0, 1)), ('labels', labels[None])):
            path = root / name / kind / 'a.tif'
            path.parent.mkdir(parents=True)
            with rasterio.open(path, 'w', driver='GTiff', width=size, height=size, dtype='uint8',
                               count=len(values), compress='deflate', predictor=2,
                               interleave='pixel', crs='EPSG:32650',
                               transform=from_origin(5e5, 4e6, 0.5, 0.5), **layout) as file:
                file.write(values)
    for kind in ('img', 'ann'):
        (root / 'png' / kind).mkdir(parents=True)
    for row in range(0, size, window):
        for column in range(0, size, window):
            inside = np.s_[row:row + window, column:column + window]
            name = f'{row:06}_{column:06}.png'
            cv2.imwrite(str(root / 'png/img' / name), image[inside][..., ::-1])
            cv2.imwrite(str(root / 'png/ann' / name), labels[inside])


def build(root: Path, name: str, window: int) -> torch.utils.data.Dataset:
    load = ['LoadImageFromFile', 'LoadAnnotations'] if name == 'png' else [
        'LoadGeoTiffWindow', 'LoadGeoTiffLabels']
    config = dict(data_root=str(root / name), metainfo=METAINFO,
                  pipeline=[dict(type=t) for t in (*load, 'PackSegInputs')])
    config.update(dict(type='BaseSegDataset', img_suffix='.png',
                       data_prefix=dict(img_path='img', seg_map_path='ann')) if name == 'png' else
                  dict(type='GeoTiffDataset', scenes='scenes', labels='labels', window=window))
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(config)


def rate(dataset, order, workers: int) -> float:
    """Read all windows in an order, after a first batch that starts the workers."""
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, sampler=[*order[:4 * max(workers, 1)], *order],
        num_workers=workers, collate_fn=len)
    batches = iter(loader)
    for _ in range(max(workers, 1)):
        next(batches)
    start = time.perf_counter()
    count = sum(batches)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--size', type=int, default=4096, help='side of the scene in pixels')
    parser.add_argument('--window', type=int, default=512, help='side of a window in pixels')
    parser.add_argument('--passes', type=int, default=2, help='the best one counts')
    args = parser.parse_args()
    os.environ['GDAL_CACHEMAX'] = str(max(1, args.size ** 2 * 3 // 5000000))  # read at first use
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, args.size, args.window)
        datasets = {name: build(root, name, args.window) for name in ('png', *LAYOUTS)}
        indices = list(range(len(datasets['png'])))
        orders = dict(sequential=indices,
                      random=np.random.RandomState(0).permutation(indices).tolist())
        best: dict = {}
        for _ in range(args.passes):
            for workers in (0, 2):
                for order, which in orders.items():
                    for name, dataset in datasets.items():
                        found = rate(dataset, which, workers)
                        best[workers, order, name] = max(found, best.get((workers, order, name), 0))
    print(f'{describe_machine()}, rasterio {rasterio.__version__}, GDAL '
          f'{rasterio.__gdal_version__}; {args.size} x {args.size} pixels, 3 bands, '
          f'{len(indices)} windows of {args.window} with labels; windows a second')
    print('| workers | order | PNG tiles | tiled GeoTIFF | ratio | striped GeoTIFF | ratio |')
    print('|---|---|---|---|---|---|---|')
    for workers in (0, 2):
        for order in orders:
            png, tiled, striped = (best[workers, order, name] for name in ('png', *LAYOUTS))
            print(f'| {workers} | {order} | {png:.0f} | {tiled:.0f} | {tiled / png:.2f} | '
                  f'{striped:.0f} | {striped / png:.2f} |')


if __name__ == '__main__':
    main()
