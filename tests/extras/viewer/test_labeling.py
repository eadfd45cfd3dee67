"""The points of a page that labels: what is accepted, undone, written, read and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pyogrio.raw
import pytest
import shapely
from support import main_leg
from view_maps import NOWHERE, TURNED, UTM, open_link, request, serving, write_raster

from mapsage.extras.viewer import Labeling, ViewError, ViewServer, ViewSession
from mapsage.extras.viewer.labeling import LabelSource

pytestmark = main_leg


class Rasters(LabelSource):
    """Rasters of 60 x 40 pixels without data left of column 5, and a map that notes its points."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.fitted: List[Any] = []

    def commands(self, points: Path) -> List[str]:
        return [f'map {points}']

    def has_data(self, file: int, x: float, y: float) -> bool:
        return 5 <= x < 60 and 0 <= y < 40

    def fit(self, points: Sequence[Any], names: Sequence[str]) -> None:
        self.fitted.append((list(points), list(names)))

    def least_sure(self, file: int, points: Sequence[Any]) -> Tuple[float, float]:
        return 10.5, 20.5

    def tile(self, file: int, kind: str, level: int, column: int, row: int) -> bytes:
        if level > 1 or file >= len(self.paths):
            raise IndexError
        return f'{file} {kind} {level} {column} {row}'.encode()


def rasters(folder: Path, *places: Dict[str, Any]) -> Rasters:
    image = np.ones((3, 40, 60), np.uint8)
    paths = [folder / f'{number}.tif' for number in range(len(places))]
    for path, place in zip(paths, places):
        write_raster(path, image, **place)
    return Rasters(paths)


def add(x: float, y: float, name: str, file: int = 0, color: str = '#102030') -> Dict[str, Any]:
    return dict(do='add', file=file, x=x, y=y, name=name, color=color)


def read(path: Path) -> List[Tuple[float, float, str, str]]:
    _, _, geometry, (names, colors) = pyogrio.raw.read(path)
    places = shapely.get_coordinates(shapely.from_wkb(geometry)).round(3).tolist()
    return [(*place, *row) for place, *row in zip(places, names, colors)]


def test_points_are_written_renamed_and_undone(tmp_path: Path) -> None:
    path, source = tmp_path / '点.gpkg', rasters(tmp_path, UTM)
    labeling = Labeling(source, str(path))
    labeling.change(add(10.5, 2.5, 'wet'))
    labeling.change(add(20.5, 4.5, 'dry', color='#ffffff'))
    expected = [
        (300005.25, 3399998.75, 'wet', '#102030'),
        (300010.25, 3399997.75, 'dry', '#ffffff'),
    ]
    assert read(path) == expected
    labeling.change(dict(do='rename', name='wet', to='dry'))
    assert [row[2:] for row in read(path)] == [('dry', '#ffffff')] * 2
    labeling.change(dict(do='color', name='dry', color='#000000'))
    state = labeling.change(dict(do='undo'))
    assert state['classes'] == [dict(name='dry', color='#ffffff')]
    assert labeling.change(dict(do='undo'))['undo'] == 2 and read(path) == expected
    assert source.fitted[-1][1] == ['wet', 'dry']
    for _ in range(3):
        labeling.change(dict(do='undo'))
    assert read(path) == [] and labeling.describe()['undo'] == 0


@pytest.mark.parametrize('place', [UTM, TURNED, NOWHERE])
def test_a_file_is_read_again(tmp_path: Path, place: Dict[str, Any]) -> None:
    source = rasters(tmp_path, place)
    first = Labeling(source, str(tmp_path / 'points.gpkg'))
    first.change(add(10.5, 2.5, 'wet'))
    first.change(add(20.25, 4.75, 'dry'))
    points = Labeling(source, str(tmp_path / 'points.gpkg')).describe()['points']
    for point, expected in zip(points, first.describe()['points']):
        assert (point['file'], point['name']) == (expected['file'], expected['name'])
        assert (point['x'], point['y']) == pytest.approx((expected['x'], expected['y']), abs=1e-3)
    assert len(points) == 2


def test_rasters_of_two_zones_share_a_file(tmp_path: Path) -> None:
    source = rasters(tmp_path, UTM, TURNED)
    first = Labeling(source, str(tmp_path / 'points.gpkg'))
    first.change(add(10.5, 2.5, 'wet'))
    first.change(add(30.5, 20.5, 'wet', file=1))
    points = Labeling(source, str(tmp_path / 'points.gpkg')).describe()['points']
    assert [point['file'] for point in points] == [0, 1]
    assert (points[1]['x'], points[1]['y']) == pytest.approx((30.5, 20.5), abs=0.01)


