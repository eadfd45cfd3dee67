"""What random windows would gain if several of them shared the blocks that a read decodes.

    GDAL_CACHEMAX=16 OMP_NUM_THREADS=1 python tools/benchmarks/shared_blocks.py

Windows of 512 pixels and their labels are read by rasterio: independent ones, as `windows=random`
draws them, and groups of 2 and 4 windows inside the blocks that the first of them touches, which
GDAL's cache then holds. Beside the processor time of a window stands what the groups do to a batch
of four: the share of its pixels that no other window of the batch shows.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Iterator, List, Tuple

import fast_copy
import numpy as np
import rasterio
from rasterio.windows import Window

from mapsage.geo import write_fast_copy

WINDOW, BLOCK, BATCH = 512, 512, 4
GROUPS = (1, 2, 4)


def draw(random: np.random.RandomState, side: int, group: int) -> Iterator[Tuple[int, int]]:
    """Yield corners of windows, ``group`` of them within the blocks that a window touches."""
    while True:
        first = random.randint(0, side - WINDOW + 1, 2)
        low = first // BLOCK * BLOCK
        # The last start at which a window stays inside of the same blocks.
        high = np.minimum(-(-(first + WINDOW) // BLOCK) * BLOCK, side) - WINDOW
        yield int(first[0]), int(first[1])
        for _ in range(group - 1):
            row, column = random.randint(low, high + 1)
            yield int(row), int(column)


def distinct_share(side: int, group: int, batches: int = 200) -> float:
    """Return the share of a batch's pixels that are distinct places, a mean over batches."""
    corners = draw(np.random.RandomState(0), side, group)
    shares = []
    for _ in range(batches):
        # At a sixteenth of the resolution.
        seen = np.zeros((side // 16, side // 16), bool)
        for _ in range(BATCH):
            row, column = (value // 16 for value in next(corners))
            seen[row : row + WINDOW // 16, column : column + WINDOW // 16] = True
        shares.append(seen.sum() / (BATCH * (WINDOW // 16) ** 2))
    return statistics.mean(shares)


def main() -> None:
    """Print a row for the scene and for its fast copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--side', type=int, default=4096)
    parser.add_argument('--windows', type=int, default=48, help='windows in a round')
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    print(
        f'GDAL_CACHEMAX={os.environ.get("GDAL_CACHEMAX")}; '
        + '; '.join(
            f'groups of {group}: {distinct_share(args.side, group):.2f} of the pixels of '
            f'a batch are distinct'
            for group in GROUPS
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        values = fast_copy.make_scene(3, 'uint8', args.side)
        paths = [Path(folder) / 'scene.tif', Path(folder) / 'labels.tif']
        for path, bands in zip(paths, (values, values[:1] // 37)):
            with rasterio.open(
                path,
                'w',
                driver='GTiff',
                width=args.side,
                height=args.side,
                count=len(bands),
                dtype='uint8',
                compress='deflate',
                tiled=True,
                blockxsize=BLOCK,
                blockysize=BLOCK,
                interleave='pixel',
            ) as file:
                file.write(bands)
            write_fast_copy(str(path), path.with_name(f'fast_{path.name}'))
        print('| file | independent, ms a window | groups of 2 | groups of 4 |\n|---|---|---|---|')
        for prefix, name in (('', 'deflate, tiles of 512'), ('fast_', 'fast copy')):
            files = [rasterio.open(path.with_name(prefix + path.name)) for path in paths]
            streams = [draw(np.random.RandomState(1), args.side, group) for group in GROUPS]
            times: List[List[float]] = [[] for _ in GROUPS]
            for _ in range(args.rounds + 1):
                for stream, seconds in zip(streams, times):
                    start = time.process_time()
                    for _ in range(args.windows):
                        row, column = next(stream)
                        for file in files:
                            file.read(window=Window(column, row, WINDOW, WINDOW))
                    seconds.append((time.process_time() - start) / args.windows * 1e3)
            cells = [
                f'{statistics.median(seconds[1:]):.2f} '
                f'({min(seconds[1:]):.2f}-{max(seconds[1:]):.2f})'
                for seconds in times
            ]
            print(f'| {name} | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
