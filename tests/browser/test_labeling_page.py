"""Labels by clicks in a real browser: a map that follows them, undo, classes, doubt, the file."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np
import pyogrio.raw
import pytest
import shapely
from affine import Affine
from embedding_runs import unit_vectors
from rasterio.transform import from_origin
from support import main_leg
from viewer_page import Page, serving

from mapsage.extras.embeddings import classify
from mapsage.extras.embeddings.embedding_file import EmbeddingWriter, write_cog
from mapsage.extras.embeddings.labeling import ClickedMap
from mapsage.extras.embeddings.vectors import NO_DATA, SCHEME, quantize, to_unit
from mapsage.extras.viewer import Labeling, ViewServer, ViewSession
from mapsage.geo import Raster

pytestmark = main_leg

WIDTH, HEIGHT, DIMS = 900, 600, 16
TRANSFORM = from_origin(300000, 3400000, 10, 10)


def kinds() -> np.ndarray:
    """Return what lies on the ground: 0 to 2, in three columns; 3 in a strip at the bottom."""
    ground = np.broadcast_to(np.arange(WIDTH) * 3 // WIDTH, (HEIGHT, WIDTH)).copy()
    ground[500:] = 3
    return ground


def write_embedding(path: Path, transform: Affine = TRANSFORM) -> Path:
    """Write an embedding whose vectors scatter about one for each kind, without data top left."""
    random = np.random.RandomState(0)
    centers = unit_vectors(random, DIMS, 4)
    vectors = centers[:, kinds()] + 0.1 * random.standard_normal((DIMS, HEIGHT, WIDTH))
    stored = quantize(to_unit(vectors.astype(np.float32)))
    stored[:, :100, :100] = NO_DATA
    facts = dict(identity=dict(encoder='test'), dequantize=SCHEME)
    working = path.with_suffix('.working')
    with EmbeddingWriter(working, WIDTH, HEIGHT, DIMS, 'EPSG:32631', transform, facts) as writer:
        writer.write(0, stored)
    write_cog(working, path)
    return path


@pytest.fixture(scope='module')
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(tmp_path_factory.mktemp('embedding') / 'ground.tif')


@contextmanager
def labeling(embedding: Path, points: Path) -> Iterator[ViewServer]:
    labels = Labeling(ClickedMap([str(embedding)]), str(points))
    with serving(ViewServer(ViewSession([]), labeling=labels)) as viewer:
        yield viewer


class LabelPage(Page):
    """A page that labels."""

    def label(self, share: float, height: float, key: str = '') -> None:
        """Click on a place with the class of a key; wait until its map is drawn."""
        if key:
            self.page.keyboard.press(key)
        self.page.mouse.click(*self.place(share, height))
        self.settled()

    def settled(self) -> None:
        """Wait until the map on the page is that of the labels."""
        self.page.wait_for_function(
            '!viewer.labels().busy && (document.body.dataset.version || 0) == '
            'viewer.labels().state.version'
        )
        self.drawn()

    def values(self, share: float, height: float) -> List[int]:
        """Return class and confidence of the map at a place."""
        pixel = self.place(share, height)
        data = self.page.evaluate(
            'pixel => Array.from(viewer.state.layers.classes.getData(pixel) || [])', pixel
        )
        return [int(value) for value in data]

    def points(self) -> List[Any]:
        return self.page.evaluate('viewer.labels().state.points')


def read_points(path: Path) -> List[Tuple[float, float, str, str]]:
    _, _, geometry, (names, colors) = pyogrio.raw.read(path)
    places = shapely.get_coordinates(shapely.from_wkb(geometry))
    return [(*place, *row) for place, *row in zip(places.tolist(), names, colors)]


def test_clicks_make_a_map_and_a_file(browser: Any, embedding: Path, tmp_path: Path) -> None:
    file = tmp_path / 'points.gpkg'
    with labeling(embedding, file) as viewer:
        page = LabelPage(browser, viewer, 'ground')
        # A picture before any label: three kinds have three colors, no data has none.
        colors = [page.color(share, 0.3) for share in (0.2, 0.5, 0.8)]
        assert len({tuple(color) for color in colors}) == 3
        page.label(0.2, 0.5, '1')
        assert page.values(0.5, 0.5) == [255, 255]
        page.label(0.5, 0.5, '2')
        assert page.values(0.2, 0.2)[0] == 0 and page.values(0.5, 0.2)[0] == 1
        page.page.click('text=new class')
        page.label(0.8, 0.5)
        assert [page.values(share, 0.2)[0] for share in (0.2, 0.5, 0.8)] == [0, 1, 2]
        assert page.values(0.02, 0.02) == [255, 255]
        assert page.page.inner_text('#points') == f'3 points in {file}'
        saved = read_points(file)
        assert [row[2] for row in saved] == ['class 1', 'class 2', 'class 3']
        assert saved[1][:2] == pytest.approx((300000 + 4500, 3400000 - 3000), abs=60)
        # Undo takes back the third, on the map and in the file.
        page.page.keyboard.press('z')
        page.settled()
        assert page.values(0.8, 0.2)[0] != 2 and read_points(file) == saved[:2]
        page.close()
    # The file is one of mapsage classify, which agrees with the page.
    status = classify.main([str(embedding), '--labels', str(file), '--out', str(tmp_path / 'maps')])
    with Raster(tmp_path / 'maps/ground.tif') as made:
        (classes,), _ = made.read(0, 0, WIDTH, HEIGHT)
    assert status == 0 and (classes[200:400, 50:250] == 0).all() and classes[300, 450] == 1


@pytest.mark.long
def test_names_and_colors_are_kept_when_the_page_is_opened_again(
    browser: Any, embedding: Path, tmp_path: Path
) -> None:
    file = tmp_path / 'points.gpkg'
    with labeling(embedding, file) as viewer:
        page = LabelPage(browser, viewer, 'ground')
        page.label(0.2, 0.5, '1')
        page.label(0.5, 0.5, '2')
        page.page.fill('input[aria-label="name of class 1"]', '水田 <b>rice</b>')
        page.page.keyboard.press('Enter')
        page.settled()
        page.page.evaluate(
            """() => { const input = document.querySelector('#labels input[type=color]');
                input.value = '#00ff00'; input.dispatchEvent(new Event('change')); }"""
        )
        page.settled()
        page.page.evaluate('viewer.state.layers.classes.setOpacity(1)')
        page.drawn()
        assert page.color(0.2, 0.3) == [0, 255, 0]
        page.close()
    assert [row[2:] for row in read_points(file)][0] == ('水田 <b>rice</b>', '#00ff00')
    with labeling(embedding, file) as viewer:
        page = LabelPage(browser, viewer, 'ground')
        assert page.values(0.2, 0.2)[0] == 0 and page.values(0.5, 0.2)[0] == 1
        assert page.page.input_value('input[aria-label="name of class 1"]') == '水田 <b>rice</b>'
        assert len(page.points()) == 2
        page.close()


@pytest.mark.long
def test_where_it_is_unsure(browser: Any, embedding: Path, tmp_path: Path) -> None:
    with labeling(embedding, tmp_path / 'points.gpkg') as viewer:
        page = LabelPage(browser, viewer, 'ground')
        for share, key in ((0.2, '1'), (0.5, '2')):
            page.label(share, 0.3, key)
        sure, unsure = page.values(0.2, 0.2)[1], page.values(0.8, 0.2)[1]
        assert sure > 65 > unsure
        page.press('i')
        red, _, blue = page.color(0.8, 0.3)
        assert red > 150 > blue
        page.page.keyboard.press('u')
        assert 'least sure' in page.sentence('least sure')
        x, y = page.page.evaluate('viewer.map().getView().getCenter()')
        # Of neither kind that has a label.
        assert kinds()[int(-y), int(x)] in (2, 3)
        page.close()


@pytest.mark.long
def test_clicks_on_no_data_and_many_at_once(browser: Any, embedding: Path, tmp_path: Path) -> None:
    file = tmp_path / 'points.gpkg'
    with labeling(embedding, file) as viewer:
        page = LabelPage(browser, viewer, 'ground')
        page.page.mouse.click(*page.place(0.05, 0.05))
        assert 'ground.tif has no data at' in page.sentence('no data')
        assert page.points() == [] and not file.exists()
        # Faster than the server fits: all of them count, in their order.
        for number in range(6):
            page.page.keyboard.press('12'[number % 2])
            page.page.mouse.click(*page.place((0.2, 0.5)[number % 2], 0.3 + 0.05 * number))
        page.page.wait_for_function('viewer.labels().state.points.length === 6')
        page.settled()
        assert [point['name'] for point in page.points()] == ['class 1', 'class 2'] * 3
        assert len(read_points(file)) == 6
        page.close(complaints=True)
