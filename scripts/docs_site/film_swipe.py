"""Write a moving picture of the viewer: its border goes over a scene and its map, back and forth.

    python scripts/docs_site/film_swipe.py MAP_FOLDER OUT.gif

README.md and the first page of the site show the map of the demo. playwright is in the environment
``browser`` of scripts/setup_env.sh.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

import numpy as np
from film_clicks import save_film
from PIL import Image
from take_pictures import CHROMIUM_OPTIONS, ROOT

WIDTH, HEIGHT, SHOWN = 1000, 560, 640  # pixels
STEPS, STEP, STOP = 11, 110, 1100  # pictures of one way; milliseconds of a picture, and at each end
SHARES = 0.06, 0.72  # of the window that lies left of the border; the list is on the right


def film(maps: str, target: Path) -> None:
    """Move the border of the page that shows a folder of maps, and write what is seen."""
    from playwright.sync_api import sync_playwright

    frames: List[Image.Image] = []
    command = [sys.executable, str(ROOT / 'tools' / 'view.py'), maps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, universal_newlines=True) as viewer:
        try:
            words = (word for line in viewer.stdout or () for word in line.split())
            address = next(word for word in words if word.startswith('http://'))
            with sync_playwright() as play:
                browser = play.chromium.launch(
                    executable_path=shutil.which('chromium'), args=CHROMIUM_OPTIONS
                )
                page = browser.new_page(viewport=dict(width=WIDTH, height=HEIGHT))
                page.set_default_timeout(120_000)
                page.goto(address)
                page.wait_for_function('document.body.dataset.ready')
                page.wait_for_load_state('networkidle')
                # An even motion that slows down at both ends.
                way = (1 - np.cos(np.linspace(0, np.pi, STEPS))) / 2
                for share in SHARES[0] + (SHARES[1] - SHARES[0]) * way:
                    page.evaluate(
                        """share => new Promise(done => {
                        viewer.map().once('rendercomplete', done);
                        viewer.swipe().set(share); viewer.map().render(); })""",
                        float(share),
                    )
                    image = Image.open(io.BytesIO(page.screenshot())).convert('RGB')
                    size = SHOWN, round(image.height * SHOWN / image.width)
                    frames.append(image.resize(size, Image.LANCZOS))
                browser.close()
        finally:
            viewer.terminate()
    durations = [STOP, *[STEP] * (STEPS - 2), STOP]
    save_film(frames + frames[-2:0:-1], target, durations + durations[-2:0:-1])


if __name__ == '__main__':
    film(sys.argv[1], Path(sys.argv[2]))
