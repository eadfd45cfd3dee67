"""Styles that QGIS applies by itself when it opens a map or its polygons.

Without a style, QGIS gives a GeoTIFF with a color table one legend entry for each of the table's
256 values, and polygons a single color. It reads the style of ``NAME.tif`` from ``NAME.qml`` in the
same folder, and the style of a GeoPackage from its table ``layer_styles``. Both are XML in the form
that QGIS 3 writes (``QgsMapLayer``'s ``writeSymbology``), without the values that have a default.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Dict, List, Sequence, Tuple
from xml.etree import ElementTree

from mapsage.base.files import xml_text
from mapsage.geo.change_classes import UNCHANGED

from .errors import PathName

# Mark of a style that MapSage may replace. QGIS does not write the comment when a user saves
# another style under the same name.
_MARK = '<!-- written by MapSage -->'
_HEAD = f"<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>\n{_MARK}\n"

# The oldest version of QGIS that has these renderers.
_VERSION = dict(version='3.10.0', styleCategories='Symbology')

# The table that the OGR provider of QGIS creates and reads (qgsogrprovidermetadata.cpp).
_TABLE = """CREATE TABLE IF NOT EXISTS layer_styles (
    id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, f_table_catalog TEXT(256),
    f_table_schema TEXT(256), f_table_name TEXT(256), f_geometry_column TEXT(256),
    styleName TEXT(30), styleQML TEXT, styleSLD TEXT, useAsDefault BOOLEAN, description TEXT,
    owner TEXT(30), ui TEXT(30),
    update_time DATETIME DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')))"""

STYLES = 'layer_styles'

# Color of points without a class.
_UNLABELED: Sequence[int] = (214, 39, 40)


def map_style(class_names: Sequence[str], palette: Sequence[Sequence[int]]) -> bytes:
    """Return the QML of a class map: a legend entry for each class, with its name and color.

    Args:
        class_names: Names of the values 0, 1, ...
        palette: Red, green and blue (0 to 255) of each class.
    """
    root = ElementTree.Element('qgis', _VERSION)
    renderer = ElementTree.SubElement(
        ElementTree.SubElement(root, 'pipe'),
        'rasterrenderer',
        type='paletted',
        band='1',
        opacity='1',
        alphaBand='-1',
        nodataColor='',
    )
    colors = ElementTree.SubElement(renderer, 'colorPalette')
    for value, (name, color) in enumerate(zip(class_names, palette)):
        # The image of a map of change is visible where nothing has changed.
        ElementTree.SubElement(
            colors,
            'paletteEntry',
            value=str(value),
            label=xml_text(name),
            color='#{:02x}{:02x}{:02x}'.format(*map(int, color)),
            alpha='0' if name == UNCHANGED else '255',
        )
    return _document(root).encode()


def is_own_style(path: Path) -> bool:
    """Return whether MapSage may write a QML file: it is MapSage's file, or does not exist."""
    try:
        return _MARK.encode() in path.read_bytes()[: len(_HEAD) + 4]
    except FileNotFoundError:
        return True


def polygon_style(
    field: str, class_names: Sequence[str], palette: Sequence[Sequence[int]], hollow: bool = False
) -> str:
    """Return the QML of polygons: a category for each class, by the name in ``field``.

    With ``hollow``, a polygon is a broad outline in its color, so that the layers below are
    visible.
    """
    root = ElementTree.Element('qgis', _VERSION)
    entries = [(name, name, color) for name, color in zip(class_names, palette)]
    for symbol, color in _add_categories(root, field, 'fill', entries):
        rgba = _rgba(color)
        options: Dict[str, str] = dict(
            color=rgba,
            style='no' if hollow else 'solid',
            outline_color=rgba if hollow else '35,35,35,255',
            outline_style='solid',
            outline_width='0.8' if hollow else '0.1',
            outline_width_unit='MM',
            joinstyle='bevel',
        )
        _add_symbol_layer(symbol, 'SimpleFill', options)
    return _document(root)


def add_polygon_style(
    path: PathName,
    layer: str,
    field: str,
    class_names: Sequence[str],
    palette: Sequence[Sequence[int]],
    hollow: bool = False,
) -> None:
    """Make the style of polygons the default of a layer of a GeoPackage.

    Args:
        path: Path of the GeoPackage, which no other program may have open.
        layer: Name of the layer. An existing default style of the layer is replaced.
        field: Name of the text field with the class.
        class_names: Names of the classes that get a category.
        palette: Red, green and blue (0 to 255) of each class.
        hollow: Whether polygons are outlines only.

    Raises:
        OSError: If the file cannot be written.
    """
    _add_style(path, layer, polygon_style(field, class_names, palette, hollow))


def add_point_form(
    path: PathName,
    layer: str,
    field: str,
    class_names: Sequence[str],
    palette: Sequence[Sequence[int]],
) -> None:
    """Give points a form in which a class is chosen from a list, and show which have a class.

    Args:
        path: Path of the GeoPackage, which no other program may have open.
        layer: Name of the layer.
        field: Name of the text field for the class.
        class_names: Names of the classes.
        palette: Red, green and blue (0 to 255) of each class.

    Raises:
        OSError: If the file cannot be written.
    """
    root = ElementTree.Element('qgis', dict(_VERSION, styleCategories='Symbology|Fields|Forms'))
    entries = [(name, name, color) for name, color in zip(class_names, palette)]
    # QGIS draws every other value, and points without a value, as the category with no value.
    entries.append(('', 'to be labeled', _UNLABELED))
    for symbol, color in _add_categories(root, field, 'marker', entries):
        _add_symbol_layer(
            symbol,
            'SimpleMarker',
            dict(
                name='circle',
                color=_rgba(color),
                size='3',
                size_unit='MM',
                outline_color='255,255,255,255',
                outline_width='0.4',
                outline_width_unit='MM',
            ),
        )
    configuration = ElementTree.SubElement(root, 'fieldConfiguration')
    widget = ElementTree.SubElement(
        ElementTree.SubElement(configuration, 'field', name=field), 'editWidget', type='ValueMap'
    )
    options = ElementTree.SubElement(
        ElementTree.SubElement(ElementTree.SubElement(widget, 'config'), 'Option', type='Map'),
        'Option',
        name='map',
        type='List',
    )
    for name in class_names:
        ElementTree.SubElement(
            ElementTree.SubElement(options, 'Option', type='Map'),
            'Option',
            name=xml_text(name),
            type='QString',
            value=xml_text(name),
        )
    _add_style(path, layer, _document(root))


def _add_style(path: PathName, layer: str, style: str) -> None:
    """Make a QML the default style of a layer of a GeoPackage."""
    try:
        with contextlib.closing(sqlite3.connect(str(path))) as file, file:
            column = file.execute(
                'SELECT column_name FROM gpkg_geometry_columns WHERE table_name = ?', (layer,)
            ).fetchone()[0]
            file.execute(_TABLE)
            file.execute(
                'INSERT OR IGNORE INTO gpkg_contents (table_name, data_type, identifier, '
                "description, srs_id) VALUES (?, 'attributes', ?, '', 0)",
                (STYLES, STYLES),
            )
            file.execute(f'DELETE FROM {STYLES} WHERE f_table_name = ?', (layer,))
            file.execute(
                f'INSERT INTO {STYLES} (f_table_catalog, f_table_schema, f_table_name, '
                'f_geometry_column, styleName, styleQML, styleSLD, useAsDefault, description, '
                "owner) VALUES ('', '', ?, ?, 'classes', ?, '', 1, '', '')",
                (layer, column, style),
            )
    except sqlite3.Error as error:
        raise OSError(f'the style of layer {layer} cannot be written: {error}') from error


def _add_categories(
    root: ElementTree.Element,
    field: str,
    kind: str,
    entries: Sequence[Tuple[str, str, Sequence[int]]],
) -> List[Tuple[ElementTree.Element, Sequence[int]]]:
    """Add a category for each value, label and color; return the symbols with their colors."""
    renderer = ElementTree.SubElement(
        root,
        'renderer-v2',
        type='categorizedSymbol',
        attr=field,
        symbollevels='0',
        enableorderby='0',
        forceraster='0',
    )
    categories = ElementTree.SubElement(renderer, 'categories')
    symbols = ElementTree.SubElement(renderer, 'symbols')
    colored = []
    for number, (value, label, color) in enumerate(entries):
        ElementTree.SubElement(
            categories,
            'category',
            symbol=str(number),
            value=xml_text(value),
            label=xml_text(label),
            render='true',
            type='string',
        )
        symbol = ElementTree.SubElement(
            symbols,
            'symbol',
            name=str(number),
            type=kind,
            alpha='1',
            clip_to_extent='1',
            force_rhr='0',
        )
        colored.append((symbol, color))
    return colored


def _rgba(color: Sequence[int]) -> str:
    return '{},{},{},255'.format(*map(int, color))


def _add_symbol_layer(symbol: ElementTree.Element, kind: str, options: Dict[str, str]) -> None:
    layer = ElementTree.SubElement(
        symbol, 'layer', {'class': kind, 'enabled': '1', 'locked': '0', 'pass': '0'}
    )
    # QGIS from 3.18 on reads the elements `Option`, and older versions the elements `prop`.
    group = ElementTree.SubElement(layer, 'Option', type='Map')
    for name, value in options.items():
        ElementTree.SubElement(group, 'Option', name=name, type='QString', value=value)
    for name, value in options.items():
        ElementTree.SubElement(layer, 'prop', k=name, v=value)


def _document(root: ElementTree.Element) -> str:
    return _HEAD + ElementTree.tostring(root, encoding='unicode') + '\n'
