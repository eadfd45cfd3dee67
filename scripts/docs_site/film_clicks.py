"""Write a moving picture of labels by clicks: the page of `mapsage view`, clicked by Chromium.

    python scripts/docs_site/film_clicks.py EMBEDDING.tif POINTS.gpkg OUT.gif

The points are clicked one after the other, in the order of the file, by the names and colors that
they have there. docs/tutorials/ten-clicks.md makes both files; playwright is in the environment
``browser`` of scripts/setup_env.sh.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import List

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts/docs_site')]

from take_pictures import CHROMIUM_OPTIONS  # noqa: E402

from mapsage.extras.embeddings.labeling import ClickedMap  # noqa: E402
from mapsage.extras.viewer import Labeling, ViewServer, ViewSession  # noqa: E402

WIDTH, HEIGHT, SHOWN = 1100, 640, 760  # pixels
STILL, LAST = 800, 3000  # milliseconds
COLORS = 128
SETTLED = (
    '!viewer.labels().busy && (document.body.dataset.version || 0) == viewer.labels().state.version'
)


def save_film(frames: List[Image.Image], target: Path, durations: List[int]) -> None:
    """Write pictures of equal size as a GIF.

    Args:
        frames: RGB pictures. The colors of the film are those of the first, the middle and the last one.
        target: File to write.
        durations: Milliseconds of each picture.
    """
    width, height = frames[0].size
    shown = [frames[0], frames[len(frames) // 2], frames[-1]]
    together = Image.new('RGB', (width, len(shown) * height))
    for number, frame in enumerate(shown):
        together.paste(frame, (0, number * height))
    palette = together.quantize(COLORS)
    stills = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    stills[0].save(
        target, save_all=True, append_images=stills[1:], duration=durations, loop=0, optimize=True
    )
    print(f'{target}: {len(stills)} pictures, {target.stat().st_size / 1000:.0f} kB')


def film(embedding: str, points: str, target: Path) -> None:
    """Click the points of a file, and write what the page shows after each."""
    from playwright.sync_api import sync_playwright

    clicks = Labeling(ClickedMap([embedding]), points).describe()
    colors = {row['name']: row['color'] for row in clicks['classes']}
    frames: List[Image.Image] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        labeling = Labeling(ClickedMap([embedding]), str(Path(folder) / 'points.gpkg'))
        browser = play.chromium.launch(
            executable_path=shutil.which('chromium'), args=CHROMIUM_OPTIONS
        )
        with ViewServer(ViewSession([]), labeling=labeling) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page = browser.new_page(viewport=dict(width=WIDTH, height=HEIGHT))
            page.set_default_timeout(120_000)
            page.goto(server.url)
            page.wait_for_function('document.body.dataset.ready')

            def photograph() -> None:
                image = Image.open(io.BytesIO(page.screenshot())).convert('RGB')
                size = SHOWN, round(image.height * SHOWN / image.width)
                frames.append(image.resize(size, Image.LANCZOS))

            photograph()
            known: List[str] = []
            for point in clicks['points']:
                if point['name'] not in known:
                    known.append(point['name'])
                    if len(known) > 2:
                        page.click('text=new class')
                    page.evaluate(
                        '([number, name, color]) => { const labels = viewer.labels();'
                        ' labels.rename(labels.names[number], name); labels.recolor(name, color); }',
                        [len(known) - 1, point['name'], colors[point['name']]],
                    )
                page.check(f'input[name=label][value="{point["name"]}"]')
                place = page.evaluate(
                    'point => viewer.map().getPixelFromCoordinate([point.x, -point.y])', point
                )
                page.mouse.click(*place)
                page.wait_for_function(SETTLED)
                page.evaluate(
                    'new Promise(done => { viewer.map().once("rendercomplete", done);'
                    ' viewer.map().render(); })'
                )
                photograph()
            server.shutdown()
        browser.close()
    save_film(frames, target, [STILL] * (len(frames) - 1) + [LAST])


if __name__ == '__main__':
    film(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
