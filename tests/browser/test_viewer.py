"""The page of tools/view.py in a real browser: pixels, keys, clicks, and what cannot be shown.

They need Debian's Chromium and playwright (``apt-get install chromium``).
"""
from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List

import cv2
import numpy as np
import pytest
from support import main_leg
from view_maps import NOWHERE, TURNED, Folders, add_map, folders

from mapsage.viewer import ViewServer, ViewSession, find_maps, write_static

sync_api = pytest.importorskip('playwright.sync_api')
CHROMIUM = shutil.which('chromium')
pytestmark = [main_leg, pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium')]
PATIENCE = 120000  # milliseconds
WEBGL = ['--use-angle=swiftshader', '--enable-unsafe-swiftshader', '--ignore-gpu-blocklist']


@pytest.fixture(scope='module')
def chromium() -> Iterator[Any]:
    """Provide a function that starts a browser with more arguments."""
    started: List[Any] = []
    with sync_api.sync_playwright() as play:
        def start(*arguments: str) -> Any:
            started.append(play.chromium.launch(executable_path=CHROMIUM, args=[
                '--no-sandbox', '--disable-background-networking', *arguments]))
            return started[-1]

        yield start
        for each in started:
            each.close()


@pytest.fixture(scope='module')
def browser(chromium: Any) -> Any:
    """Provide a browser that draws by WebGL in software."""
    return chromium(*WEBGL)


@contextmanager
def serving(server: Any) -> Iterator[str]:
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()


@contextmanager
def viewing(where: Folders) -> Iterator[str]:
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    with serving(ViewServer(session)) as url:
        yield url


class Page:
    """A page with what it asked for and what it complained of.

    Args:
        browser: Browser of playwright.
        url: Address of the page.
        name: Map whose picture must be there; None where nothing can be drawn.
    """

    def __init__(self, browser: Any, url: str, name: Any = 'a') -> None:
        self.page = browser.new_page(viewport=dict(width=1000, height=600))
        self.foreign: List[str] = []
        self.complaints: List[str] = []
        self.page.on('request', lambda request: self.foreign.append(request.url) if not
                     request.url.startswith((url, 'blob:', 'data:')) else None)
        self.page.on('console', lambda message: self.complaints.append(message.text)
                     if message.type == 'error' else None)
        self.page.on('pageerror', lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        if name is not None:
            self.wait_for(name)

    def wait_for(self, name: str) -> None:
        self.page.wait_for_function(f'document.body.dataset.ready === {json.dumps(name)}',
                                    timeout=PATIENCE)

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.drawn()

    def drawn(self) -> None:
        """Wait until everything is drawn that has been asked for."""
        self.page.evaluate('''() => new Promise((done) => {
            viewer.map().once('rendercomplete', done); viewer.map().render(); })''')

    def color(self, share: float, height: float) -> List[int]:
        """Return red, green and blue at a place of the map, in shares of its width and height."""
        x, y = self.page.evaluate('''([share, height]) => {
            const [left, bottom, right, top] = viewer.state.extent;
            return viewer.map().getPixelFromCoordinate(
                [left + share * (right - left), top - height * (top - bottom)]); }''',
                                  [share, height])
        picture = cv2.imdecode(np.frombuffer(self.page.screenshot(), np.uint8), cv2.IMREAD_COLOR)
        return picture[int(y), int(x), ::-1].tolist()

    def click(self, share: float, height: float) -> str:
        x, y = self.page.evaluate('''([share, height]) => {
            const [left, bottom, right, top] = viewer.state.extent;
            return viewer.map().getPixelFromCoordinate(
                [left + share * (right - left), top - height * (top - bottom)]); }''',
                                  [share, height])
        self.page.mouse.click(x, y)
        return self.page.inner_text('#status')

    def sentence(self) -> str:
        self.page.wait_for_selector('#sentence:not([hidden])', timeout=PATIENCE)
        return self.page.inner_text('#sentence')


@pytest.fixture(scope='module')
def shown(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Provide the page of three maps, and the classes of the first."""
    where = folders(tmp_path_factory.mktemp('view'))
    labels = add_map(where, 'a')
    add_map(where, 'b 影像', classes=150, confidence=False, polygons=False, **NOWHERE)
    add_map(where, 'c', **TURNED)
    with viewing(where) as url:
        page = Page(browser, url)
        yield page, labels
        assert page.foreign == [] and page.complaints == []
        page.page.close()


def class_color(value: int) -> List[int]:
    return [40 * value % 256, 255 - value, value]


def test_scene_and_map_lie_under_a_swipe(shown: Any) -> None:
    page, labels = shown
    value = int(labels[225, 475])
    assert page.color(475 / 600, 225 / 400) == class_color(value)
    left = page.color(125 / 600, 225 / 400)  # the scene, after JPEG
    value = int(labels[225, 125])
    assert np.abs(np.subtract(left, [value * 40, value, 255 - value])).max() < 12
    for _ in range(8):
        page.press('[')
    assert page.color(125 / 600, 225 / 400) == class_color(value)
    for _ in range(8):
        page.press(']')


def test_classes_confidence_and_disagreement(shown: Any) -> None:
    page, labels = shown
    place, value = (475 / 600, 225 / 400), int(labels[225, 475])
    page.press(str(value + 1))
    assert page.color(*place) != class_color(value)
    page.press(str(value + 1))
    assert page.color(*place) == class_color(value)
    page.page.fill('#least', '95')
    page.drawn()
    assert page.color(*place) != class_color(value)  # its confidence is 90 %
    page.page.fill('#least', '85')
    page.drawn()
    assert page.color(*place) == class_color(value)
    page.page.fill('#least', '0')
    page.press('s')
    page.press('s')  # the map alone
    page.press('d')
    wrong = page.color(275 / 600, 125 / 400)
    assert wrong == [230, 0, 200] and page.color(*place) != wrong
    page.press('t')
    assert page.color(275 / 600, 125 / 400) == class_color((int(labels[125, 275]) + 1) % 6)
    page.press('m')
    page.press('s')
    assert 'are right' in page.page.inner_text('#panel')


def test_a_click_tells_class_confidence_truth_and_polygon(shown: Any) -> None:
    page, labels = shown
    page.press('p')
    page.page.wait_for_function('viewer.state.layers.polygons.getSource().getFeatures().length',
                                timeout=PATIENCE)
    value = int(labels[125, 475])
    said = page.click(475 / 600, 125 / 400)
    assert f'class {value}' in said and f'truth: class {value}' in said
    assert 'confidence 90 %' in said
    assert f'polygon: class {value}, 625 m²' in said
    assert '300237.5, 3399937.5' in said
    assert 'no data' in page.click(10 / 600, 5 / 400)
    page.press('p')


def test_the_next_map_has_no_crs_and_150_classes(shown: Any) -> None:
    page, _ = shown
    page.page.keyboard.press('n')
    page.wait_for('b 影像')
    assert 'no CRS' in page.page.inner_text('#panel')
    assert page.page.locator('.class').count() == 150
    assert page.color(475 / 600, 225 / 400) == class_color(4 * 7 + 9)
    page.page.keyboard.press('n')
    page.wait_for('c')  # its grid is rotated
    assert page.color(0.5, 0.5) != [139, 147, 156]
    page.page.keyboard.press('n')
    page.wait_for('a')


def test_a_map_that_goes_while_it_is_shown_is_said(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    add_map(where, 'b', polygons=False)
    with viewing(where) as url:
        page = Page(browser, url)
        (where.maps / 'b.tif').unlink()
        page.page.keyboard.press('n')
        assert 'b.tif was removed' in page.sentence()
        page.page.close()


def test_a_folder_on_a_server_with_and_without_parts(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    session = ViewSession(find_maps([where.maps], where.scenes))
    session.prepare()
    page_file = write_static(session, tmp_path / 'site')
    poor = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / 'site'))
    poor.log_message = lambda *arguments: None  # type: ignore[attr-defined]
    with serving(http.server.ThreadingHTTPServer(('127.0.0.1', 0), poor)) as url:
        page = Page(browser, url, name=None)
        assert 'does not know byte ranges' in page.sentence()
        page.page.close()
    page = Page(browser, page_file.as_uri(), name=None)
    assert 'file://' in page.sentence()
    page.page.close()


def test_without_webgl(chromium: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    with viewing(where) as url:
        page = Page(chromium('--disable-gpu', '--disable-3d-apis'), url, name=None)
        assert 'no WebGL' in page.sentence()
