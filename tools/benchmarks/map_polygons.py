"""Polygons of a class map with a connected background: memory and time against its height.

    python tools/benchmarks/map_polygons.py [--width 4096] [--heights 4096 16384 65536]

The map is made of round regions of five classes on a background that connects everything. Each
height runs in a separate process; its largest resident set, as the kernel counts it, is given
above the size before it began.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.geo import ClassMapWriter, MapInfo, write_polygons  # noqa: E402

CLASSES = [f'class {number}' for number in range(6)]
_BLOCK = 512


def write_map(path: Path, width: int, height: int) -> None:
    """Write a class map, tiled from one block of about 130 regions."""
    random = np.random.RandomState(0)
    rows, columns = np.mgrid[:_BLOCK, :_BLOCK]
    block = np.zeros((_BLOCK, _BLOCK), np.uint8)
    for _ in range(150):
        row, column = random.randint(10, _BLOCK - 10, 2)
        near = (rows - row) ** 2 + (columns - column) ** 2 < random.randint(2, 20) ** 2
        block[near] = random.randint(1, len(CLASSES))
    block[random.rand(_BLOCK, _BLOCK) < 0.005] = 1  # as in the maps of a model, single pixels
    block[:, -1] = block[-1] = 0
    strip = np.tile(block, (1, -(-width // _BLOCK)))[:, :width]
    with ClassMapWriter(
        path, width, height, MapInfo(CLASSES, [[40 * i] * 3 for i in range(6)])
    ) as writer:
        for row in range(0, height, _BLOCK):
            writer.write(row, strip[: height - row])


def measure(path: Path) -> None:
    """Write the polygons of a map; print their number, seconds, and MB above the start."""
    # A smaller map first, so that libraries and their caches are loaded before the start.
    small = path.with_name('small.tif')
    write_map(small, 600, 600)
    write_polygons(small, path.with_name('small.gpkg'), CLASSES)
    before, start = _peak(), time.monotonic()
    count = write_polygons(path, path.with_suffix('.gpkg'), CLASSES)
    print(count, time.monotonic() - start, _peak() - before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each height and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--width', type=int, default=4096)
    parser.add_argument('--heights', type=int, nargs='+', default=[4096, 16384, 65536])
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(Path(args.measure))
        return
    print(describe_machine())
    print('| map | polygons | seconds | MB above the start |\n| --- | --- | --- | --- |')
    for height in args.heights:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / 'map.tif'
            write_map(path, args.width, height)
            told = subprocess.run(
                [sys.executable, __file__, '--measure', str(path)],
                check=True,
                stdout=subprocess.PIPE,
                universal_newlines=True,
            ).stdout
            count, seconds, memory = map(float, told.split()[-3:])
            print(
                f'| {args.width:,} x {height:,} | {count:,.0f} | {seconds:.0f} | {memory:.0f} |',
                flush=True,
            )


if __name__ == '__main__':
    main()