@pytest.mark.parametrize(
    'change',
    [
        {},
        dict(do='dance'),
        dict(do='rename', name='unknown', to='x'),
        dict(do='rename', name='wet', to=' '),
        dict(do='color', name='unknown', color='#000000'),
        dict(do='color', name='wet', color='red'),
        dict(do='color', name='wet', color=3),
        add(10, 10, ''),
        add(10, 10, 'wet', file=-1),
        add(10, 10, 'wet', file=7),
        dict(add(10, 10, 'wet'), file='0'),
        dict(add(10, 10, 'wet'), x=[]),
        add(float('nan'), 10, 'wet'),
        add(float('inf'), 10, 'wet'),
        add(2, 10, 'wet'),
    ],
)
def test_a_request_that_is_none_changes_nothing(tmp_path: Path, change: Dict[str, Any]) -> None:
    path = tmp_path / 'points.gpkg'
    labeling = Labeling(rasters(tmp_path, UTM), str(path))
    labeling.change(add(10.5, 2.5, 'wet'))
    before = path.read_bytes(), labeling.describe()
    with pytest.raises(ViewError, match='no change of labels|has no data at|is no '):
        labeling.change(change)
    assert (path.read_bytes(), labeling.describe()) == before


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    source = rasters(tmp_path, UTM)

    def write(name: str, fields: List[str], layer: str = 'points', x: float = 300005) -> Path:
        path = tmp_path / f'{name}.gpkg'
        shapes = shapely.to_wkb(np.array([shapely.Point(x, 3399990)], object))
        values = [np.array(['#000000'], object) for _ in fields]
        options: Dict[str, Any] = dict(driver='GPKG', layer=layer, geometry_type='Point')
        pyogrio.raw.write(str(path), shapes, values, fields, crs='EPSG:32631', **options)
        return path

    Labeling(source, str(write('fine', ['class', 'color'])))
    for path, text in (
        (write('more', ['class', 'color', 'note']), 'name another one'),
        (write('layer', ['class', 'color'], 'fields'), 'name another one'),
        (write('far', ['class', 'color'], x=0), 'outside'),
    ):
        before = path.read_bytes()
        with pytest.raises(ViewError, match=text):
            Labeling(source, str(path))
        assert path.read_bytes() == before
    (tmp_path / 'text.gpkg').write_text('no database')
    with pytest.raises(ViewError, match='name another one'):
        Labeling(source, str(tmp_path / 'text.gpkg'))
    unwritable = Labeling(source, str(tmp_path / 'missing/points.gpkg'))
    with pytest.raises(ViewError, match='cannot'):
        unwritable.change(add(10.5, 2.5, 'wet'))
    assert unwritable.describe()['points'] == []


def test_the_server_answers_for_labels(tmp_path: Path) -> None:
    labeling = Labeling(rasters(tmp_path, UTM), str(tmp_path / 'points.gpkg'))
    with serving(ViewServer(ViewSession([]), labeling=labeling)) as server:
        cookie = open_link(server.url)

        def get(path: str) -> Tuple[int, bytes]:
            answer, body = request(server, 'GET', path, dict(Cookie=cookie))
            return answer.status, body

        status, body = get('/catalog.json')
        catalog = json.loads(body)
        assert status == 200 and catalog['labels']['points'] == []
        assert [entry['width'] for entry in catalog['maps']] == [60]
        assert get('/labels/0/classes/3/1/2/0') == (200, b'0 classes 1 2 0')
        for path in (
            '/labels/0/classes/3/2/0/0',
            '/labels/9/picture/0/0/0/0',
            '/labels/0/x/0/0/0/0',
        ):
            assert get(path)[0] == 404, path
        origin = server.url.partition('/?')[0]
        headers = {'Cookie': cookie, 'Content-Type': 'application/json', 'Origin': origin}

        def post(content: Any, **more: str) -> Tuple[int, bytes]:
            body = json.dumps(content)
            answer, text = request(server, 'POST', '/labels', {**headers, **more}, body)
            return answer.status, text

        assert json.loads(post(add(10.5, 2.5, 'wet'))[1])['version'] == 1
        status, text = post(add(1, 1, 'wet'))
        assert status == 400 and b'0.tif has no data at 1.0, 1.0' in text
        assert post([1])[0] == 400 and post(add(10.5, 2.5, 'wet'), Origin='http://evil')[0] == 403
        assert len(read(tmp_path / 'points.gpkg')) == 1
    with serving(ViewServer(ViewSession([]))) as server:
        cookie = open_link(server.url)
        answer, _ = request(server, 'GET', '/labels/0/classes/0/0/0/0', dict(Cookie=cookie))
        assert answer.status == 404
