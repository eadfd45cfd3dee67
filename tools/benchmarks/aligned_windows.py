"""What random windows would gain if they began at the tiles of their files (arXiv 2506.06235).

    OMP_NUM_THREADS=1 python tools/benchmarks/aligned_windows.py

A window of 512 pixels at a random position touches four tiles of 512, an aligned one touches one.
Both are read by rasterio, together with their labels, from files of four codecs: on the local disk
in processor time, and over a local HTTP server that answers every request after 50 ms in elapsed
time. Fast copies of the deflated scene stand beside them. The last column says how many different
windows of 512 a scene has either way.
"""

from __future__ import annotations

import argparse
import atexit
import http.server
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, List

import fast_copy
import numpy as np
import rasterio
from _common import describe_machine
from rasterio.windows import Window

from mapsage.geo import write_fast_copy

WINDOW = 512
CODECS = {
    'deflate': dict(compress='deflate'),
    'LZW': dict(compress='lzw'),
    'JPEG': dict(compress='jpeg', photometric='ycbcr'),
    'ZSTD': dict(compress='zstd'),
}


class Slow(http.server.BaseHTTPRequestHandler):
    """Serves ranges of the files of a folder, each after a delay in seconds."""

    folder, delay = Path(), 0.05
    protocol_version = 'HTTP/1.1'

    def do_GET(self) -> None:
        """Answer with a range of bytes."""
        time.sleep(self.delay)
        path = self.folder / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        ranges = re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
        begin = int(ranges.group(1)) if ranges else 0
        end = (
            min(int(ranges.group(2)) + 1, len(content))
            if ranges and ranges.group(2)
            else len(content)
        )
        self.send_response(206 if ranges else 200)
        if ranges:
            self.send_header('Content-Range', f'bytes {begin}-{end - 1}/{len(content)}')
        self.send_header('Accept-Ranges', 'bytes')
        self.send_header('Content-Length', str(end - begin))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content[begin:end])

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Stay silent."""


def write(path: Path, values: np.ndarray, **codec: Any) -> None:
    """Write a scene or labels in tiles of 512."""
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=values.shape[2],
        height=values.shape[1],
        count=len(values),
        dtype='uint8',
        tiled=True,
        blockxsize=WINDOW,
        blockysize=WINDOW,
        interleave='pixel',
        **codec,
    ) as file:
        file.write(values)


def time_windows(
    names: List[str], side: int, windows: int, rounds: int, clock: Any
) -> List[List[float]]:
    """Return milliseconds a window of each round: at random positions, and aligned to tiles."""
    random = np.random.RandomState(1)
    files = [rasterio.open(name) for name in names]
    times: List[List[float]] = [[], []]
    for _ in range(rounds + 1):
        for step, milliseconds in zip((1, WINDOW), times):
            start = clock()
            for row, column in random.randint(0, (side - WINDOW) // step + 1, (windows, 2)) * step:
                for file in files:
                    file.read(window=Window(column, row, WINDOW, WINDOW))
            milliseconds.append((clock() - start) / windows * 1e3)
    return [milliseconds[1:] for milliseconds in times]


def main() -> None:
    """Print a row for each codec and place."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--side', type=int, default=4096)
    parser.add_argument('--windows', type=int, default=24, help='windows in a round')
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    # So that the scene is much larger than what GDAL keeps, as real scenes are.
    os.environ.update(
        GDAL_CACHEMAX='4',
        CPL_VSIL_CURL_CACHE_SIZE='1000000',
        GDAL_DISABLE_READDIR_ON_OPEN='EMPTY_DIR',
    )
    print(
        f'{describe_machine()}, rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}'
    )
    print(
        '| scene | where | random, ms a window | aligned | random / aligned | windows of a scene, '
        'random / aligned |\n|---|---|---|---|---|---|'
    )
    count = (args.side - WINDOW + 1) ** 2, ((args.side - WINDOW) // WINDOW + 1) ** 2
    with tempfile.TemporaryDirectory() as folder:
        Slow.folder = Path(folder)
        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Slow)
        # A process, because GDAL may hold Python's lock while it waits for an answer.
        process = multiprocessing.get_context('fork').Process(target=server.serve_forever)
        process.start()
        atexit.register(process.kill)
        values = fast_copy.make_scene(3, 'uint8', args.side)
        write(Path(folder) / 'labels.tif', values[:1] // 37, compress='deflate')
        for name, codec in CODECS.items():
            write(Path(folder) / f'{name}.tif', values, **codec)
        for name in ('deflate', 'labels'):
            write_fast_copy(str(Path(folder) / f'{name}.tif'), Path(folder) / f'fast_{name}.tif')
        url = f'/vsicurl/http://127.0.0.1:{server.server_address[1]}'
        for name in (*CODECS, 'fast_deflate'):
            labels = 'fast_labels.tif' if name.startswith('fast') else 'labels.tif'
            for where, root, clock in (
                ('local', folder, time.process_time),
                ('HTTP, 50 ms', url, time.perf_counter),
            ):
                if root == url and name.startswith('fast'):
                    continue
                random, aligned = time_windows(
                    [f'{root}/{name}.tif', f'{root}/{labels}'],
                    args.side,
                    args.windows if root == folder else max(4, args.windows // 4),
                    args.rounds if root == folder else min(3, args.rounds),
                    clock,
                )
                ratios = [one / other for one, other in zip(random, aligned)]
                print(
                    f'| {name.replace("fast_", "fast copy of ")} | {where} | '
                    f'{statistics.median(random):.2f} | {statistics.median(aligned):.2f} | '
                    f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | '
                    f'{count[0]:,} / {count[1]} |',
                    flush=True,
                )


if __name__ == '__main__':
    main()
