"""Labels from polygons, as the dataset of windows reads them."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import numpy as np
import pyogrio.raw
import pyproj
import pytest
import rasterio.transform
import shapely
from geo_scenes import (
    CLASSES,
    DEGREES,
    PALETTE,
    PIXELS,
    UTM,
    draw_classes,
    paint,
    rectangle,
    write_areas,
    write_raster,
)
from geotiff_data import build_dataset, load_window, write_scene, write_vector
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS

from mapsage.datasets.geotiff.summary import summarize
from mapsage.geo import AreaOfInterest, GeoError, Mosaic, Raster, write_polygons
from mapsage.geo.ellipsoid import pixel_sides
from mapsage.geo.gdal_files import open_file


@pytest.mark.parametrize('place', [UTM, DEGREES], ids=['utm', 'degrees'])
def test_polygons_of_a_map_burn_back_into_it(tmp_path: Path, place: dict) -> None:
    """The map's own polygons, without simplification, are labels equal to the map."""
    _, classes = write_scene(tmp_path, place=place)
    write_polygons(tmp_path / 'labels/a.tif', tmp_path / 'map.gpkg', CLASSES, simplify=0)
    dataset = build_dataset(tmp_path, labels='map.gpkg', outside=255)
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        np.testing.assert_array_equal(
            load_window(dataset, index)[1], classes[row : row + side, column : column + side]
        )


@pytest.mark.parametrize('suffix', ['.gpkg', '.geojson'])
def test_polygons_in_another_crs_are_reprojected(tmp_path: Path, suffix: str) -> None:
    write_scene(tmp_path)
    to_degrees = pyproj.Transformer.from_crs(32650, 4326, always_xy=True)
    polygons = [
        shapely.transform(
            rectangle(UTM, *box),
            lambda points: np.stack(to_degrees.transform(points[:, 0], points[:, 1]), 1),
        )
        for box in ((5, 5, 10, 10), (0, 0, 100, 100), (90, 90, 140, 120))
    ]
    write_vector(tmp_path / f'a{suffix}', polygons, [1, 2, 255], 'EPSG:4326', 'kind')
    dataset = build_dataset(tmp_path, labels=f'a{suffix}', class_field='kind')
    expected = np.zeros((260, 300), int)
    expected[:100, :100] = 2  # the largest is drawn first
    expected[90:120, 90:140] = 255
    expected[5:10, 5:10] = 1
    np.testing.assert_array_equal(load_window(dataset, 0)[1], expected[:128, :128])
    np.testing.assert_array_equal(load_window(dataset, 1)[1], expected[:128, 128:256])


def test_polygons_that_meet_no_scene(tmp_path: Path) -> None:
    """Degrees in a file that says UTM; one scene of several without polygons is none of that."""
    write_scene(tmp_path)
    write_vector(tmp_path / 'a.gpkg', [shapely.box(117, 37, 117.1, 37.1)], [1], 'EPSG:32650')
    with pytest.raises(
        GeoError,
        match=r'no polygon of .*a\.gpkg \(CRS WGS 84 / UTM zone 50N\) '
        r'meets a scene: in EPSG:32650, the CRS of .*a\.tif, the polygons lie in '
        r'.* = \(117, 37, 117\.1, 37\.1\), the scene in '
        r'\(500000, 4099870, 500150, 4100000\)\. Check',
    ):
        build_dataset(tmp_path, labels='a.gpkg')
    far = dict(UTM, transform=rasterio.transform.from_origin(600000.0, 4100000.0, 0.5, 0.5))
    write_raster(tmp_path / 'scenes/0.tif', paint(draw_classes()), far)
    write_vector(tmp_path / 'a.gpkg', [rectangle(UTM, 0, 0, 9, 9)], [1], 'EPSG:32650')
    dataset = build_dataset(tmp_path, labels='a.gpkg')
    assert not load_window(dataset, 0)[1].any() and (load_window(dataset, 9)[1] == 1).sum() == 81


