"""Write the pictures of the gallery from the work dirs of the demo and of its dynamic sampling.

    python scripts/docs_site/take_pictures.py DEMO DYNAMIC FOLDER

``scripts/make_gallery.sh`` makes the work dirs first. The viewer and the report are photographed in
Debian's Chromium. Every picture is at most 1,200 pixels wide, of at most 256 colors.
``gallery.json`` next to them has the headings of what was photographed:
tests/browser/test_gallery.py compares those of the kept pictures with the code of today.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1200  # pixels
CHROMIUM_OPTIONS = [
    '--no-sandbox',
    '--use-angle=swiftshader',
    '--enable-unsafe-swiftshader',
    '--ignore-gpu-blocklist',
    '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
]


def write(image: Image.Image, path: Path) -> None:
    """Write a picture of at most ``WIDTH`` pixels with a palette, which makes it small."""
    image = image.convert('RGB')
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.LANCZOS)
    image.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
    print(f'{path}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB')


def read_headings(page: Any) -> List[str]:
    """Return the headings of a page, from top to bottom."""
    return page.eval_on_selector_all(
        'h1, h2, h3',
        """headings => headings.filter(
        heading => heading.offsetParent).map(heading => heading.innerText.trim())""",
    )


def photograph_report(browser: Any, report: Path, picture: Path) -> List[str]:
    """Take a picture of the top of a run's report; return its headings without the run's name."""
    page = browser.new_page(viewport=dict(width=1200, height=1000))
    page.goto(report.resolve().as_uri())
    page.screenshot(path=str(picture))
    headings = read_headings(page)[1:]
    page.close()
    return headings


def photograph_viewer(browser: Any, maps: Path, truth: Path, picture: Path) -> List[str]:
    """Take a picture of the viewer with scene and map under the swipe; return its headings."""
    viewer = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / 'tools' / 'view.py'),
            str(maps),
            '--truth',
            str(truth),
            '--reduce-zero-label',
        ],
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    try:
        line = next(line for line in viewer.stdout or () if 'http://' in line)
        address = next(word for word in line.split() if word.startswith('http://'))
        page = browser.new_page(viewport=dict(width=1200, height=760))
        page.goto(address)
        page.wait_for_function("document.body.dataset.ready === 'scene'")
        page.wait_for_load_state('networkidle')
        # The whole resolution comes after the picture of the map.
        page.evaluate("""() => new Promise(done => {
            viewer.map().once('rendercomplete', done); viewer.map().render(); })""")
        page.screenshot(path=str(picture))
        headings = read_headings(page)
        page.close()
        return headings
    finally:
        viewer.terminate()
        viewer.wait(30)


def main() -> int:
    """Write the pictures that the command line names; return the exit status."""
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    demo, dynamic, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which('chromium')
    if chromium is None:
        print('Chromium is not installed: apt-get install chromium', file=sys.stderr)
        return 1
    taken = folder / 'taken.png'
    write(Image.open(demo / 'preview.png'), folder / 'preview.png')
    write(Image.open(demo / 'map' / 'preview.png'), folder / 'map.png')
    write(Image.open(dynamic / 'dynamic_sampling.png'), folder / 'sampling.png')
    headings: Dict[str, List[str]] = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
        headings['report'] = photograph_report(browser, demo / 'report.html', taken)
        write(Image.open(taken), folder / 'report.png')
        headings['viewer'] = photograph_viewer(
            browser, demo / 'map', Path('data/demo/scene_label.tif'), taken
        )
        write(Image.open(taken), folder / 'viewer.png')
        browser.close()
    taken.unlink()
    (folder / 'gallery.json').write_text(json.dumps(headings, indent=1) + '\n', encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main())
