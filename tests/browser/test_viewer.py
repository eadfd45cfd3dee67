"""The page of tools/view.py in a real browser: pixels, keys, clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest
from view_maps import NOWHERE, TURNED, WRONG, add_map, folders
from viewer_page import Page, viewing


@pytest.fixture(scope='module')
def shown(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Provide the page of three maps, and the classes of the first."""
    where = folders(tmp_path_factory.mktemp('view'))
    labels = add_map(where, 'a')
    add_map(where, 'b 影像', classes=150, confidence=False, polygons=False, **NOWHERE)
    add_map(where, 'c', **TURNED)
    with viewing(where) as viewer:
        page = Page(browser, viewer)
        yield page, labels
        page.close()


def class_color(value: int) -> List[int]:
    return [40 * value % 256, 255 - value, value]


def test_scene_and_map_lie_under_a_swipe(shown: Any) -> None:
    page, labels = shown
    value = int(labels[225, 475])
    assert page.color(475 / 600, 225 / 400) == class_color(value)
    left = page.color(125 / 600, 225 / 400)  # the scene, after JPEG
    value = int(labels[225, 125])
    assert np.abs(np.subtract(left, [value * 40, value, 255 - value])).max() < 12
    page.press(8 * '[')
    assert page.color(125 / 600, 225 / 400) == class_color(value)
    page.press(8 * ']')


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
    assert 'are right' in page.panel()


def test_the_wheel_zooms_to_the_pointer_also_over_the_border(shown: Any) -> None:
    page, _ = shown
    resolution = 'viewer.map().getView().getResolution()'
    for share in (0.25, 0.5, 0.75):
        x, y = page.place(share, 0.5)
        before = page.page.evaluate(resolution)
        page.page.mouse.move(x, y)
        page.page.mouse.wheel(0, -400)
        page.page.wait_for_function(f'{resolution} < {0.9 * before}')
        page.drawn()
        # The place under the pointer stays there, up to what rounds.
        assert np.abs(np.subtract(page.place(share, 0.5), (x, y))).max() < 8
        page.press('f')
        page.page.wait_for_function(f'{resolution} > {0.9 * before}')


@pytest.mark.long
def test_the_map_lets_the_scene_shine_through(shown: Any) -> None:
    page, labels = shown
    place, value = (475 / 600, 225 / 400), int(labels[225, 475])
    page.page.fill('#opacity', '0')
    page.drawn()
    scene = page.color(*place)
    assert np.abs(np.subtract(scene, [value * 40, value, 255 - value])).max() < 12
    page.page.fill('#opacity', '50')
    page.drawn()
    between = np.add(scene, class_color(value)) / 2
    assert np.abs(np.subtract(page.color(*place), between)).max() < 6
    page.page.fill('#opacity', '100')
    page.drawn()
    assert page.color(*place) == class_color(value)


def test_the_panel_has_the_iou_of_each_class(shown: Any) -> None:
    page, labels = shown
    told = page.page.locator('.class span.iou').all_inner_texts()
    truth = labels.copy()
    truth[WRONG] = (truth[WRONG] + 1) % 6
    expected = [
        100
        * ((labels == value) & (truth == value)).sum()
        / ((labels == value) | (truth == value)).sum()
        for value in range(6)
    ]
    assert told == [f'IoU {share:.1f}' for share in expected]


def test_the_pointer_tells_which_class_was_taken_for_which(shown: Any) -> None:
    page, labels = shown
    value = int(labels[125, 275])

    def under_pointer(share: float, height: float) -> str:  # two quick clicks would zoom
        page.page.mouse.move(*page.place(share, height))
        return page.page.inner_text('#status')

    # the border stands left of it
    page.press(2 * '[')
    assert f'truth: class {(value + 1) % 6}, taken for class {value}' in under_pointer(
        275 / 600, 125 / 400
    )
    assert 'taken for' not in under_pointer(475 / 600, 125 / 400)
    page.press(2 * ']')


def test_a_link_shows_the_same_view(browser: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    add_map(where, 'b', **NOWHERE)
    view = '() => [...viewer.map().getView().getCenter(), viewer.map().getView().getResolution()]'
    with viewing(where) as viewer:
        first = Page(browser, viewer)
        first.press('n')
        first.wait_for('b')
        first.page.evaluate(
            '() => { viewer.map().getView().setCenter([123.25, 77.5]);'
            'viewer.map().getView().setResolution(0.5); }'
        )
        first.page.wait_for_function("location.hash.includes('at=123.25')")
        link, shown = first.page.evaluate('() => location.href'), first.page.evaluate(view)
        assert link.startswith(f'http://127.0.0.1:{viewer.server_port}/#map=b&')
        # another browser, which needs a token as well
        second = Page(browser, f'{viewer.url}#{link.partition("#")[2]}', 'b')
        assert second.page.evaluate(view) == pytest.approx(shown)
        # a link that is pasted into a page that is open
        pasted = '#map=a&at=300100,3399900&resolution=0.25'
        second.page.evaluate(f"() => {{ location.hash = '{pasted}'; }}")
        second.wait_for('a')
        second.page.wait_for_function('viewer.map().getView().getResolution() === 0.25')
        assert second.page.evaluate(view) == pytest.approx([300100, 3399900, 0.25])
        # one of a map that is not here, or of no place, shows the first map
        for wrong in ('#map=gone&at=1,2&resolution=1', '#map=a&at=x&resolution=0'):
            other = Page(browser, viewer.url + wrong)
            assert other.page.evaluate('() => viewer.state.number') == 0
            other.close()
        first.close()
        second.close()


def test_a_click_tells_class_confidence_truth_and_polygon(shown: Any) -> None:
    page, labels = shown
    page.press('p')
    page.page.wait_for_function('viewer.state.layers.polygons.getSource().getFeatures().length')
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
    assert 'no CRS' in page.panel()
    assert page.page.locator('.class').count() == 150
    assert page.color(475 / 600, 225 / 400) == class_color(4 * 7 + 9)
    page.page.keyboard.press('n')
    page.wait_for('c')  # its grid is rotated
    assert page.color(0.5, 0.5) != [139, 147, 156]
    page.page.keyboard.press('n')
    page.wait_for('a')