@pytest.mark.parametrize('crs', [32650, 32651])
def test_invalid_polygons_are_the_same_in_every_window(tmp_path: Path, crs: int) -> None:
    write_scene(tmp_path)
    x, y, side = 500000.0, 4100000.0, 64.0
    bow_tie = [(x, y), (x + side, y - side), (x + side, y), (x, y - side)]
    hole = [(x + 80, y - 40), (x + 100, y - 40), (x + 100, y - 60), (x + 80, y - 60)]
    polygons = [
        shapely.Polygon(bow_tie),
        shapely.Polygon(shapely.box(x + 70, y - 50, x + 90, y - 10).exterior, [hole]),
        shapely.Polygon([(x, y), (x + 9, y - 9), (x, y)]),
    ]  # a line
    to_crs = pyproj.Transformer.from_crs(32650, crs, always_xy=True)
    write_vector(
        tmp_path / 'a.gpkg',
        [
            shapely.transform(
                polygon, lambda points: np.stack(to_crs.transform(points[:, 0], points[:, 1]), 1)
            )
            for polygon in polygons
        ],
        [1, 2, 1],
        f'EPSG:{crs}',
    )
    with pytest.warns(UserWarning, match=r'a\.gpkg: 1 feature\(s\) without area .* feature 3 of'):
        dataset = build_dataset(tmp_path, labels='a.gpkg')
    labels = dataset.scene_facts[0]['labels']
    assert len(labels._source._in_crs) == 1  # before a worker is forked
    whole, _ = labels.read(0, 0, 300, 260)
    assert whole[3, 64] == whole[125, 64] == 0 and whole[64, 20] == whole[64, 110] == 1
    assert whole[90, 150] == 2 and whole[90, 170] == 0 and whole[110, 190] == 2
    for row in range(0, 250, 10):
        for column in range(0, 300, 10):
            np.testing.assert_array_equal(
                labels.read(column, row, 10, 10)[0], whole[row : row + 10, column : column + 10]
            )


SHEET = shapely.box(3, 60, 4, 61)
WITH_HOLE = shapely.box(2, 59.5, 5, 62).difference(SHEET)


# CRS of scene and polygons, polygons, and the position of the scene's middle in the polygons' CRS.
@pytest.mark.parametrize(
    'crs, side, source, polygons, middle',
    [
        (32631, 10, 4326, [SHEET], (3.5, 60)),
        (32631, 0.5, 4326, [SHEET], (3.5, 60)),
        (32631, 10, 4326, [WITH_HOLE], (3.5, 61)),
        (32631, 10, 4326, [shapely.MultiPolygon([shapely.box(1, 44, 3.2, 45), SHEET])], (2.5, 45)),
        (3035, 100, 4326, [shapely.box(-10, 45, 30, 55)], (5, 55)),
        (3857, 30, 32631, [shapely.box(3e5, 5e6, 7e5, 6e6)], (4e5, 6e6)),
        (4326, 1e-4, 32631, [shapely.box(3e5, 5e6, 7e5, 6e6)], (4e5, 6e6)),
        (3067, 10, 32631, [shapely.box(3e5, 66e5, 7e5, 69e5)], (5e5, 69e5)),
        # An edge along a parallel, near a pole and around it.
        (3413, 10, 4326, [shapely.box(-60, 80, 60, 89.99)], (0, 89.99)),
        (3413, 100, 4326, [shapely.box(-180, 89.5, 180, 90)], (30, 89.5)),
        (3031, 1000, 4326, [shapely.box(-180, -90, 180, -60)], (170, -60)),
        # Edges across the antimeridian: cut as GeoJSON asks for it, beyond 180, and back at -180.
        (
            32660,
            10,
            4326,
            [
                shapely.MultiPolygon(
                    [shapely.box(179, -17, 180, -16), shapely.box(-180, -17, -179, -16)]
                )
            ],
            (179.95, -16),
        ),
        (32660, 10, 4326, [shapely.box(179, 60, 181, 61)], (180, 60)),
        (
            32660,
            10,
            4326,
            [shapely.Polygon([(179, 60), (-179, 60), (-179, 61), (179, 61)])],
            (180, 60),
        ),
    ],
)
def test_edges_lie_where_they_are_in_their_own_crs(
    tmp_path: Path,
    crs: int,
    side: float,
    source: int,
    polygons: List[shapely.Geometry],
    middle: tuple,
) -> None:
    to_source = pyproj.Transformer.from_crs(crs, source, always_xy=True)
    x, y = to_source.transform(*middle, direction='INVERSE')
    transform = rasterio.transform.from_origin(x - 64 * side, y + 64 * side, side, side)
    scene = write_raster(
        tmp_path / 'scenes/a.tif',
        np.full((3, 128, 128), 9, np.uint8),
        dict(crs=CRS.from_epsg(crs), transform=transform),
    )
    write_vector(tmp_path / 'a.gpkg', polygons, [1], f'EPSG:{source}', kind='Unknown')
    rows, columns = np.mgrid[:128, :128] + 0.5
    u, v = to_source.transform(*(transform * (columns, rows)))
    expected = np.zeros((128, 128), bool)
    for part in shapely.get_parts(polygons):
        if 180 < part.bounds[2] - part.bounds[0] < 360:
            part = shapely.transform(part, lambda points: points + (points[:, :1] < 0) * (360, 0))
        for turn in (-360, 0, 360):
            expected |= shapely.contains_xy(part, u + turn, v)
    assert 0.02 < expected.mean() < 0.98
    labels = build_dataset(tmp_path, labels='a.gpkg', window=128).read_labels(0, 0, 0, 128)
    assert (labels != expected).sum() <= 1
    area = AreaOfInterest(tmp_path / 'a.gpkg').of_scene(Raster(scene))
    assert (area.mask(0, 0, 128, 128) != expected).sum() <= 1


