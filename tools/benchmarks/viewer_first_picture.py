"""How long a browser takes to draw a large map the first time, and how many requests it makes.

    bash scripts/setup_env.sh browser        # prints the Python to use, which has playwright
    PYTHON tools/benchmarks/viewer_first_picture.py --folder FOLDER

It needs Debian's Chromium, which draws by WebGL in software. FOLDER keeps the map of 20,000 x
20,000 pixels, its confidence, its scene and its labels for the next time. In turns, a fresh browser
opens the map alone and the map with all of them; time runs from the request for the page until
everything is drawn. The copies for the browser (docs/how-to/maps.md) are there before.
"""

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np
from playwright.sync_api import sync_playwright
from rasterio.transform import from_origin
from rasterio.windows import Window

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from _common import describe_machine  # noqa: E402

from mapsage.extras.viewer import ViewServer, ViewSession, find_maps  # noqa: E402
from mapsage.geo import ClassMapWriter, MapInfo, confidence_path, write_cog  # noqa: E402
from mapsage.geo.gdal_files import open_file  # noqa: E402

PATTERN = 5000  # side in pixels of the content, which repeats
COLORS = [
    (255, 255, 255),
    (255, 0, 0),
    (255, 255, 0),
    (0, 0, 255),
    (159, 129, 183),
    (0, 255, 0),
    (255, 195, 128),
]
PLACE = dict(crs='EPSG:32631', transform=from_origin(300000, 5000000, 0.3, 0.3))


