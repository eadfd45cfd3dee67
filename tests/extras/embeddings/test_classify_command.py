"""mapsage classify: maps from points, polygons and rasters, on files of several tools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pyogrio.raw
import pytest
import rasterio
import shapely
from embedding_runs import write_alpha_earth, write_tessera
from geo_scenes import CLASSES, PALETTE, UTM, draw_classes, write_raster
from support import main_leg, rest_is_long

from mapsage.extras.embeddings import classify as command

pytestmark = main_leg
sklearn = pytest.importorskip('sklearn')

HEIGHT, WIDTH = 260, 300


def make_vectors(classes: np.ndarray, dims: int = 64, noise: float = 0.6) -> np.ndarray:
    """Return (dims, height, width) unit vectors: a direction for each class, and noise."""
    random = np.random.RandomState(7)
    directions = random.standard_normal((len(CLASSES), dims))
    vectors = directions[classes].transpose(2, 0, 1) + noise * random.standard_normal(
        (dims, *classes.shape)
    )
    return (vectors / np.linalg.norm(vectors, axis=0)).astype(np.float32)


@pytest.fixture(scope='module')
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """True classes, an embedding of them in AlphaEarth's format, and the folder of it."""
    folder = tmp_path_factory.mktemp('place')
    truth = draw_classes(WIDTH, HEIGHT)
    vectors = make_vectors(truth)
    vectors[:, 200:, 250:] = np.nan
    return truth, write_alpha_earth(folder / 'scene.tif', vectors), folder


def write_shapes(
    path: Path, shapes: Sequence[Any], classes: Sequence[Any], crs: Any = 'EPSG:32650', **names: str
) -> Path:
    values = np.array(list(classes), object)
    if all(isinstance(value, (int, float)) for value in classes):
        values = np.array(classes)
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array(shapes)),
        [values],
        [names.get('field', 'class')],
        driver='GPKG',
        layer=names.get('layer', 'labels'),
        geometry_type='Unknown',
        crs=crs,
        append=path.exists(),
    )
    return path


def on_ground(columns: Any, rows: Any) -> Any:
    """Return the coordinates of pixels, for UTM."""
    return UTM['transform'] * (np.asarray(columns), np.asarray(rows))


def draw_points(truth: np.ndarray, count: int, seed: int = 0) -> Any:
    """Return points and class names, ``count`` of each class."""
    random, points, names = np.random.RandomState(seed), [], []
    for label, name in enumerate(CLASSES):
        rows, columns = np.nonzero(truth[:190] == label)
        chosen = random.choice(len(rows), count, replace=False)
        x, y = on_ground(columns[chosen] + 0.5, rows[chosen] + 0.5)
        points += list(shapely.points(x, y))
        names += [name] * count
    return points, names


def run(*arguments: Any) -> int:
    return command.main([str(argument) for argument in arguments])


def read_map(folder: Path, flip: bool = True) -> Any:
    """Return the class names of a map, and its values from the north."""
    with rasterio.open(folder / 'scene.tif') as file:
        names = [each['name'] for each in json.loads(file.tags()['MAPSAGE_CLASSES'])]
        values = file.read(1)
        return names, values[::-1] if flip and file.transform.e > 0 else values


@pytest.mark.parametrize('method', rest_is_long(['probe', 'knn', 'forest'], 'probe'))
def test_points_become_a_map(place: Any, tmp_path: Path, method: str, capsys: Any) -> None:
    truth, embedding, _ = place
    labels = write_shapes(tmp_path / 'p.gpkg', *draw_points(truth, 15))
    out = tmp_path / 'out'
    assert run(embedding, '--labels', labels, '--out', out, '--method', method) == 0
    said = capsys.readouterr().out
    assert '45 labeled cells' in said and 'spatial cross-validation by' in said
    names, values = read_map(out)
    known = values != 255
    assert (~known).sum() == 60 * 50 and (~known)[200:, 250:].all()
    right = np.array(names, object)[values[known]] == np.array(CLASSES, object)[truth[known]]
    assert right.mean() > 0.97
    with rasterio.open(out / 'scene_confidence.tif') as file:
        confidence = file.read(1)
    assert ((confidence == 255) == (values[::-1] == 255)).all() and confidence.min() >= 33
    report = json.loads((out / 'scene.json').read_text())
    assert report['labels'] == dict(ground=15, house=15, water=15)
    scores = report['cross_validation'][method]
    low, high = scores['accuracy'][1:]
    assert low < scores['accuracy'][0] <= high and set(report['cross_validation']) == {
        'probe',
        'knn',
        'forest',
    }
    assert sum(report['pixels'].values()) == known.sum() and report['no_data'] == 3000