def test_scenes_share_polygons_unless_their_pixels_differ(tmp_path: Path) -> None:
    for name, side in (('a', 0.5), ('b', 0.5), ('c', 0.501), ('d', 50)):
        write_scene(
            tmp_path,
            name,
            dict(UTM, transform=rasterio.transform.from_origin(500000.0, 4100000.0, side, side)),
        )
    write_vector(tmp_path / 'a.gpkg', [shapely.box(110, 30, 120, 38)], [1], 'EPSG:4326')
    dataset = build_dataset(tmp_path, labels='a.gpkg')
    placed = dataset.scene_facts[0]['labels']._source._in_crs
    fine, coarse = (
        shapely.get_num_coordinates(polygons.polygons[0]) for polygons in placed.values()
    )
    assert fine > 5 * coarse > 100


@pytest.mark.parametrize('left', [179.7, -180.3])
def test_polygons_across_the_antimeridian(tmp_path: Path, left: float) -> None:
    place = dict(DEGREES, transform=rasterio.transform.from_origin(left, 10.0, 0.01, 0.01))
    write_raster(tmp_path / 'scenes/a.tif', np.full((3, 64, 64), 9, np.uint8), place)
    to_utm = pyproj.Transformer.from_crs(4326, 32660, always_xy=True)
    polygon = shapely.Polygon(
        zip(*to_utm.transform([179.8, 180.2, 180.2, 179.8], [9.9, 9.9, 9.5, 9.5]))
    )
    write_vector(tmp_path / 'a.gpkg', [polygon], [1], 'EPSG:32660')
    mask = load_window(build_dataset(tmp_path, labels='a.gpkg', window=64), 0)[1]
    assert abs(int((mask == 1).sum()) - 1600) <= 80
    assert np.flatnonzero((mask == 1).any(0))[[0, -1]].tolist() == [10, 49]