def pattern() -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return classes and confidence, uint8 (H, W), and a scene, uint8 (3, H, W), of patches."""
    random = np.random.default_rng(0)
    coarse = random.random((PATTERN // 50, PATTERN // 50), dtype=np.float32)
    field = cv2.resize(coarse, (PATTERN, PATTERN), interpolation=cv2.INTER_CUBIC)
    field += random.normal(0, 0.01, field.shape).astype(np.float32)  # ragged borders
    scaled = field.clip(0, 0.999) * len(COLORS)
    classes = scaled.astype(np.uint8)
    confidence = (100 - 60 * np.abs(scaled - classes - 0.5)).astype(np.uint8)
    noise = random.integers(0, 40, (3, *field.shape), dtype=np.uint8)
    scene = np.moveaxis(np.array(COLORS, np.uint8)[classes] // 2, -1, 0) + noise
    return classes, confidence, scene


def write_maps(folder: Path, side: int) -> None:
    """Write a map with confidence, and its scene and labels as plain files."""
    classes, confidence, scene = pattern()
    info = MapInfo([f'class {value}' for value in range(len(COLORS))], COLORS, **PLACE)
    for name in ('maps', 'scenes', 'labels'):
        (folder / name).mkdir(parents=True)
    columns = np.arange(side) % PATTERN
    working = folder / 'working.tif'
    profile = dict(
        driver='GTiff',
        width=side,
        height=side,
        dtype='uint8',
        compress='deflate',
        zlevel=1,
        bigtiff='IF_SAFER',
        **PLACE,
    )
    with ClassMapWriter(working, side, side, info, True) as writer, open_file(
        folder / 'scenes' / 'large.tif', 'w', count=3, **profile
    ) as photo, open_file(folder / 'labels' / 'large.tif', 'w', count=1, **profile) as labels:
        for row in range(0, side, 500):
            rows = np.arange(row, min(side, row + 500)) % PATTERN
            strip = np.ix_(rows, columns)
            writer.write(row, classes[strip], confidence[strip])
            window = Window(0, row, side, len(rows))
            photo.write(scene[:, strip[0], strip[1]], window=window)
            labels.write(np.roll(classes, 5, 1)[strip][None], window=window)
    write_cog(confidence_path(working), confidence_path(folder / 'maps' / 'large.tif'))
    write_cog(working, folder / 'maps' / 'large.tif')
    for used in (working, Path(confidence_path(working))):
        used.unlink()


class Opening(NamedTuple):
    """What it took until a page was drawn: time, time of the processor, addresses, bytes."""

    seconds: float
    processor: float
    asked: List[str]
    size: int


def processor_seconds() -> float:
    """Return what the processes below this one, of the browser, have computed for."""
    ticks, parents = {}, {}
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = stat.read_text().rpartition(')')[2].split()
        except OSError:  # it has ended
            continue
        process = int(stat.parent.name)
        parents[process] = int(fields[1])
        ticks[process] = sum(map(int, fields[11:15]))
    below, new = set(), {os.getpid()}
    while new:
        new = {process for process, parent in parents.items() if parent in new}
        below |= new
    return sum(ticks[process] for process in below) / os.sysconf('SC_CLK_TCK')


def first_picture(url: str, play: Any) -> Opening:
    """Open a page in a fresh browser, and wait until all is drawn."""
    browser = play.chromium.launch(
        executable_path=shutil.which('chromium'),
        args=[
            '--no-sandbox',
            '--use-angle=swiftshader',
            '--enable-unsafe-swiftshader',
            '--ignore-gpu-blocklist',
            '--disable-background-networking',
        ],
    )
    page = browser.new_page(viewport=dict(width=1280, height=800))
    asked: List[str] = []
    sizes: List[int] = []
    page.on(
        'request',
        lambda request: asked.append(request.url) if request.url.startswith('http') else None,
    )
    page.on(
        'response',
        lambda answer: (
            sizes.append(int(answer.headers.get('content-length', 0)))
            if answer.url.startswith('http')
            else None
        ),
    )
    start, computed = time.perf_counter(), processor_seconds()
    page.goto(url)
    page.wait_for_function('document.body.dataset.ready', timeout=120000)
    seconds = time.perf_counter() - start
    opening = Opening(seconds, processor_seconds() - computed, list(asked), sum(sizes))
    browser.close()
    return opening


def serve(maps: Sequence[Path], *beside: Any) -> ViewServer:
    """Return a server of maps, all of whose copies are made."""
    session = ViewSession(find_maps(maps, *beside), say=print)
    session.prepare()
    server = ViewServer(session)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--folder', type=Path, required=True, help='folder of the maps')
    parser.add_argument('--side', type=int, default=20000, help='side of the map in pixels')
    parser.add_argument('--rounds', type=int, default=5, help='number of times that each is opened')
    args = parser.parse_args()
    if not (args.folder / 'maps' / 'large.tif').exists():
        shutil.rmtree(args.folder, ignore_errors=True)
        write_maps(args.folder, args.side)
    alone = args.folder / 'alone'
    alone.mkdir(exist_ok=True)
    if not (alone / 'large.tif').exists():
        shutil.copy(args.folder / 'maps' / 'large.tif', alone)
    servers = {
        'map': serve([alone]),
        'map, confidence, scene, labels': serve(
            [args.folder / 'maps'], args.folder / 'scenes', args.folder / 'labels'
        ),
    }
    taken: Any = {name: [] for name in servers}
    with sync_playwright() as play:
        for _ in range(args.rounds):
            for name, server in servers.items():
                taken[name].append(first_picture(server.url, play))
    print(describe_machine(), f'load {os.getloadavg()[0]:.1f}', sep=', ')
    print('| shown | seconds, median | least, most | processor seconds | requests | MB |')
    print('|---|---|---|---|---|---|')
    for name, rounds in taken.items():
        seconds = [each.seconds for each in rounds]
        print(
            f'| {name} | {statistics.median(seconds):.1f} '
            f'| {min(seconds):.1f}, {max(seconds):.1f} '
            f'| {statistics.median(each.processor for each in rounds):.1f} '
            f'| {max(len(each.asked) for each in rounds)} | {rounds[-1].size / 1e6:.1f} |'
        )
    print('\nrequests of the last round:')
    for url in taken[name][-1].asked:
        print('  ' + url.split('/', 3)[-1])


if __name__ == '__main__':
    main()
