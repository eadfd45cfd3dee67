"""The review of tools/view.py in a real browser: keys, tiles on the map, what is in the file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pyogrio.raw
import pytest
from support import main_leg
from view_maps import NOWHERE, TURNED, Folders, add_map, folders, name_scene
from viewer_page import Page, serving

from mapsage.extras.viewer import Review, ViewServer, ViewSession, find_maps
from mapsage.extras.viewer.decisions import read_windows

pytestmark = main_leg


def add_reviewed(where: Folders, name: str, **options: Any) -> Any:
    """Write a map of 600 x 400 pixels that was made with windows of 200; return its classes."""
    labels = add_map(where, name, polygons=False, **options)
    name_scene(where, name, where.scenes / f'{name}.tif', (600, 400), {})
    report = where.maps / f'{name}.json'
    content = json.loads(report.read_text())
    content['settings'].update(window=[200, 200], size=[400, 600])
    report.write_text(json.dumps(content))
    return labels


@contextmanager
def reviewing(where: Folders) -> Iterator[ViewServer]:
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    review = Review(session)
    review.rank()
    with serving(ViewServer(session, review=review)) as viewer:
        yield viewer


class ReviewPage(Page):
    """A page that reviews."""

    def do(self, keys: str) -> Tuple[str, str]:
        """Press keys, one after the other; return what is said of the tile, and its decision."""
        for key in keys:
            self.page.keyboard.press(key)
            self.page.wait_for_function('!viewer.review().busy')
        return self.page.inner_text('#tile'), self.page.inner_text('#decision')

    def class_in_tile(self) -> int:
        """Return the value of the map at 80, 80 pixels of the tile that is outlined."""
        self.drawn()
        return self.page.evaluate("""() => {
            const tile = viewer.review().layer.getSource().getFeatures()[0].getGeometry();
            const [first, , last] = tile.getCoordinates()[0];
            const place = first.map((value, axis) => value + 0.4 * (last[axis] - value));
            const pixel = viewer.map().getPixelFromCoordinate(place);
            return viewer.state.layers.classes.getData(pixel)[0]; }""")

    def share_of_tile(self) -> List[float]:
        """Return the sides of the outlined tile in shares of the view's."""
        return self.page.evaluate("""() => {
            const size = ([left, bottom, right, top]) => [right - left, top - bottom];
            const [width, height] = size(viewer.map().getView().calculateExtent());
            const tile = size(viewer.review().layer.getSource().getExtent());
            return [tile[0] / width, tile[1] / height]; }""")


@pytest.fixture(scope='module')
def where(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Folders, Any]:
    """Provide the folders of three maps, without CRS and rotated ones among them, and classes."""
    made = folders(tmp_path_factory.mktemp('review'))
    labels = add_reviewed(made, 'a')
    add_reviewed(made, 'b 影像', confidence=False, **NOWHERE)
    add_reviewed(made, 'c', **TURNED)
    for name in 'b 影像', 'c':
        (made.truth / f'{name}.tif').unlink()
    return made, labels


def decisions(where: Folders) -> List[Tuple[str, int, int]]:
    return [(each.decision, *each.box[:2]) for each in read_windows(where.maps / 'review.gpkg')]