def test_wrong_vector_labels(tmp_path: Path) -> None:
    write_scene(tmp_path)
    house = rectangle(UTM, 5, 5, 10, 10)
    write_vector(tmp_path / 'a.gpkg', [house, house], ['house', 'Haus'], 'EPSG:32650')
    with pytest.raises(GeoError, match=r"a\.gpkg: field 'class_name' holds Haus; expected a class"):
        build_dataset(tmp_path, labels='a.gpkg')
    with pytest.raises(GeoError, match=r"no field 'kind': layer 'a' has \['class_name'\]"):
        build_dataset(tmp_path, labels='a.gpkg', class_field='kind')
    with pytest.raises(GeoError, match='absent.gpkg: no such file'):
        build_dataset(tmp_path, labels='absent.gpkg')
    with pytest.raises(GeoError, match='outside=3, expected a class index 0 to 2, or 255'):
        build_dataset(tmp_path, labels='a.gpkg', outside=3)
    values = [np.array(['2020-01-01', '2020-01-02'], 'datetime64[ms]'), np.array([1, np.inf])]
    pyogrio.raw.write(
        str(tmp_path / 'd.gpkg'),
        shapely.to_wkb(np.array([house, house])),
        values,
        ['date', 'number'],
        geometry_type='Polygon',
        crs='EPSG:32650',
    )
    for field, text in (('date', '2020-01-01'), ('number', 'inf')):
        with pytest.raises(
            GeoError,
            match=f"field '{field}' holds {text}.*Feature "
            f'{1 + int(field == "number")} of the layer holds {text}',
        ):
            build_dataset(tmp_path, labels='d.gpkg', class_field=field)
    write_vector(tmp_path / 'b.gpkg', [house.centroid], ['house'], 'EPSG:32650', kind='Point')
    with pytest.raises(GeoError, match=r'b\.gpkg: feature 1 .* is a Point, expected polygons'):
        build_dataset(tmp_path, labels='b.gpkg')
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()), PIXELS)
    write_vector(tmp_path / 'c.gpkg', [house], ['house'], 'EPSG:32650')
    with pytest.raises(GeoError, match=r'scenes/a\.tif has no georeference, .*c\.gpkg'):
        build_dataset(tmp_path, labels='c.gpkg')


def test_collections_count_with_their_polygons(tmp_path: Path) -> None:
    """Of nested collections too; overlapping polygons of one feature are no hole."""
    write_scene(tmp_path)
    parts = [rectangle(UTM, 5, 5, 15, 15), rectangle(UTM, 10, 10, 20, 20)]
    line = rectangle(UTM, 0, 0, 30, 30).exterior
    nested = shapely.GeometryCollection(
        [
            shapely.GeometryCollection([shapely.MultiPolygon(parts[1:]), line]),
            parts[0],
            line.centroid,
        ]
    )
    write_vector(tmp_path / 'a.gpkg', [nested], ['house'], 'EPSG:32650', kind='GeometryCollection')
    write_vector(tmp_path / 'b.gpkg', [shapely.union_all(parts)], ['house'], 'EPSG:32650')
    masks = [
        load_window(build_dataset(tmp_path, labels=name), 0)[1] for name in ('a.gpkg', 'b.gpkg')
    ]
    np.testing.assert_array_equal(*masks)
    assert (masks[0] == 1).sum() == 175
    write_vector(
        tmp_path / 'c.gpkg',
        [shapely.GeometryCollection([line])],
        ['house'],
        'EPSG:32650',
        kind='GeometryCollection',
    )
    with pytest.raises(GeoError, match='feature 1 .* is a GeometryCollection, expected polygons'):
        build_dataset(tmp_path, labels='c.gpkg')


@pytest.mark.parametrize(
    'name, words',
    [
        ('a.kml', 'it is KML.*ogr2ogr -f GPKG labels.gpkg .*a.kml'),
        ('a.csv', 'it is a table.*a.csv -oo X_POSSIBLE_NAMES=lon'),
        ('a.zip', 'it is a zip archive.*ogr2ogr -f GPKG labels.gpkg /vsizip/.*a.zip'),
        ('a.gdb', 'it is a FileGDB.*ogr2ogr'),
        ('A.KMZ', 'it is KMZ'),
    ],
)
def test_labels_in_another_format_are_refused_with_a_command(
    tmp_path: Path, name: str, words: str
) -> None:
    write_scene(tmp_path)
    (tmp_path / name).mkdir() if name == 'a.gdb' else (tmp_path / name).write_bytes(b'PK or <kml>')
    with pytest.raises(GeoError, match=words):
        build_dataset(tmp_path, labels=name)
    if name != 'a.gdb':
        with pytest.raises(GeoError, match=words):
            Raster(str(tmp_path / name))
    (tmp_path / 'folder').mkdir()
    (tmp_path / name).rename(tmp_path / 'folder' / name)
    with pytest.raises(
        GeoError, match=f'one label file a.*found {name}' if name[0] == 'a' else 'found none'
    ):
        build_dataset(tmp_path, labels='folder')