def test_its_map_is_ready_for_assess(place: Any, tmp_path: Path) -> None:
    from mapsage.extras.assess import assess

    labels = write_shapes(tmp_path / 'p.gpkg', *draw_points(place[0], 15))
    run(place[1], '--labels', labels, '--out', tmp_path / 'out')
    plan = str(tmp_path / 'plan.gpkg')
    assert (
        assess.main(['plan', str(tmp_path / 'out/scene.tif'), '--points', '60', '--out', plan]) == 0
    )


@pytest.mark.long
def test_labels_in_another_crs(place: Any, tmp_path: Path) -> None:
    import pyproj

    points, names = draw_points(place[0], 15)
    there = pyproj.Transformer.from_crs(32650, 4326, always_xy=True)
    moved = [shapely.Point(*there.transform(point.x, point.y)) for point in points]
    here = write_shapes(tmp_path / 'here.gpkg', points, names)
    degrees = write_shapes(tmp_path / 'degrees.gpkg', moved, names, 'EPSG:4326')
    for number, path in enumerate((here, degrees)):
        run(place[1], '--labels', path, '--out', tmp_path / str(number))
    np.testing.assert_array_equal(read_map(tmp_path / '0')[1], read_map(tmp_path / '1')[1])


def test_polygons_label_the_cells_inside(place: Any, tmp_path: Path, capsys: Any) -> None:
    boxes = [(30, 20, 70, 50, 'house'), (100, 150, 140, 200, 'water'), (120, 20, 260, 90, 'ground')]
    shapes = [
        shapely.box(*on_ground(left, bottom), *on_ground(right, top))
        for left, top, right, bottom, _ in boxes
    ]
    # A number, as in a column of indices, and a label that nobody gave.
    labels = write_shapes(
        tmp_path / 'p.gpkg', [*shapes, shapes[0]], [*(box[4] for box in boxes), None]
    )
    run(place[1], '--labels', labels, '--out', tmp_path / 'out', '--most', 1500, '--block', 20)
    said = capsys.readouterr().out
    assert '4200 labeled cells' in said and 'ground 1500, house 1200, water 1500' in said
    names, values = read_map(tmp_path / 'out')
    truth = place[0]
    assert (
        np.array(names, object)[values[:200, :250]] == np.array(CLASSES, object)[truth[:200, :250]]
    ).mean() > 0.97


@pytest.mark.long
def test_a_raster_of_classes_on_another_grid(place: Any, tmp_path: Path, capsys: Any) -> None:
    """Labels of half the pixel size, in a part of the scene, from the north."""
    truth = place[0]
    part = truth[10:210, 20:240].repeat(2, 0).repeat(2, 1).copy()
    part[:, :10] = 255
    grid = dict(
        UTM,
        transform=UTM['transform']
        * UTM['transform'].translation(20, 10)
        * UTM['transform'].scale(0.5),
    )
    labels = write_raster(tmp_path / 'labels.tif', part, grid)
    with rasterio.open(labels, 'r+') as file:
        file.update_tags(
            MAPSAGE_CLASSES=json.dumps(
                [
                    dict(value=value, name=name, color=color)
                    for value, (name, color) in enumerate(zip(CLASSES, PALETTE))
                ]
            )
        )
    run(place[1], '--labels', labels, '--out', tmp_path / 'out', '--most', 300)
    assert 'ground 300, house 300, water 300' in capsys.readouterr().out
    names, values = read_map(tmp_path / 'out')
    assert names == list(CLASSES)
    assert (values[:190] == truth[:190]).mean() > 0.97
    with rasterio.open(tmp_path / 'out/scene.tif') as file:
        assert [list(file.colormap(1)[number][:3]) for number in range(3)] == PALETTE


@pytest.mark.long
def test_several_files_of_tessera_share_their_labels(tmp_path: Path, capsys: Any) -> None:
    truth = draw_classes(WIDTH, HEIGHT)
    vectors = 3 * make_vectors(truth, 128)
    vectors[:, :5, :5] = 0
    write_tessera(tmp_path / 'in/west.tif', vectors[:, :, :150])
    east = write_tessera(tmp_path / 'in/east.tif', vectors[:, :, 150:])
    with rasterio.open(east, 'r+') as file:
        file.transform = UTM['transform'] * UTM['transform'].translation(150, 0)
    points, names = draw_points(truth, 15)
    outside = shapely.Point(*on_ground(-5, 5))
    empty = shapely.Point(*on_ground(2, 2))
    labels = write_shapes(
        tmp_path / 'p.gpkg', [*points, outside, empty], [*names, 'house', 'house']
    )
    assert run(tmp_path / 'in', '--labels', labels, '--out', tmp_path / 'out') == 0
    said = capsys.readouterr().out
    assert '45 labeled cells' in said and '1 label(s) lie outside the embeddings' in said
    assert '1 label(s) lie on cells without data' in said
    parts = []
    for name in ('west', 'east'):
        with rasterio.open(tmp_path / f'out/{name}.tif') as file:
            parts.append(file.read(1))
    joined = np.concatenate(parts, 1)
    assert (joined == truth)[5:].mean() > 0.97
    # Of another version, they are refused.
    write_tessera(tmp_path / 'in/east.tif', vectors[:, :, 150:], 'v1.1')
    assert run(tmp_path / 'in', '--labels', labels, '--out', tmp_path / 'x') == 1
    assert 'hold vectors of two kinds' in capsys.readouterr().err


