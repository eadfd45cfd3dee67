"""The page where something is missing, odd or gone: a sentence, and never a blank page."""

from __future__ import annotations

import functools
import http.server
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from affine import Affine
from rasterio.enums import Resampling
from rasterio.warp import calculate_default_transform, reproject
from support import PATIENT, ROOT
from view_maps import NOWHERE, UTM, WRONG, Folders, add_large_map, add_map, folders, write_raster
from viewer_page import Page, serving, viewing

from mapsage.extras.viewer import ViewSession, find_maps, write_static

WRONG_COLOR = [230, 0, 200]
RIGHT = 475 / 600, 225 / 400  # a place, in shares of width and height, that is the map's half
MISTAKEN = 275 / 600, 125 / 400  # a place where the map is wrong


def class_color(value: int) -> Any:
    return [40 * value % 256, 255 - value, value]


@pytest.fixture
def two(tmp_path: Path) -> Folders:
    """Provide two maps."""
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    add_map(where, 'b', polygons=False)
    return where


def test_the_last_of_quick_keys_counts(browser: Any, two: Folders) -> None:
    labels = add_map(two, 'c', classes=4, polygons=False)
    with viewing(two) as viewer:
        page = Page(browser, viewer)
        for key in 'nNnNN':  # to the second and back, twice, and round to the third
            page.page.keyboard.press(key)
        page.wait_for('c')
        page.press('ss')  # the map alone
        assert page.page.evaluate('viewer.map().getLayers().getLength()') == 3
        value = int(labels[225, 475])
        assert page.color(*RIGHT) == class_color(value)
        page.press(str(value + 1))
        assert page.color(*RIGHT) != class_color(value)
        page.close()


def test_a_map_that_goes_while_it_is_shown_is_said(browser: Any, two: Folders) -> None:
    with viewing(two) as viewer:
        page = Page(browser, viewer)
        (two.maps / 'b.tif').unlink()
        page.page.keyboard.press('n')
        page.sentence('b.tif was removed')
        page.page.fill('#least', '50')  # nothing is there to hide
        page.page.keyboard.press('n')
        page.wait_for('a')
        assert page.page.is_hidden('#sentence')
        # the file itself has gone under the picture, and the user looks closer
        (two.maps / 'a_confidence.tif').unlink()
        page.page.evaluate(
            'viewer.map().getView().setResolution(viewer.map().getView().getMinResolution())'
        )
        page.page.reload()
        page.sentence('a_confidence.tif was removed')
        page.close(complaints=True)


def test_the_first_map_is_gone_and_the_second_is_shown(browser: Any, two: Folders) -> None:
    with viewing(two) as viewer:
        (two.maps / 'a.tif').unlink()
        page = Page(browser, viewer, name=None)
        page.sentence('a.tif was removed')
        assert '600 × 400 pixels' in page.panel()
        page.page.keyboard.press('f')
        page.page.keyboard.press('n')
        page.wait_for('b')
        assert page.page.is_hidden('#sentence')
        assert not page.page.evaluate('viewer.state.errors.length > 1')
        page.close(complaints=True)


@pytest.mark.parametrize(
    'crs, step', [('EPSG:32631', 0.7), ('EPSG:32632', 1.0), ('EPSG:4326', None)]
)
def test_labels_on_another_grid(browser: Any, tmp_path: Path, crs: str, step: Any) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a', confidence=False, polygons=False)
    labels[WRONG] = (labels[WRONG] + 1) % 6
    left, bottom, right, top = 300000, 3400000 - 200, 300300, 3400000
    place, width, height = calculate_default_transform(
        UTM['crs'], crs, 600, 400, left, bottom, right, top, resolution=step
    )
    place, width, height = place * Affine.translation(-7.3, -5.6), width + 20, height + 20
    moved = np.full((height, width), 255, np.uint8)
    reproject(
        labels,
        moved,
        src_transform=UTM['transform'],
        src_crs=UTM['crs'],
        src_nodata=255,
        dst_transform=place,
        dst_crs=crs,
        dst_nodata=255,
        resampling=Resampling.nearest,
    )
    (where.truth / 'a.tif').unlink()
    write_raster(where.truth / 'a.tif', moved[None], crs, place)
    with viewing(where) as viewer:
        page = Page(browser, viewer)
        right_share = float(
            re.search(r'([\d.]+) % of [\d,]+ labeled pixels are right', page.panel()).group(1)
        )
        assert 94 < right_share <= 98.5  # 97.9 on the map's own grid; borders move by a pixel
        page.press('ssd')
        assert page.color(*MISTAKEN) == WRONG_COLOR and page.color(*RIGHT) != WRONG_COLOR
        page.press('t')
        assert page.color(*MISTAKEN) == class_color(int(labels[125, 275]))
        page.close()