def write_layer(
    path: Path, layer: str, box: tuple, field: str = 'class_name', kind: str = 'Polygon'
) -> None:
    """Add a layer of one feature of the class 'house' to a GeoPackage."""
    shape = rectangle(UTM, *box) if kind == 'Polygon' else rectangle(UTM, *box).centroid
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array([shape])),
        [np.array(['house'], object)],
        [field],
        geometry_type=kind,
        crs='EPSG:32650',
        driver='GPKG',
        layer=layer,
        append=path.exists(),
    )


def houses(root: Path, labels: str = 'a.gpkg', **arguments: str) -> int:
    """Return how many pixels of the first window are houses."""
    dataset = build_dataset(root, labels=labels, **arguments)
    return int((load_window(dataset, 0)[1] == 1).sum())


def test_a_layer_is_named_where_several_have_the_field(tmp_path: Path) -> None:
    write_scene(tmp_path)
    path = tmp_path / 'a.gpkg'
    write_layer(path, '2023', (0, 0, 10, 10))
    assert houses(tmp_path) == 100
    write_layer(path, 'Häuser 2024', (0, 0, 20, 20))
    with pytest.raises(
        GeoError,
        match=r"a\.gpkg has 2 layers with the field 'class_name': "
        r"\['2023', 'Häuser 2024'\]\. Set layer to",
    ):
        build_dataset(tmp_path, labels='a.gpkg')
    assert houses(tmp_path, layer='2023') == 100
    assert houses(tmp_path, layer='Häuser 2024') == 400
    with pytest.raises(GeoError, match=r"no layer '2022'; it has \['2023', 'Häuser 2024'\]"):
        build_dataset(tmp_path, labels='a.gpkg', layer='2022')


def test_the_only_layer_with_the_field_is_read_wherever_it_stands(tmp_path: Path) -> None:
    write_scene(tmp_path)
    path = tmp_path / 'a.gpkg'
    write_layer(path, 'areas', (0, 0, 90, 90), field='name')
    write_layer(path, 'centers', (0, 0, 10, 10), kind='Point')
    write_layer(path, 'labels', (0, 0, 10, 10))
    assert houses(tmp_path) == 100
    with pytest.raises(
        GeoError,
        match=r"no field 'kind': layer 'areas' has \['name'\]; "
        r"layer 'centers' has .*; layer 'labels' has",
    ):
        build_dataset(tmp_path, labels='a.gpkg', class_field='kind')
    with pytest.raises(GeoError, match=r"no field 'class_name': layer 'areas' has \['name'\]\. "):
        build_dataset(tmp_path, labels='a.gpkg', layer='areas')


def test_a_layer_of_label_rasters_is_refused(tmp_path: Path) -> None:
    write_scene(tmp_path)
    with pytest.raises(GeoError, match=r"layer='a', but the labels .*a\.tif are a raster"):
        build_dataset(tmp_path, layer='a')