def test_keys_decide_and_the_file_has_it_at_once(browser: Any, where: Any) -> None:
    folder, labels = where
    with reviewing(folder) as viewer:
        page = ReviewPage(browser, viewer)
        assert 'worst first' in page.page.inner_text('#review')
        assert page.do('q') == ('Tile 1 of 18, a: error 12.5 %', 'not decided')
        assert page.page.evaluate('viewer.swipe().share') == 0  # the map on the whole tile
        assert page.class_in_tile() == labels[80, 280]  # the tile from column 200 on
        assert 0.5 < max(page.share_of_tile()) < 1
        assert page.do('w') == ('Tile 2 of 18, a: error 0.0 %', 'not decided')
        assert decisions(folder) == [('wrong map', 200, 0)]
        page.do('l')
        page.page.click('#review button[data-key=u]')
        page.page.wait_for_function('!viewer.review().busy')
        assert decisions(folder)[1:] == [('wrong label', 0, 0), ('unsure', 400, 0)]
        assert '3 decided, in review.gpkg' in page.page.inner_text('#review')
        assert page.do('k') == ('Tile 3 of 18, a: error 0.0 %', 'unsure')
        assert page.do('kkk') == ('Tile 1 of 18, a: error 12.5 %', 'wrong map')
        assert page.do('z') == ('Tile 3 of 18, a: error 0.0 %', 'not decided')
        assert page.do('z') == ('Tile 2 of 18, a: error 0.0 %', 'not decided')
        assert decisions(folder) == [('wrong map', 200, 0)]
        assert page.do('z') == ('Tile 1 of 18, a: error 12.5 %', 'not decided')
        assert page.do('z')[1] == 'not decided' and page.sentence('Nothing is decided')
        assert decisions(folder) == []
        page.page.keyboard.press('q')
        assert page.page.locator('#tile').count() == 0
        assert page.page.evaluate('viewer.swipe().share') == 0.5
        page.close()


@pytest.mark.long
def test_the_next_viewer_goes_on_and_other_maps_have_their_tiles(browser: Any, where: Any) -> None:
    folder, labels = where
    (folder.maps / 'review.gpkg').unlink(missing_ok=True)
    with reviewing(folder) as viewer:
        page = ReviewPage(browser, viewer)
        page.do('qwr')
        page.close()
    with reviewing(folder) as viewer:
        page = ReviewPage(browser, viewer)
        assert page.do('q') == ('Tile 3 of 18, a: error 0.0 %', 'not decided')
        page.page.keyboard.press('n')
        page.wait_for('b 影像')  # another map is looked at: a key returns, and decides nothing
        assert page.do('w') == ('Tile 3 of 18, a: error 0.0 %', 'not decided')
        assert page.do('jjjj')[0] == 'Tile 7 of 18, c: uncertainty 60.0 %'
        assert page.class_in_tile() == labels[280, 80]  # the grid is rotated
        tile, _ = page.do('j' * 6)
        assert tile == 'Tile 13 of 18, b 影像: neither labels nor confidence to rank by'
        assert page.class_in_tile() == labels[80, 80]
        page.do('l')
        assert decisions(folder)[-1] == ('wrong label', 0, 0)
        shapes = pyogrio.raw.read(str(folder.maps / 'review.gpkg'), layer='review')[2]
        assert [each is None for each in shapes] == [False, False, True]
        page.close()


def test_two_pages_and_a_server_that_does_not_answer(browser: Any, tmp_path: Path) -> None:
    folder = folders(tmp_path)
    add_reviewed(folder, 'a')
    with reviewing(folder) as viewer:
        one, other = ReviewPage(browser, viewer), ReviewPage(browser, viewer)
        other.do('q')
        one.do('qw')
        assert other.do('r')[1] == 'wrong map'
        other.sentence('In the meantime this tile was decided: wrong map')
        assert decisions(folder) == [('wrong map', 200, 0)]
        other.do('r')
        assert decisions(folder) == [('right', 200, 0)]
        one.page.context.set_offline(True)
        assert one.do('u')[1] == 'not decided'
        assert 'does not answer' in one.sentence('Nothing was decided')
        assert decisions(folder) == [('right', 200, 0)]
    one.close(complaints=True)
    other.close(complaints=True)


def test_without_decisions_on_the_server_no_review_is_offered(browser: Any, tmp_path: Path) -> None:
    folder = folders(tmp_path)
    add_reviewed(folder, 'a')
    session = ViewSession(find_maps([folder.maps]))
    session.prepare()
    with serving(ViewServer(session)) as viewer:
        page = ReviewPage(browser, viewer)
        page.page.keyboard.press('q')
        assert page.page.locator('#review').count() == 0
        page.close()
