"""Names and colors of a map: the same in each of its files, and in QGIS."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, List, Tuple
from xml.etree import ElementTree

import pytest
import rasterio
from color_model import NAMES, paint, write_checkpoint, write_config, write_scene
from qgis_here import read_legends
from rasterio.transform import Affine
from support import on_host

from mapsage.commands import predict as command
from mapsage.geo import read_classes
from mapsage.pictures.tiles import default_palette

pytestmark = on_host

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))
OWN = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [40, 40, 40]]
# Without a palette of the config, and with names that XML has to escape.
STRANGE = ('a<b & "c"', 'Wässer 水', 'room', 'тень')
NO_PALETTE = f"""
test_dataloader['dataset']['metainfo'] = dict(classes={STRANGE!r})
"""


def predict(config: Path, folder: Path, *options: Any) -> Path:
    """Make the map of a scene with the four classes, and return its path."""
    scene = folder / 'field.tif'
    if not scene.exists():
        write_scene(scene, paint(200, 310), **UTM)
    checkpoint = folder / 'color.pth'
    if not checkpoint.exists():
        write_checkpoint(folder)
    assert (
        command.main(
            [
                str(config),
                str(checkpoint),
                str(scene),
                '--out',
                str(folder / 'map'),
                '--accelerator',
                'cpu',
                *map(str, options),
            ]
        )
        == 0
    )
    return folder / 'map' / 'field.tif'


def legends(path: Path) -> Tuple[List[Tuple[str, str]], ...]:
    """Return name and color of the classes in NAME.tif, in its tag, in NAME.qml, in NAME.gpkg."""
    with rasterio.open(str(path)) as file:
        table = file.colormap(1)
    tag = read_classes(path)
    colors = ['#{:02x}{:02x}{:02x}'.format(*table[entry['value']][:3]) for entry in tag]
    entries = ElementTree.parse(str(path.with_suffix('.qml'))).getroot().iter('paletteEntry')
    with sqlite3.connect(str(path.with_suffix('.gpkg'))) as file:
        ((style,),) = file.execute('SELECT styleQML FROM layer_styles').fetchall()
    root = ElementTree.fromstring(style)
    fills = {
        symbol.get('name'): next(
            each.get('v') for each in symbol.iter('prop') if each.get('k') == 'color'
        )
        for symbol in root.iter('symbol')
    }
    return (
        [(entry['name'], color) for entry, color in zip(tag, colors)],
        [(entry['name'], '#{:02x}{:02x}{:02x}'.format(*entry['color'])) for entry in tag],
        [(each.get('label', ''), each.get('color', '')) for each in entries],
        [
            (
                each.get('value', ''),
                '#{:02x}{:02x}{:02x}'.format(
                    *map(int, str(fills[each.get('symbol')]).split(',')[:3])
                ),
            )
            for each in root.iter('category')
        ],
    )


@pytest.mark.parametrize(
    'extra, names, palette',
    [('', NAMES, OWN), (NO_PALETTE, STRANGE, default_palette(4).tolist())],
    ids=['own', 'made'],
)
def test_all_files_have_the_same_names_and_colors(
    tmp_path: Path, extra: str, names: Any, palette: Any
) -> None:
    path = predict(write_config(tmp_path, extra), tmp_path, '--polygons')
    expected = [(name, '#{:02x}{:02x}{:02x}'.format(*color)) for name, color in zip(names, palette)]
    assert legends(path) == (expected,) * 4
    shown, polygons = read_legends(path, f'{path.with_suffix(".gpkg")}|layername=map')
    assert shown['entries'] == polygons['entries'] == [list(each) for each in expected]
    assert polygons['drawn'] == polygons['features'] == 4


def test_polygons_that_are_added_have_their_style_without_the_class_left_out(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    path = predict(config, tmp_path)
    assert not path.with_suffix('.gpkg').exists()
    for left_out in ((), ('dark',), ('dark', 'red')):
        predict(config, tmp_path, '--polygons', *['--skip-class'][: len(left_out)], *left_out)
        assert [name for name, _ in legends(path)[3]] == [
            name for name in NAMES if name not in left_out
        ]
    assert len(legends(path)[2]) == 4  # the map itself shows all


def test_a_style_that_the_user_saved_stays(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = predict(config, tmp_path)
    style = path.with_suffix('.qml')
    ours = style.read_bytes()
    mine = b"<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>\n<qgis><pipe/></qgis>"
    style.write_bytes(mine)
    predict(config, tmp_path, '--overwrite')
    assert style.read_bytes() == mine
    style.unlink()
    predict(write_config(tmp_path, NO_PALETTE), tmp_path, '--overwrite')
    made = style.read_bytes()
    assert made != ours
    predict(write_config(tmp_path), tmp_path, '--overwrite')  # ours is replaced
    assert style.read_bytes() == ours