@pytest.mark.parametrize('suffix', ['.gpkg', '.geojson', '.shp'])
def test_polygons_without_a_class_have_the_default_class(tmp_path: Path, suffix: str) -> None:
    """A file of buildings, which has no attribute or others than the class."""
    write_scene(tmp_path)
    path = tmp_path / f'a{suffix}'
    write_vector(path, [rectangle(UTM, 0, 0, 10, 10)], ['school'], 'EPSG:32650', 'purpose')
    if suffix == '.gpkg':
        path.unlink()
        write_areas(path, [rectangle(UTM, 0, 0, 10, 10)], kind='Polygon')
    with pytest.raises(GeoError, match=r"no field 'class_name': .*default_class='house'"):
        build_dataset(tmp_path, labels=path.name)
    for default in ('house', 1):
        dataset = build_dataset(tmp_path, labels=path.name, default_class=default)
        assert (load_window(dataset, 0)[1] == 1).sum() == 100
        assert any(
            "1 feature(s) without a class are 'house'" in text for _, text in summarize(dataset)
        )
    assert houses(tmp_path, labels=path.name, default_class='water') == 0


def test_features_whose_class_is_empty_have_the_default_class(tmp_path: Path) -> None:
    write_scene(tmp_path)
    boxes = [rectangle(UTM, 0, 0, 10, 10), rectangle(UTM, 20, 0, 30, 20)]
    write_vector(tmp_path / 'a.gpkg', boxes, ['water', None], 'EPSG:32650')
    with pytest.raises(
        GeoError,
        match="field 'class_name' holds no value; .*Feature 2 of the "
        'layer holds no value.*default_class',
    ):
        build_dataset(tmp_path, labels='a.gpkg')
    dataset = build_dataset(tmp_path, labels='a.gpkg', default_class='house')
    mask = load_window(dataset, 0)[1]
    assert (mask == 2).sum() == 100 and (mask == 1).sum() == 200
    # a number that is missing is NaN
    pyogrio.raw.write(
        str(tmp_path / 'n.gpkg'),
        shapely.to_wkb(np.array(boxes)),
        [np.array([2, np.nan])],
        ['class_name'],
        geometry_type='Polygon',
        crs='EPSG:32650',
        driver='GPKG',
    )
    assert houses(tmp_path, labels='n.gpkg', default_class='house') == 200


def test_a_default_class_that_does_not_fit(tmp_path: Path) -> None:
    write_scene(tmp_path)
    write_areas(tmp_path / 'a.gpkg', [rectangle(UTM, 0, 0, 10, 10)], kind='Polygon')
    for wrong in ('Haus', 3, 1.5):
        with pytest.raises(GeoError, match=f'default_class={wrong!r}, expected a class of'):
            build_dataset(tmp_path, labels='a.gpkg', default_class=wrong)
    with pytest.raises(
        GeoError,
        match=r"default_class='house', but the labels .*a\.tif are a "
        'raster',
    ):
        build_dataset(tmp_path, default_class='house')
    write_areas(tmp_path / 'a.gpkg', [rectangle(UTM, 0, 0, 20, 20)], layer='2024', kind='Polygon')
    with pytest.raises(GeoError, match=r"2 layers with polygons: \['areas', '2024'\]\. Set layer"):
        build_dataset(tmp_path, labels='a.gpkg', default_class='house')
    assert houses(tmp_path, layer='2024', default_class='house') == 400
    # a layer with the field goes before those without
    write_layer(tmp_path / 'a.gpkg', 'labels', (0, 0, 30, 30))
    assert houses(tmp_path, default_class='water') == 900


@pytest.mark.parametrize('crs', [None, 'EPSG:4326'])
def test_a_scene_with_ground_control_points_alone(tmp_path: Path, crs: Optional[str]) -> None:
    """As scanned maps and raw radar scenes are: QGIS shows them, and no pixel has a place."""
    points = [
        GroundControlPoint(row, column, 10 + column / 1000, 60 - row / 1000)
        for row in (0, 260)
        for column in (0, 300)
    ]
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()), PIXELS)
    with open_file(tmp_path / 'scenes/a.tif', 'r+') as file:
        file.gcps = points, CRS.from_user_input(crs or 'EPSG:32650')
    write_areas(tmp_path / 'a.gpkg', [rectangle(UTM, 0, 0, 10, 10)], kind='Polygon')
    words = r'a\.tif has no georeference, but 4 ground control points \(gdalwarp .* makes'
    with pytest.raises(GeoError, match=words):
        build_dataset(tmp_path, labels='a.gpkg', default_class='house')
    scene = Raster(tmp_path / 'scenes/a.tif')
    assert not scene.is_georeferenced and scene.control_points == 4
    with pytest.raises(GeoError, match=words):
        Mosaic([tmp_path / 'scenes/a.tif'])
    with pytest.raises(GeoError, match=words):
        AreaOfInterest(tmp_path / 'a.gpkg').of_scene(scene)