def test_labels_and_scenes_that_nothing_places(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a', **NOWHERE)
    for folder in (where.truth, where.scenes):
        write_raster(folder / 'a.tif', np.zeros((3, 30, 50), np.uint8), None, None)
    with viewing(where) as viewer:
        page = Page(browser, viewer)
        for kind in ('truth', 'scene'):
            assert f'The {kind} is not shown' in page.panel()
        assert '50 x 30' in page.panel() and '600 x 400' in page.panel()
        assert page.color(*RIGHT) == class_color(int(labels[225, 475]))
        page.press('tds')  # keys for what is not there
        assert page.color(*RIGHT) == class_color(int(labels[225, 475]))
        page.close()


@pytest.mark.long
def test_the_last_of_150_classes_is_switched(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a', size=(1600, 1600), classes=150, confidence=False, polygons=False)
    place = 825 / 1600, 975 / 1600
    assert labels[975, 825] == 149
    with viewing(where) as viewer:
        page = Page(browser, viewer)
        page.press('ss')
        assert page.color(*place) == class_color(149)
        assert 'class 149' in page.click(*place)
        page.page.locator('input[data-value="149"]').uncheck()
        page.drawn()
        assert page.color(*place) != class_color(149)
        page.close()


@pytest.fixture
def site(two: Folders) -> Path:
    """Provide the folder of --static."""
    session = ViewSession(find_maps([two.maps], two.scenes, two.truth))
    session.prepare()
    return write_static(session, two.maps.parent / 'site').parent


class _Host(http.server.SimpleHTTPRequestHandler):
    """A web server without byte ranges, which may answer with its first page for what it lacks."""

    def __init__(self, *arguments: Any, friendly: bool = False, **named: Any) -> None:
        self.friendly = friendly
        super().__init__(*arguments, **named)

    def log_message(self, *arguments: Any) -> None:
        pass

    def translate_path(self, path: str) -> str:
        found = super().translate_path(path)
        return found if Path(found).exists() or not self.friendly else super().translate_path('/')


def host(site: Path, **named: Any) -> Any:
    handler = functools.partial(_Host, directory=str(site), **named)
    return serving(http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler))


def test_a_folder_on_a_host_without_parts(browser: Any, site: Path) -> None:
    with host(site) as url:
        page = Page(browser, url, name=None)
        page.sentence('does not know byte ranges')
        assert '600 × 400 pixels' in page.panel()
        page.close()
    (site / 'catalog.json').unlink()
    with host(site) as url:
        page = Page(browser, url, name=None)
        page.sentence('catalog.json cannot be read (status 404)')
        page.close(complaints=True)
    with host(site, friendly=True) as url:
        page = Page(browser, url, name=None)
        page.sentence('catalog.json is not what tools/view.py writes')
        page.close()


def test_a_folder_on_a_host_with_parts(browser: Any, two: Folders, site: Path, server: Any) -> None:
    site.rename(two.maps.parent / 'served' / 'site')
    page = Page(browser, f'{server.url}/ok/site/index.html', name=None)
    page.foreign.clear()  # its own files lie next to index.html
    page.wait_for('a')
    page.press('d')
    assert 'are right' in page.panel() and page.page.is_hidden('#sentence')
    assert all(each.startswith(f'{server.url}/ok/site/') for each in page.requests)
    assert page.complaints == []
    page.page.close()


def test_a_folder_that_is_opened_as_a_file(browser: Any, site: Path) -> None:
    page = Page(browser, (site / 'index.html').as_uri(), name=None)
    page.sentence('file://')
    page.page.close()


def test_without_webgl(chromium: Any, two: Folders) -> None:
    with viewing(two) as viewer:
        page = Page(chromium('--disable-gpu', '--disable-3d-apis'), viewer, name=None)
        page.sentence('no WebGL')
        page.close()


@pytest.mark.long
def test_a_large_map_takes_few_requests(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_large_map(where, 'a', 20000)
    with viewing(where._replace(truth=None)) as viewer:
        page = Page(browser, viewer)
        assert len(page.requests) <= 12, page.requests
        page.page.evaluate("""() => { const view = viewer.map().getView();
            view.setCenter([300000 + 7475 / 2, 3400000 - 12225 / 2]); view.setResolution(0.5); }""")
        page.drawn()
        value = int(labels[12225 // 50, 7475 // 50])
        assert page.color(7475.5 / 20000, 12225.5 / 20000) == class_color(value)
        assert f'class {value}' in page.click(7475.5 / 20000, 12225.5 / 20000)
        page.close()


@pytest.mark.long
def test_the_command_shows_maps_until_it_is_ended(browser: Any, two: Folders) -> None:
    command = subprocess.Popen(  # a job in the background of a script would ignore Ctrl+C
        [
            'env',
            '--default-signal=INT',
            sys.executable,
            'tools/view.py',
            str(two.maps),
            '--scenes',
            str(two.scenes),
        ],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    try:
        assert command.stdout is not None
        found = re.search(r'2 map\(s\): open (\S+) in a browser', command.stdout.readline())
        assert found is not None
        page = Page(browser, found.group(1))
        command.send_signal(signal.SIGINT)
        assert command.wait(PATIENT) == 0
        page.page.keyboard.press('n')
        page.sentence('does not answer')
        page.close(complaints=True)
    finally:
        command.kill()


def test_a_link_is_opened_reloaded_and_followed_from_another_site(
    browser: Any, two: Folders
) -> None:
    with viewing(two) as viewer:
        link = viewer.url
        page = Page(browser, viewer)
        assert page.page.url.partition('#')[0] == link.partition('?')[0]
        page.page.reload()
        page.wait_for('a')
        stranger = browser.new_page()  # with no cookie of the other page
        for address in (link, page.page.url):
            answer = stranger.goto(address)
            assert answer.status == 403
            assert 'Open the last link that it printed' in stranger.inner_text('body')
        stranger.goto(f'data:text/html,<a href="{viewer.url}">a terminal on a page</a>')
        stranger.click('a')
        stranger.wait_for_function('document.body.dataset.ready === "a"')
        stranger.close()
        page.page.goto(link)  # a bookmark, or the history
        page.wait_for('a')
        page.close()
