"""What a dataset of scenes says at the start, against what was written into its files."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import shapely
from geo_scenes import (
    CLASSES,
    DEGREES,
    PALETTE,
    UTM,
    damage_block,
    draw_classes,
    paint,
    rectangle,
    write_raster,
)
from geotiff_data import build_dataset, write_scene, write_vector
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmengine.logging import MMLogger
from rasterio.enums import ColorInterp
from rasterio.transform import Affine

from mapsage.datasets.geotiff import summary as geotiff_summary
from mapsage.datasets.geotiff.summary import summarize
from mapsage.engine.loading.build import checked_dataset, notes_on_scenes
from mapsage.geo.gdal_files import open_file


def said(dataset: Any, level: int) -> List[str]:
    return [text for importance, text in summarize(dataset) if importance == level]


def test_polygons_and_shares(tmp_path: Path) -> None:
    write_scene(tmp_path)
    write_scene(tmp_path, 'b', dict(UTM, transform=UTM['transform'] * Affine.translation(300, 0)))
    beyond = rectangle(UTM, 580, 0, 700, 130)  # 20 columns of it are in the second scene
    write_vector(
        tmp_path / 'labels.gpkg',
        [rectangle(UTM, 0, 0, 30, 26), rectangle(UTM, 100, 100, 160, 126), beyond],
        [CLASSES[1], CLASSES[2], CLASSES[1]],
        'EPSG:32650',
    )
    dataset = build_dataset(tmp_path, labels='labels.gpkg')
    scenes, polygons = said(dataset, logging.INFO)
    assert f'{tmp_path}/scenes: 2 scene(s), 3 band(s) of uint8, 18 windows of 128' in scenes
    assert '3 polygon(s) in its scenes (a.tif 2, b.tif 1)' in polygons
    house, water = (780 + 20 * 130) / 156000, 1560 / 156000
    assert polygons.endswith(
        f'ground {100 * (1 - house - water):.3g} %, house '
        f'{100 * house:.3g} %, water {100 * water:.3g} %'
    )
    assert not said(dataset, logging.WARNING)


@pytest.mark.parametrize(
    'outside, fate', [(0, "all their pixels have the class 'ground'"), (255, 'they are ignored')]
)
def test_a_scene_without_polygons(tmp_path: Path, outside: int, fate: str) -> None:
    for name, columns in (('a', 0), ('b', 300), ('c', 600)):
        write_scene(
            tmp_path, name, dict(UTM, transform=UTM['transform'] * Affine.translation(columns, 0))
        )
    write_vector(
        tmp_path / 'labels.gpkg', [rectangle(UTM, 400, 0, 478, 100)], [CLASSES[1]], 'EPSG:32650'
    )
    dataset = build_dataset(tmp_path, labels='labels.gpkg', outside=outside)
    absent, warning = said(dataset, logging.WARNING)
    assert 'no labels of ' in absent and 'water (polygon or scene)' in absent
    a, c = (str(tmp_path / f'scenes/{name}.tif') for name in 'ac')
    assert warning.startswith(f'no polygon lies in 2 of 3 scene(s), and {fate}: {a}, {c}.')
    text = said(dataset, logging.INFO)[1]
    assert 'a.tif 0, b.tif 1, c.tif 0' in text and 'water 0 % (no polygon)' in text
    assert ('house 3.33 %' in text) and ('ignored 96.7 %' in text) == (outside == 255)


def test_polygons_in_a_rotated_scene(tmp_path: Path) -> None:
    turned = dict(UTM, transform=UTM['transform'] * Affine.rotation(30))
    write_scene(tmp_path, place=turned)
    write_vector(
        tmp_path / 'labels.gpkg',
        [rectangle(turned, -50, -50, 150, 310), rectangle(turned, -40, 320, 50, 330)],
        [CLASSES[1]] * 2,
        'EPSG:32650',
    )
    text = said(build_dataset(tmp_path, labels='labels.gpkg'), logging.INFO)[1]
    assert '1 polygon(s)' in text and 'ground 50 %, house 50 %' in text


@pytest.mark.parametrize('turn', [0, 30])
def test_polygons_of_a_part(tmp_path: Path, turn: int) -> None:
    """Counts and shares are those of the pixels that count in the part."""
    place = dict(UTM, transform=UTM['transform'] * Affine.rotation(turn))
    write_scene(tmp_path, place=place)
    corners = [(column, row) for column in range(3, 280, 40) for row in range(3, 240, 40)]
    boxes = [rectangle(place, column, row, column + 20, row + 20) for column, row in corners]
    names = [CLASSES[1 + number % 2] for number in range(len(boxes))]
    write_vector(tmp_path / 'labels.gpkg', boxes, names, 'EPSG:32650')
    for part in ('train', 'val'):
        split = dict(by='blocks', size=25, share=0.4, margin=4, seed=1, part=part)
        dataset = build_dataset(tmp_path, labels='labels.gpkg', split=split)
        text = said(dataset, logging.INFO)[1]
        in_part = dataset.scene_facts[0]['part'].mask(0, 0, 300, 260)
        counts: Dict[str, int] = dict.fromkeys(CLASSES, 0)
        pixels: Dict[str, int] = dict.fromkeys(CLASSES, 0)
        for name, (column, row) in zip(names, corners):
            inside = in_part[row : row + 20, column : column + 20].sum()
            counts[name] += bool(inside)
            pixels[name] += inside
        by_class = ', '.join(f'{name} {count}' for name, count in counts.items())
        assert f'{sum(counts.values())} of {len(boxes)} polygon(s) count in part {part!r}' in text
        assert f' ({by_class}); shares' in text and 5 < counts['house'] < len(boxes) / 2
        for name in CLASSES[1:]:
            share = float(text.split('shares')[1].split(f'{name} ')[1].split(' %')[0])
            assert share == pytest.approx(100 * pixels[name] / in_part.sum(), rel=0.02)


def test_a_class_that_a_split_leaves_no_label(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path)
    labels = np.zeros_like(classes)
    split = dict(by='blocks', size=25, share=0.4, seed=1)
    part = build_dataset(tmp_path, split=dict(split, part='val')).scene_facts[0]['part']
    in_validation = part.mask(0, 0, 300, 260)
    labels[~in_validation] = 1
    row, column = np.argwhere(in_validation)[len(np.argwhere(in_validation)) // 2]
    labels[row, column] = 2
    write_raster(tmp_path / 'labels/a.tif', labels)
    to_map = UTM['transform']
    rows_of = {part: np.argwhere(labels == value) for part, value in (('train', 1), ('val', 0))}
    points = [
        shapely.Point(to_map * (column + 0.5, row + 0.5))
        for part in ('train', 'val')
        for row, column in rows_of[part][:: len(rows_of[part]) // 5][:5]
    ]
    write_vector(
        tmp_path / 'labels.gpkg',
        points,
        ['house'] * 5 + ['water'] * 5,
        'EPSG:32650',
        kind='Point',
    )
    vector = dict(labels='labels.gpkg', point_radius=0.4, outside=255)
    for part, absent, count in (('train', 'water', 5), ('val', 'house', 5)):
        dataset = build_dataset(tmp_path, split=dict(split, part=part))
        assert f'shares, from all pixels in part {part!r}: ' in said(dataset, logging.INFO)[1]
        warning = next(text for text in said(dataset, logging.WARNING) if 'no labels' in text)
        assert f'no labels of {"ground, " * (part == "train")}{absent} ' in warning
        assert 'set another seed, a larger share or smaller blocks' in warning
        dataset = build_dataset(tmp_path, split=dict(split, part=part), **vector)
        text = said(dataset, logging.INFO)[1]
        assert f'{count} of 10 point(s) count in part {part!r} (ground 0, ' in text
        warning = next(text for text in said(dataset, logging.WARNING) if 'no labels' in text)
        assert f'no labels of ground, {absent} ({count} of 10 point(s) count in ' in warning
        assert 'set another seed' in warning


def test_shares_of_label_rasters(tmp_path: Path, monkeypatch: Any) -> None:
    _, classes = write_scene(tmp_path)
    dataset = build_dataset(tmp_path)
    text = said(dataset, logging.INFO)[1]
    house, water = (100 * (classes == index).mean() for index in (1, 2))
    assert '1 label raster(s); shares, from all pixels: ' in text
    assert f'house {house:.3g} %, water {water:.3g} %' in text
    monkeypatch.setattr(geotiff_summary, '_SIDE', 20)  # 64 squares of 20 are less than the scene
    text = said(dataset, logging.INFO)[1]
    assert 'from 64 squares of 20 pixels' in text
    assert float(text.split('ground ')[1].split(' %')[0]) == pytest.approx(
        100 - house - water, abs=3
    )


def test_unusual_labels(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path)
    labels = np.where(classes == 2, 0, classes + 1)
    labels[:26] = 9
    write_raster(tmp_path / 'labels/a.tif', labels.astype('uint8'))
    dataset = build_dataset(tmp_path, reduce_zero_label=True)
    absent, warning = said(dataset, logging.WARNING)
    assert 'no labels of water' in absent
    assert 'label rasters hold 9, which 3 classes (1 to 3) do not have' in warning
    assert f'ignored {100 * (labels == 0).mean():.3g} %' in said(dataset, logging.INFO)[1]
    write_raster(tmp_path / 'empty/a.tif', np.zeros_like(classes))
    (warning,) = said(build_dataset(tmp_path, labels='empty', label_nodata=0), logging.WARNING)
    assert 'no pixel of the label rasters has a label (all pixels examined' in warning
    assert said(build_dataset(tmp_path, labels=None), logging.INFO)[1].endswith('no labels')


def color(path: Path, colors: Any) -> None:
    with open_file(path, 'r+') as file:
        file.write_colormap(1, {value: (*each, 255) for value, each in enumerate(colors)})


@pytest.mark.parametrize(
    'colors, words',
    [
        (PALETTE, ()),
        ([[121, 158, 91], *PALETTE[1:]], ()),  # rounded by a program
        ([[value] * 3 for value in range(256)], ()),
        (
            [PALETTE[0], PALETTE[2], PALETTE[1]],
            (
                "value 1 is (40, 90, 200) there, which is the color of 'water', and 'house' is (200, 60, 40)"
                ' here',
                "value 2 is (200, 60, 40) there, which is the color of 'house'",
            ),
        ),
        ([*PALETTE, [1, 2, 250]], ('value 3 is (1, 2, 250) there, and no class here',)),
    ],
)
def test_a_color_table_that_disagrees(tmp_path: Path, colors: Any, words: Any) -> None:
    _, classes = write_scene(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', classes, compress=None, photometric='palette')
    color(tmp_path / 'labels/a.tif', colors)
    warnings = said(build_dataset(tmp_path), logging.WARNING)
    assert len(warnings) == bool(words)
    assert not words or f'labels {tmp_path}/labels/a.tif have a color table' in warnings[0]
    assert all(each in warnings[0] for each in words)


def write_alpha(path: Path, fourth: np.ndarray, dtype: str = 'uint8') -> None:
    values = paint(draw_classes(), 4, dtype)
    values[3] = fourth
    write_raster(path, values)
    with open_file(path, 'r+') as file:
        file.colorinterp = [ColorInterp.red, ColorInterp.green, ColorInterp.blue, ColorInterp.alpha]


@pytest.mark.parametrize('dtype', ['uint8', 'uint16'])
@pytest.mark.parametrize('kind', ['infrared', 'mask', 'smooth mask'])
def test_an_alpha_band_that_is_none(tmp_path: Path, dtype: str, kind: str) -> None:
    write_scene(tmp_path)
    alpha = np.full((260, 300), np.iinfo(dtype).max)
    alpha[:90] = 0
    alpha[90:94] = np.array([10, 40, 90, 200])[:, None]
    write_alpha(
        tmp_path / 'scenes/a.tif',
        paint(draw_classes(), 1)[0]
        if kind == 'infrared'
        else alpha
        if kind == 'smooth mask'
        else alpha * (alpha > 200),
        dtype,
    )
    warnings = said(build_dataset(tmp_path), logging.WARNING)
    assert len(warnings) == (kind == 'infrared')
    if kind == 'infrared':
        assert 'band 4 of ' in warnings[0] and 'bands=[1, 2, 3, 4] makes it an input' in warnings[0]
        kept = build_dataset(tmp_path, bands=[1, 2, 3, 4])
        assert kept[0]['inputs'].shape[0] == 4 and not said(kept, logging.WARNING)


def test_types_that_differ_and_damage(tmp_path: Path) -> None:
    write_scene(tmp_path)
    write_scene(tmp_path, 'b', values='uint16')
    dataset = build_dataset(tmp_path, labels=None)
    a, b = (tmp_path / f'scenes/{name}.tif' for name in 'ab')
    assert f'uint8 ({a}), uint16 ({b})' in said(dataset, logging.WARNING)[0]
    damage_block(tmp_path / 'labels/a.tif', 1, 1, 1)
    warning, types = said(build_dataset(tmp_path), logging.WARNING)
    assert 'labels/a.tif: the window' in warning and 'cannot be decoded' in warning
    assert types.startswith('scenes differ')


def test_wrapped_datasets_are_logged_on_the_first_rank(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    write_scene(tmp_path)
    inner = build_dataset(tmp_path)
    windows = ['9 windows of 128 pixels', '25 windows of 64 pixels']
    both = ConcatDataset([inner, build_dataset(tmp_path, window=64)])
    for wrapped, texts in (both, windows), (RepeatDataset(inner, 2), windows[:1]):
        assert [text.split(', ')[-1] for _, text in notes_on_scenes(wrapped)[::2]] == texts
    logger = MMLogger.get_current_instance()
    # `mapsage passport` of another test may have made it quiet.
    logger.setLevel('INFO')
    logger.addHandler(caplog.handler)
    try:
        for place in ((0, 2), (1, 2)):
            monkeypatch.setattr(
                'mapsage.engine.loading.build.get_dist_info', functools.partial(tuple, place)
            )
            checked_dataset(dict(type=lambda: inner))
            assert caplog.text.count('9 windows of 128') == 1
    finally:
        logger.removeHandler(caplog.handler)


def write_wide_scene(root: Path, place: dict = UTM) -> None:
    """Write a scene of 600 x 600 pixels of 0.5 m, and its labels."""
    for folder, bands in (('scenes', 3), ('labels', 1)):
        write_raster(root / folder / 'a.tif', np.ones((bands, 600, 600), 'uint8'), place)


def leaks(root: Path, part: str = 'val', window: int = 64, **split: Any) -> List[str]:
    split = dict(dict(by='blocks', share=0.4), part=part, **split)
    dataset = build_dataset(root, window=window, split=split)
    return [text for text in said(dataset, logging.WARNING) if text.startswith('split: ')]


@pytest.mark.parametrize(
    'split, reasons',
    [
        (dict(size=32, margin=16), []),
        (dict(size=31, margin=16), ['blocks of 31 meters are 62 pixels, less than a window of 64']),
        (
            dict(size=32, margin=15),
            ['margin=15 meters is 30 pixels, less than half a window of 64'],
        ),
        (dict(size=20), ['blocks of 20 meters are 40 pixels', 'margin=0 meters is 0 pixels']),
        (dict(size=64, margin=32, unit='pixels'), []),
        (
            dict(size=63, margin=31, unit='pixels'),
            ['blocks of 63 pixels are 63 pixels', 'margin=31 pixels is 31 pixels'],
        ),
    ],
    ids=str,
)
def test_a_split_that_leaks(split: Dict[str, Any], reasons: List[str], tmp_path: Path) -> None:
    write_wide_scene(tmp_path)
    warnings = leaks(tmp_path, **split)
    assert len(warnings) == bool(reasons)
    for text in warnings:
        assert all(reason in text for reason in reasons)
        assert ('less than a window' in text) == any('blocks' in reason for reason in reasons)
        assert ('half a window' in text) == any('margin' in reason for reason in reasons)
        assert 'or more' in text and "part 'val' is scored on" in text
    # once for a run: training is not scored
    assert leaks(tmp_path, 'train', **split) == []


def test_what_the_warning_advises_ends_it(tmp_path: Path) -> None:
    write_wide_scene(tmp_path)
    text = leaks(tmp_path, size=10)[0]
    size, margin = (
        float(text.partition(f'{name}=')[2].split()[0])
        for name in ('Set size', 'more (two windows), margin')
    )
    assert (size, margin) == (pytest.approx(64, rel=0.01), 17)
    assert leaks(tmp_path, size=size, margin=margin) == []


def test_a_split_of_degrees_is_measured_on_the_ground(tmp_path: Path) -> None:
    """Pixels of an arc second at 60 degrees are 22 m wide, as a square of the same area."""
    write_wide_scene(tmp_path, DEGREES)
    assert 'blocks of 1000 meters are 45' in leaks(tmp_path, size=1000, margin=720)[0]
    assert leaks(tmp_path, size=1500, margin=720) == []


@pytest.mark.parametrize(
    'window, words',
    [
        (260, ''),
        (
            261,
            r'window=261 is larger than 2 of 2 scene\(s\), the first is .*a\.tif of '
            r'300 x 260 pixels.* set window=260 or less',
        ),
        (512, r'window=512 is larger than 2 of 2'),
    ],
)
def test_a_window_that_is_larger_than_a_scene(window: int, words: str, tmp_path: Path) -> None:
    write_scene(tmp_path)
    write_scene(tmp_path, 'b')
    texts = [
        text
        for level, text in summarize(build_dataset(tmp_path, window=window))
        if level == logging.WARNING
    ]
    assert len(texts) == bool(words) and all(re.search(words, text) for text in texts)


@pytest.mark.parametrize('stride, share', [(None, ''), (128, ''), (192, 'about 56 %')])
def test_windows_that_leave_gaps(stride: Any, share: str, tmp_path: Path) -> None:
    write_scene(tmp_path)
    warnings = said(build_dataset(tmp_path, window=128, stride=stride), logging.WARNING)
    assert len(warnings) == bool(share)
    assert all(f'{share} of the pixels' in text and 'stride=128' in text for text in warnings)