@pytest.mark.parametrize('field', ['类别', 'class_name'])
@pytest.mark.parametrize('encoding', ['GBK', 'UTF-8', 'ISO-8859-1'])
def test_a_shapefile_that_does_not_say_its_encoding(
    tmp_path: Path, encoding: str, field: str
) -> None:
    """Many programs write no .cpg: the encoding is the one in which the values are classes."""
    names = ('Äcker', 'Häuser') if encoding == 'ISO-8859-1' else ('地面', '房屋')
    field = 'class_name' if encoding == 'ISO-8859-1' else field
    metainfo = dict(classes=(*names, 'water'), palette=PALETTE)
    write_scene(tmp_path)
    write_vector(
        tmp_path / 'a.shp',
        [rectangle(UTM, 0, 0, 10, 10)],
        [names[1]],
        'EPSG:32650',
        field,
        encoding=encoding,
    )
    said = dict(labels='a.shp', metainfo=metainfo, class_field=field)

    def guesses() -> List[str]:
        dataset = build_dataset(tmp_path, **said)
        assert (load_window(dataset, 0)[1] == 1).sum() == 100
        return [text for _, text in summarize(dataset) if 'encoding' in text]

    assert guesses() == []
    (tmp_path / 'a.cpg').unlink()
    (guess,) = guesses()
    assert f'a.shp is read as {encoding}, a guess' in guess and 'a.cpg' in guess
    said['metainfo'] = dict(metainfo, classes=(names[0], 'other', 'water'))
    # Bytes that are no UTF-8 are text in GBK nearly always.
    read_as = 'GBK' if encoding == 'ISO-8859-1' else encoding
    with pytest.raises(GeoError, match=rf'holds .* read as {read_as}, a guess.*a\.cpg'):
        build_dataset(tmp_path, **said)


@pytest.mark.parametrize('field', ['Fläche', 'catégorie', 'été'])
def test_a_field_that_a_wrong_encoding_hides_is_not_taken_for_lacking(
    tmp_path: Path, field: str
) -> None:
    """Latin-1 decodes as GBK too: every polygon would have the default class."""
    write_scene(tmp_path)
    write_vector(
        tmp_path / 'a.shp',
        [rectangle(UTM, 0, 0, 10, 10)],
        ['house'],
        'EPSG:32650',
        field,
        encoding='ISO-8859-1',
    )
    (tmp_path / 'a.cpg').unlink()
    dataset = build_dataset(
        tmp_path,
        labels='a.shp',
        class_field=field,
        default_class='ground',
        metainfo=dict(classes=('ground', 'house', 'water'), palette=PALETTE),
    )
    assert (load_window(dataset, 0)[1] == 1).sum() == 100


def test_where_all_text_is_plain_nothing_is_guessed(tmp_path: Path) -> None:
    write_scene(tmp_path)
    write_vector(tmp_path / 'a.shp', [rectangle(UTM, 0, 0, 10, 10)], ['house'], 'EPSG:32650')
    (tmp_path / 'a.cpg').unlink()
    notes = summarize(build_dataset(tmp_path, labels='a.shp'))
    assert not any('encoding' in text for _, text in notes)
    with pytest.raises(GeoError, match='(?!.*a guess)no field'):
        build_dataset(tmp_path, labels='a.shp', class_field='kind')


