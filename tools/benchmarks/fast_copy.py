"""Processor time of a bare read of a random window: from a scene, and from its fast copy.

    GDAL_CACHEMAX=64 python tools/benchmarks/fast_copy.py [--size 6144] [--rounds 7]

Made scenes of smooth ground with noise, in LZW strips and in deflated tiles of 512. Scene and copy
take turns on the same windows of 512 pixels, far more of them than GDAL keeps decoded.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
from _common import describe_machine  # noqa: E402
from rasterio.windows import Window  # noqa: E402
from scipy import ndimage  # noqa: E402

from mapsage.geo import write_fast_copy  # noqa: E402
from mapsage.geo.gdal_files import open_file  # noqa: E402

WINDOW = 512
LAYOUTS = {
    'LZW, strips of one row': dict(compress='lzw', tiled=False, blockysize=1),
    'deflate, tiles of 512': dict(compress='deflate', tiled=True, blockxsize=512, blockysize=512),
}


def make_scene(bands: int, dtype: str, side: int) -> np.ndarray:
    """Return values (bands, side, side): smooth ground, texture and noise of the sensor."""
    random, top = np.random.RandomState(0), 255 if dtype == 'uint8' else 4000
    ground = ndimage.gaussian_filter(random.rand(side // 8, side // 8), 6)
    ground = ndimage.zoom((ground - ground.min()) / np.ptp(ground), 8, order=1)
    texture = ndimage.gaussian_filter(random.rand(side, side).astype('float32'), 1.0) - 0.5
    return np.stack(
        [
            np.clip(
                (ground * (0.5 + 0.1 * band) + texture * 0.5 + 0.1) * top
                + random.randn(side, side) * top / 200,
                0,
                top,
            ).astype(dtype)
            for band in range(bands)
        ]
    )


def time_windows(file: Any, seed: int, count: int = 25) -> float:
    """Return the processor time of reading a window, in milliseconds."""
    corners = np.random.RandomState(seed).randint(0, file.width - WINDOW, (count, 2)).tolist()
    start = time.process_time()
    for column, row in corners:
        file.read(window=Window(column, row, WINDOW, WINDOW))
    return (time.process_time() - start) / count * 1e3


def compare(values: np.ndarray, layout: str, folder: Path, rounds: int) -> str:
    """Write a scene and its copy, and return a row of the table."""
    bands, height, width = values.shape
    scene, copy = folder / 'scene.tif', folder / 'copy.tif'
    with open_file(
        scene,
        'w',
        driver='GTiff',
        count=bands,
        height=height,
        width=width,
        dtype=values.dtype,
        interleave='pixel',
        **LAYOUTS[layout],
    ) as file:
        file.write(values)
    start = time.process_time()
    write_fast_copy(str(scene), copy)
    seconds = time.process_time() - start
    with open_file(scene) as first, open_file(copy) as second:
        pairs = []
        for number in range(rounds):
            if number % 2:
                pairs.append((time_windows(first, number), time_windows(second, number)))
            else:
                copied = time_windows(second, number)
                pairs.append((time_windows(first, number), copied))
    ratios = [original / copied for original, copied in pairs]
    original, copied = (statistics.median(times) for times in zip(*pairs))
    return (
        f'| {bands} {values.dtype} | {layout} | {original:.1f} ms | {copied:.1f} ms | '
        f'{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f}) | '
        f'{scene.stat().st_size / 1e6:.0f} MB | {copy.stat().st_size / 1e6:.0f} MB | '
        f'{seconds:.1f} s |'
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--size', type=int, default=6144, help='side of the scenes in pixels')
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    print(describe_machine(), flush=True)
    for bands, dtype in ((3, 'uint8'), (4, 'uint16')):
        values = make_scene(bands, dtype, args.size)
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as folder:
                print(compare(values, layout, Path(folder), args.rounds), flush=True)


if __name__ == '__main__':
    main()
