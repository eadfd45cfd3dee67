"""Styles that QGIS applies by itself: their XML, and the legends that QGIS shows."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path
from typing import Any, List, Sequence, Tuple
from xml.etree import ElementTree

import numpy as np
import pyogrio
import pytest
import shapely
from geo_scenes import UTM, write_raster
from qgis_here import read_legends

from mapsage.geo import ClassMapWriter, GeoError, MapInfo, VectorLabels, write_cog, write_polygons
from mapsage.geo.qgis_style import (
    add_point_form,
    add_polygon_style,
    is_own_style,
    map_style,
    polygon_style,
)

STRANGE = ('a<b & "c"', "l'eau", 'Wässer 水', '  room  ', 'новый 🌍')
COLORS = [[1, 2, 3], [255, 0, 17], [40, 90, 200], [0, 0, 0], [250, 251, 252]]
HEX = ['#010203', '#ff0011', '#285ac8', '#000000', '#fafbfc']


def entries_of(style: bytes) -> List[Tuple[str, str, str]]:
    palette = ElementTree.fromstring(style).find('pipe/rasterrenderer/colorPalette')
    assert palette is not None
    return [
        (each.get('value', ''), each.get('label', ''), each.get('color', '')) for each in palette
    ]


def categories_of(style: str) -> List[Tuple[str, str, str]]:
    """Return value, label and color of each category of a style."""
    renderer = ElementTree.fromstring(style).find('renderer-v2')
    assert renderer is not None and renderer.get('attr') == 'class_name'
    colors = {}
    for symbol in renderer.findall('symbols/symbol'):
        options = {each.get('name'): each.get('value') for each in symbol.iter('Option')}
        assert options['color'] == next(
            each.get('v') for each in symbol.iter('prop') if each.get('k') == 'color'
        )
        colors[symbol.get('name')] = options['color']
    return [
        (each.get('value', ''), each.get('label', ''), colors[each.get('symbol')])
        for each in renderer.findall('categories/category')
    ]


@pytest.mark.parametrize('count', [1, 5, 255])
def test_every_class_is_an_entry_with_its_name_and_color(count: int) -> None:
    names = [f'{STRANGE[i % 5]}{i}' for i in range(count)]
    colors = [[i, 255 - i, i // 2] for i in range(count)]
    assert entries_of(map_style(names, colors)) == [
        (str(i), names[i], '#{:02x}{:02x}{:02x}'.format(*colors[i])) for i in range(count)
    ]
    assert categories_of(polygon_style('class_name', names, colors)) == [
        (names[i], names[i], '{},{},{},255'.format(*colors[i])) for i in range(count)
    ]


def test_what_xml_cannot_hold_is_replaced() -> None:
    ((_, label, _),) = entries_of(map_style(['bell \x07 half \ud800 \n'], COLORS[:1]))
    assert label == 'bell \ufffd half \ufffd \n'


def test_a_style_of_the_users_is_known(tmp_path: Path) -> None:
    path = tmp_path / 'map.qml'
    assert is_own_style(path)
    path.write_bytes(map_style(STRANGE, COLORS))
    assert is_own_style(path)
    path.write_text("<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>\n<qgis/>")
    assert not is_own_style(path)


def draw(folder: Path, count: int) -> Path:
    """Write a class map with a rectangle of each class, and no data between them."""
    classes = np.full((64, 16 * count), 255, np.uint8)
    for value in range(count):
        classes[8:40, 16 * value + 2 : 16 * value + 14] = value
    return write_raster(folder / 'map.tif', classes, UTM, nodata=255)


def styles_in(path: Path) -> List[Tuple[Any, ...]]:
    with sqlite3.connect(str(path)) as file:
        rows = file.execute(
            'SELECT f_table_name, f_geometry_column, useAsDefault, styleQML FROM layer_styles'
        ).fetchall()
        kind = file.execute(
            "SELECT data_type FROM gpkg_contents WHERE table_name = 'layer_styles'"
        ).fetchall()
    assert kind == [('attributes',)]
    return rows


def test_polygons_hold_their_style(tmp_path: Path) -> None:
    path = tmp_path / 'map.gpkg'
    write_polygons(draw(tmp_path, 5), path, STRANGE, palette=COLORS, background=[0, 3])
    ((table, column, default, style),) = styles_in(path)
    assert (table, default) == ('map', 1)
    assert column == pyogrio.read_info(str(path), layer='map')['geometry_name']
    assert [value for value, *_ in categories_of(style)] == [STRANGE[i] for i in (1, 2, 4)]
    # a second style takes the place of the first, and the file may be written again
    add_polygon_style(path, 'map', 'class_name', STRANGE[:1], COLORS[:1])
    ((_, _, _, style),) = styles_in(path)
    assert [value for value, *_ in categories_of(style)] == [STRANGE[0]]
    write_polygons(tmp_path / 'map.tif', path, STRANGE, palette=COLORS)
    assert len(categories_of(styles_in(path)[0][3])) == 5
    with pytest.raises(OSError, match='cannot be written: .*not a database'):
        add_polygon_style(tmp_path / 'map.tif', 'map', 'class_name', STRANGE, COLORS)


def test_points_have_a_form_with_a_list_of_classes(tmp_path: Path) -> None:
    path = tmp_path / 'points.gpkg'
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(shapely.points([[0, 0], [1, 1]])),
        [np.array([None, None], object)],
        ['class_name'],
        layer='points',
        driver='GPKG',
        geometry_type='Point',
        crs='EPSG:32650',
    )
    add_point_form(path, 'points', 'class_name', STRANGE, COLORS)
    with sqlite3.connect(str(path)) as file:
        ((style, is_default),) = file.execute(
            "SELECT styleQML, useAsDefault FROM layer_styles WHERE f_table_name = 'points'"
        )
    assert is_default == 1
    assert [value for value, _, _ in categories_of(style)] == [*STRANGE, '']
    widget = ElementTree.fromstring(style).find('fieldConfiguration/field/editWidget')
    assert widget is not None and widget.get('type') == 'ValueMap'
    listed = widget.findall("config/Option/Option[@name='map']/Option/Option")
    assert [(entry.get('name'), entry.get('value')) for entry in listed] == list(
        zip(STRANGE, STRANGE)
    )


def test_without_colors_there_is_no_style(tmp_path: Path) -> None:
    write_polygons(draw(tmp_path, 2), tmp_path / 'map.gpkg', STRANGE[:2])
    assert pyogrio.list_layers(str(tmp_path / 'map.gpkg'))[:, 0].tolist() == ['map']


def test_styled_polygons_are_labels(tmp_path: Path) -> None:
    write_polygons(draw(tmp_path, 5), tmp_path / 'map.gpkg', STRANGE, palette=COLORS)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        labels = VectorLabels(tmp_path / 'map.gpkg', 'class_name', STRANGE)
    assert labels.path.endswith('map.gpkg')
    with sqlite3.connect(str(tmp_path / 'map.gpkg')) as file:
        file.execute("DELETE FROM gpkg_contents WHERE table_name = 'map'")  # only the style is left
    with pytest.raises(GeoError, match="map.gpkg has no field 'class_name'"):
        VectorLabels(tmp_path / 'map.gpkg', 'class_name', STRANGE)


def write_map(folder: Path, names: Sequence[str], colors: Sequence[Sequence[int]]) -> Path:
    """Write NAME.tif, NAME.qml and NAME.gpkg as tools/predict.py does."""
    count = len(names)
    with ClassMapWriter(folder / 'work.tif', 16 * count, 64, MapInfo(names, colors, **UTM)) as file:
        classes = np.repeat(np.arange(count, dtype=np.uint8), 16)
        file.write(0, np.tile(classes, (64, 1)))
    write_cog(folder / 'work.tif', folder / 'scene.tif')
    (folder / 'scene.qml').write_bytes(map_style(names, colors))
    write_polygons(folder / 'scene.tif', folder / 'scene.gpkg', names, palette=colors)
    return folder / 'scene.tif'


def test_qgis_shows_the_classes(tmp_path: Path) -> None:
    """Without its style the map has 256 entries, and polygons one."""
    many = [f'class {i}' for i in range(255)]
    spectrum = [[i, 255 - i, i // 2] for i in range(255)]
    sources: List[Any] = []
    for name, names, colors in (
        ('few', STRANGE, COLORS),
        ('one', STRANGE[:1], COLORS[:1]),
        ('many', many, spectrum),
    ):
        (tmp_path / name).mkdir()
        path = write_map(tmp_path / name, names, colors)
        sources += [path, f'{path.with_suffix(".gpkg")}|layername=map']
    (tmp_path / 'plain').mkdir()
    path = write_map(tmp_path / 'plain', STRANGE, COLORS)
    path.with_suffix('.qml').unlink()
    few, few_polygons, one, one_polygons, all_of_them, all_polygons, plain = read_legends(
        *sources, path
    )
    expected = [list(pair) for pair in zip(STRANGE, HEX)]
    assert few == dict(kind='paletted', entries=expected)
    assert (few_polygons['kind'], few_polygons['entries']) == ('categorizedSymbol', expected)
    assert few_polygons['features'] == few_polygons['drawn'] == 5
    assert one['entries'] == one_polygons['entries'] == expected[:1]
    assert [label for label, _ in all_of_them['entries']] == many
    assert all_polygons['entries'] == all_of_them['entries'] and all_polygons['drawn'] == 255
    assert len(plain['entries']) == 256