@pytest.mark.parametrize('suffix', ['.gpkg', '.shp'])
def test_an_index_as_text_is_the_index(tmp_path: Path, suffix: str) -> None:
    write_scene(tmp_path)
    boxes = [rectangle(UTM, 10 * i, 0, 10 * i + 10, 10) for i in range(4)]
    write_vector(tmp_path / f'a{suffix}', boxes, ['1', '2', '255', ' 01 '], 'EPSG:32650')
    mask = load_window(build_dataset(tmp_path, labels=f'a{suffix}'), 0)[1]
    assert [mask[5, column] for column in (5, 15, 25, 35)] == [1, 2, 255, 1]
    # a class that is called so goes first
    numbered = dict(classes=('2018', '1', '0'), palette=PALETTE)
    mask = load_window(build_dataset(tmp_path, labels=f'a{suffix}', metainfo=numbered), 0)[1]
    assert [mask[5, column] for column in (5, 15)] == [1, 2]
    write_vector(tmp_path / f'b{suffix}', boxes[:1], ['3'], 'EPSG:32650')
    with pytest.raises(GeoError, match='holds 3; expected a class'):
        build_dataset(tmp_path, labels=f'b{suffix}')


@pytest.mark.parametrize('place', [UTM, DEGREES], ids=['utm', 'degrees'])
@pytest.mark.parametrize('crs', ['EPSG:4326', 'EPSG:3857', 'EPSG:32650'])
def test_points_label_disks_on_the_ground(place: dict, crs: str, tmp_path: Path) -> None:
    """The area of a disk is that on the ground, whatever the CRS of the points and the scene."""
    write_scene(tmp_path, place=place)
    with Raster(tmp_path / 'scenes/a.tif') as scene:
        width, height = pixel_sides(scene)
    radius = 12 * max(width, height)
    middles = np.array([(60.0, 50.0), (60.0, 90.0)])
    there = pyproj.Transformer.from_crs(place['crs'], crs, always_xy=True)
    points = shapely.points(np.stack(there.transform(*(place['transform'] * middles.T)), 1))
    write_vector(tmp_path / 'a.gpkg', list(points), ['house', 'water'], crs, kind='Point')
    dataset = build_dataset(tmp_path, labels='a.gpkg', point_radius=radius, outside=255, stride=128)
    mask = dataset.read_labels(0, 0, 0, 128)
    assert set(np.unique(mask)) == {1, 2, 255} and (mask[50, 60], mask[90, 60]) == (1, 2)
    for index in (1, 2):
        rows, columns = np.nonzero(mask == index)
        assert (mask == index).sum() * width * height == pytest.approx(np.pi * radius**2, rel=0.03)
        assert (columns.max() - columns.min() + 1) * width == pytest.approx(2 * radius, rel=0.1)
        assert (rows.max() - rows.min() + 1) * height == pytest.approx(2 * radius, rel=0.1)


def test_points_of_several_parts_and_what_they_need_are_said(tmp_path: Path) -> None:
    write_scene(tmp_path)
    to_map = UTM['transform']
    several = shapely.multipoints([to_map * (10.5, 10.5), to_map * (20.5, 10.5)])
    write_vector(tmp_path / 'a.geojson', [several], ['house'], 'EPSG:32650', kind='MultiPoint')
    settings = dict(labels='a.geojson', outside=255)
    # Half a meter a pixel: a radius of 0.36 m reaches the center of one pixel at least.
    mask = build_dataset(tmp_path, point_radius=0.36, **settings).read_labels(0, 0, 0, 128)
    assert np.argwhere(mask != 255).tolist() == [[10, 10], [10, 20]]
    with pytest.raises(GeoError, match='Points become disks with point_radius=METERS'):
        build_dataset(tmp_path, **settings)
    with pytest.raises(GeoError, match='may then label no pixel .* at least half of it, 0.354'):
        build_dataset(tmp_path, point_radius=0.3, **settings)
    with pytest.raises(GeoError, match='would all be class 0. Set outside=255'):
        build_dataset(tmp_path, point_radius=2, labels='a.geojson')
    with pytest.raises(GeoError, match='point_radius=2, but the labels .* are a raster'):
        build_dataset(tmp_path, point_radius=2)
