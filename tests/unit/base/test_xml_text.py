"""Names of classes with all that XML cannot hold, in every file that is written as XML."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any, List
from xml.etree import ElementTree

import numpy as np
import pytest
import rasterio
from hypothesis import given
from hypothesis import strategies as st

from mapsage.base.files import xml_text
from mapsage.geo import (
    ClassMapWriter,
    MapInfo,
    ProbabilityWriter,
    read_classes,
    write_cog,
    write_polygons,
)
from mapsage.geo.qgis_style import map_style, polygon_style
from mapsage.pictures.report.charts import ChartLine, line_chart, text
from mapsage.pictures.report.page import page

CODES = [*range(0x20), *range(0x7F, 0xA0), 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xFFFE, 0xFFFF]
NAMES = [f'a{chr(code)}b' for code in CODES] + [
    ']]>',
    '<![CDATA[',
    '"',
    "'",
    '&amp;',
    '&#0;',
    '&#x1f;',
    '<!--',
    '-->',
    '<a',
    '\ufeff',
    '🌍',
]
SHOWN = [re.sub('[\0-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]', '\ufffd', name) for name in NAMES]
PALETTE = [[number, 0, 0] for number in range(len(NAMES))]


def test_only_what_xml_cannot_hold_is_replaced() -> None:
    assert list(map(xml_text, NAMES)) == SHOWN


@given(st.text())
def test_any_text_is_well_formed(name: str) -> None:
    root = ElementTree.fromstring(f'<a>{text(name)}</a>')
    ElementTree.fromstring(map_style([name], PALETTE))
    ElementTree.fromstring(polygon_style('class_name', [name], PALETTE))
    shown = root.text or ''
    assert '\ufffd' in shown or name.encode('utf-8', 'backslashreplace').decode() == shown


def test_styles() -> None:
    labels = [
        entry.get('label')
        for entry in ElementTree.fromstring(map_style(NAMES, PALETTE)).iter('paletteEntry')
    ]
    values = [
        entry.get('value')
        for entry in ElementTree.fromstring(polygon_style('class_name', NAMES, PALETTE)).iter(
            'category'
        )
    ]
    assert labels == SHOWN == values


def test_charts_and_pages() -> None:
    lines = [ChartLine(name, [(0, 1), (1, 2)]) for name in NAMES]
    chart = line_chart(NAMES[0], lines, NAMES[1])
    ElementTree.fromstring(chart)
    for name in NAMES:
        ElementTree.fromstring(line_chart(name, lines[:2], name))
        whole = page(name, [chart], name)
        head, body = whole.index('<title>'), whole.index('</head>')
        ElementTree.fromstring(f'<head>{whole[head:body]}</head>')
        ElementTree.fromstring(whole[body + len('</head>') :].replace('</html>', ''))


@pytest.fixture(scope='module')
def class_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a map of a pixel of each class."""
    folder = tmp_path_factory.mktemp('names')
    info = MapInfo(NAMES, PALETTE, 'EPSG:32631', rasterio.Affine(1, 0, 300000, 0, -1, 3400000))
    with ClassMapWriter(folder / 'working.tif', len(NAMES), 1, info) as writer:
        writer.write(0, np.arange(len(NAMES), dtype=np.uint8)[None])
    write_cog(folder / 'working.tif', folder / 'map.tif')
    return folder / 'map.tif'


def test_category_names(class_map: Path) -> None:
    root = ElementTree.parse(f'{class_map}.aux.xml')
    assert [entry.text for entry in root.iter('Category')] == SHOWN
    assert [entry['name'] for entry in read_classes(class_map)] == NAMES  # JSON holds them all


def test_polygons_have_the_names_of_their_style(class_map: Path) -> None:
    path = class_map.with_suffix('.gpkg')
    write_polygons(class_map, path, NAMES, palette=PALETTE)
    with sqlite3.connect(str(path)) as file:
        names = [name for (name,) in file.execute('SELECT class_name FROM map ORDER BY class_id')]
        (style,) = file.execute('SELECT styleQML FROM layer_styles').fetchone()
    assert names == SHOWN
    assert [entry.get('value') for entry in ElementTree.fromstring(style).iter('category')] == SHOWN


def test_descriptions_of_bands(tmp_path: Path) -> None:
    path = tmp_path / 'probabilities.tif'
    bands: List[Any] = NAMES[:40] + NAMES[-12:]
    with ProbabilityWriter(path, 4, 4, bands, 250, None, None) as writer:
        writer.write(0, np.zeros((len(bands), 4, 4), np.uint8))
    with rasterio.open(path) as source:
        assert len(source.descriptions) == len(bands)