def test_a_second_run_and_files_of_others(place: Any, tmp_path: Path, capsys: Any) -> None:
    labels = write_shapes(tmp_path / 'p.gpkg', *draw_points(place[0], 5))
    words = [place[1], '--labels', labels, '--out', tmp_path / 'out']
    assert run(*words) == 0
    before = (tmp_path / 'out/scene.tif').read_bytes()
    assert run(*words) == 0 and 'same settings: skipped' in capsys.readouterr().out
    assert run(*words, '--method', 'knn') == 1
    assert 'was made with another method' in capsys.readouterr().err
    assert (tmp_path / 'out/scene.tif').read_bytes() == before
    assert run(*words, '--method', 'knn', '--overwrite') == 0
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/scene.tif').write_text('of somebody else')
    assert run(*words[:3], '--out', tmp_path / 'mine') == 1
    assert (tmp_path / 'mine/scene.tif').read_text() == 'of somebody else'
    assert run(*words[:3], '--out', place[2]) == 1
    assert 'would overwrite its embedding' in capsys.readouterr().err


def test_bad_labels(place: Any, tmp_path: Path, capsys: Any) -> None:
    points, names = draw_points(place[0], 3)
    far = [shapely.Point(point.x + 1e5, point.y) for point in points]
    lines = [shapely.LineString([point, far[0]]) for point in points]
    table = dict(
        far=(far, names, 'no label of .* lies on the 1 embedding.s. .9 outside'),
        one=(points, ['water'] * 9, 'all 9 labels of .* are of one class, water'),
        none=(points, [None] * 9, 'none of 9 feature.s. has a geometry and a class'),
        lines=(lines, names, 'holds LineString; expected points or polygons'),
    )
    for name, (shapes, values, text) in table.items():
        path = write_shapes(tmp_path / f'{name}.gpkg', shapes, values)
        assert run(place[1], '--labels', path, '--out', tmp_path / 'out') == 1
        assert re.search(text, capsys.readouterr().err), name
    good = write_shapes(tmp_path / 'good.gpkg', points, names, field='art', layer='a')
    for options, text in (
        ([], "0 layers have a field 'class', expected one; it has a: art"),
        (['--field', 'art', '--layer', 'b'], 'it has no layer'),
    ):
        assert run(place[1], '--labels', good, '--out', tmp_path / 'out', *options) == 1
        assert text in capsys.readouterr().err
    assert run(place[1], '--labels', good, '--out', tmp_path / 'out', '--field', 'art') == 0
    capsys.readouterr()
    with pytest.warns(UserWarning):
        bare = write_shapes(tmp_path / 'bare.gpkg', points, names, None)
    assert run(place[1], '--labels', bare, '--out', tmp_path / 'out', '--overwrite') == 1
    assert 'bare.gpkg has no CRS and' in capsys.readouterr().err
    assert run(place[1], '--labels', tmp_path / 'x.gpkg', '--out', tmp_path / 'out') == 1
    assert 'no such file' in capsys.readouterr().err
    assert run(place[1], '--labels', place[1], '--out', tmp_path / 'out') == 1
    assert 'expected one band of class indices' in capsys.readouterr().err


def test_one_block_has_no_scores(place: Any, tmp_path: Path, capsys: Any) -> None:
    labels = write_shapes(tmp_path / 'p.gpkg', *draw_points(place[0], 5))
    run(place[1], '--labels', labels, '--out', tmp_path / 'out', '--block', 1000)
    assert 'all labels lie in one block of 1000, so there are no scores' in capsys.readouterr().out
    assert json.loads((tmp_path / 'out/scene.json').read_text())['cross_validation'] == {}


@pytest.mark.long
def test_numbers_as_classes(place: Any, tmp_path: Path) -> None:
    """A field of numbers, which other programs write as floats where one is missing."""
    points, names = draw_points(place[0], 5)
    values = [float(CLASSES.index(name)) for name in names]
    labels = write_shapes(tmp_path / 'p.gpkg', points, [float('nan'), *values[1:]])
    run(place[1], '--labels', labels, '--out', tmp_path / 'out')
    assert read_map(tmp_path / 'out')[0] == ['0', '1', '2']


def test_without_scikit_learn(place: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    labels = write_shapes(tmp_path / 'p.gpkg', *draw_points(place[0], 5))
    monkeypatch.setitem(__import__('sys').modules, 'sklearn.ensemble', None)
    assert run(place[1], '--labels', labels, '--out', tmp_path / 'out') == 1
    assert 'pip install "mapsage[embeddings]"' in capsys.readouterr().err
