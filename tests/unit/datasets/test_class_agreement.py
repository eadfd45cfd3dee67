"""Mask value, class index, class name and color agree, for every dataset, as shipped.

The tables below are written from the providers' documents; neither the code that converts labels
nor MMSeg's palettes were used for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from support import ROOT

import mapsage  # noqa: F401  (registers what the configs name)
from mapsage.extras.demo import DemoParams, demo_map, write_demo_data
from mapsage.extras.demo.prepare.layouts import LAYOUTS
from mapsage.extras.demo.prepare.tiling import ColorClasses

Row = Tuple[int, str, Tuple[int, int, int]]  # stored value, class, RGB

LOVEDA: List[Row] = [
    (1, 'background', (255, 255, 255)),
    (2, 'building', (255, 0, 0)),
    (3, 'road', (255, 255, 0)),
    (4, 'water', (0, 0, 255)),
    (5, 'barren', (159, 129, 183)),
    (6, 'forest', (0, 255, 0)),
    (7, 'agricultural', (255, 195, 128)),
]
ISPRS: List[Row] = [
    (1, 'impervious_surface', (255, 255, 255)),
    (2, 'building', (0, 0, 255)),
    (3, 'low_vegetation', (0, 255, 255)),
    (4, 'tree', (0, 255, 0)),
    (5, 'car', (255, 255, 0)),
    (6, 'clutter', (255, 0, 0)),
]
ISAID: List[Row] = [
    (0, 'background', (0, 0, 0)),
    (1, 'ship', (0, 0, 63)),
    (2, 'store_tank', (0, 63, 63)),
    (3, 'baseball_diamond', (0, 63, 0)),
    (4, 'tennis_court', (0, 63, 127)),
    (5, 'basketball_court', (0, 63, 191)),
    (6, 'Ground_Track_Field', (0, 63, 255)),
    (7, 'Bridge', (0, 127, 63)),
    (8, 'Large_Vehicle', (0, 127, 127)),
    (9, 'Small_Vehicle', (0, 0, 127)),
    (10, 'Helicopter', (0, 0, 191)),
    (11, 'Swimming_pool', (0, 0, 255)),
    (12, 'Roundabout', (0, 191, 127)),
    (13, 'Soccer_ball_field', (0, 127, 191)),
    (14, 'plane', (0, 127, 255)),
    (15, 'Harbor', (0, 100, 155)),
]

# By config: table, stored value that is ignored, end of a mask's name.
SETS: Dict[str, Tuple[List[Row], int, str]] = dict(
    loveda=(LOVEDA, 0, '.png'),
    demo=(LOVEDA, 0, '.png'),
    potsdam=(ISPRS, 0, '.png'),
    vaihingen=(ISPRS, 0, '.png'),
    isaid=(ISAID, 255, '_instance_color_RGB.png'),
)


def draw(rows: List[Row], ignored: int, side: int) -> Tuple[np.ndarray, np.ndarray]:
    """Blocks of every value, the ignored one among them: (side, side), and their picture, RGB."""
    values = np.array([row[0] for row in rows] + [ignored], np.uint8)
    grid = np.resize(np.random.RandomState(1).permutation(values), (6, 6))
    mask = cv2.resize(grid, (side, side), interpolation=cv2.INTER_NEAREST)
    table = np.zeros((256, 3), np.uint8)
    for value, _, color in rows:
        table[value] = color
    table[ignored] = 77  # a gray that is no class
    return mask, table[mask]


def write(root: Path, suffix: str, mask: np.ndarray, picture: np.ndarray) -> None:
    for split in ('train', 'val'):
        for kind in ('img_dir', 'ann_dir'):
            (root / kind / split).mkdir(parents=True)
        cv2.imwrite(str(root / f'img_dir/{split}/0.png'), np.ascontiguousarray(picture[..., ::-1]))
        cv2.imwrite(str(root / f'ann_dir/{split}/0{suffix}'), mask)


def build(config: str, loader: str, **changes: Any) -> Any:
    """A dataset as a base config has it, without the transform that repaints images."""
    with DefaultScope.overwrite_default_scope(None):
        cfg = Config.fromfile(str(ROOT / f'configs/_base_/datasets/{config}.py'))
    source = dict(cfg[loader].dataset, **changes)
    source['pipeline'] = [t for t in source['pipeline'] if t['type'] != 'PhotoMetricDistortion']
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(source)


def labels_of(sample: Dict[str, Any]) -> np.ndarray:
    return sample['data_samples'].gt_sem_seg.data[0].numpy()


@pytest.mark.parametrize('name', SETS)
def test_a_stored_value_becomes_its_class(name: str, tmp_path: Path) -> None:
    rows, ignored, suffix = SETS[name]
    mask, picture = draw(rows, ignored, 96)
    write(tmp_path, suffix, mask, picture)
    dataset = build(name, 'val_dataloader', data_root=str(tmp_path))
    labels = labels_of(dataset[0])
    assert list(dataset.metainfo['classes']) == [row[1] for row in rows]
    assert [tuple(c) for c in dataset.metainfo['palette']] == [row[2] for row in rows]
    for index, (value, _, color) in enumerate(rows):
        assert (labels[mask == value] == index).all() and (mask == value).any()
        assert (picture[labels == index] == color).all()
    assert (labels[mask == ignored] == dataset.ignore_index).all()


@pytest.mark.parametrize('name', SETS)
def test_the_training_pipeline_keeps_image_and_mask_together(name: str, tmp_path: Path) -> None:
    rows, ignored, suffix = SETS[name]
    side = dict(loveda=1024, isaid=896, demo=128).get(name, 512)  # the tiles' own
    write(tmp_path, suffix, *draw(rows, ignored, side))
    dataset = build(name, 'train_dataloader', data_root=str(tmp_path))
    np.random.seed(0)
    for _ in range(3):
        sample = dataset[0]
        image = sample['inputs'].numpy()[::-1].transpose(1, 2, 0)  # OpenCV's BGR
        labels = labels_of(sample)
        palette = np.full((256, 3), 77)
        palette[: len(rows)] = dataset.metainfo['palette']
        inner = cv2.erode(labels.astype(np.uint8), np.ones((9, 9))) == cv2.dilate(
            labels.astype(np.uint8), np.ones((9, 9))
        )  # away from blended borders
        assert inner.mean() > 0.1
        np.testing.assert_array_equal(image[inner], palette[labels[inner]])


@pytest.mark.parametrize('name', ['potsdam', 'vaihingen', 'isaid'])
def test_the_converter_reads_the_color_of_the_palette(name: str) -> None:
    """Label picture, stored value and MMSeg's palette of the index it becomes."""
    rows, _, suffix = SETS[name]
    layout = LAYOUTS[name]
    colors = np.array([[row[2] for row in rows]], np.uint8)
    stored, other = ColorClasses(dict(layout.colors)).read(colors, '', 0)
    assert stored.tolist() == [[row[0] for row in rows]] and not other.any()
    assert layout.label_suffix == suffix
    black = ColorClasses(dict(layout.colors)).read(np.zeros((1, 1, 3), np.uint8), '', 0)[0]
    assert black.tolist() == [[0]]  # boundaries of ISPRS, background of iSAID


def test_the_demo_draws_what_its_values_mean(tmp_path: Path) -> None:
    """Through the writer: water is dark, roofs lie where buildings are; the map's colors too."""
    import rasterio

    from mapsage.extras.demo import ground_canvas

    for value, name, _ in LOVEDA:
        assert getattr(ground_canvas, name.upper()) == value
    write_demo_data(tmp_path / 'demo', DemoParams(0, 1, 1, 128, 64))
    with rasterio.open(str(tmp_path / 'demo' / demo_map.LABEL)) as label, rasterio.open(
        str(tmp_path / 'demo' / demo_map.SCENE)
    ) as scene:
        colors, mask, image = label.colormap(1), label.read(1), scene.read().astype(float)
    assert [colors[value][:3] for value, _, _ in LOVEDA] == [color for _, _, color in LOVEDA]
    red, green, blue = (np.array([band[mask == v].mean() for v in range(8)]) for band in image)
    assert green[6] > red[6] and green[6] > blue[6]  # forest is green
    assert blue[4] > red[4]  # water is not
    assert red[5] > green[5] > blue[5]  # soil is reddish
    assert red[1:].argmin() + 1 in (4, 6)  # the two dark classes are water and forest


def box(index: int) -> List[int]:
    return [20 * index, 0, 20 * index + 9, 0, 20 * index + 9, 9, 20 * index, 9]


def test_nwpu_polygons_become_the_class_of_their_name(tmp_path: Path) -> None:
    names = [
        'airplane',
        'ship',
        'storage_tank',
        'baseball_diamond',
        'tennis_court',
        'basketball_court',
        'ground_track_field',
        'harbor',
        'bridge',
        'vehicle',
    ]
    (tmp_path / 'images').mkdir()
    cv2.imwrite(str(tmp_path / 'images/0.png'), np.zeros((40, 240, 3), np.uint8))
    (tmp_path / 'val.json').write_text(
        json.dumps(
            dict(
                images=[dict(id=1, file_name='0.png', height=40, width=240)],
                categories=[
                    dict(id=90 - i, name=n) for i, n in enumerate(names)
                ],  # ids the other way
                annotations=[
                    dict(id=i, image_id=1, category_id=90 - i, segmentation=[box(i)])
                    for i in range(len(names))
                ],
            )
        )
    )
    dataset = build('nwpu', 'val_dataloader', data_root=str(tmp_path))
    labels = labels_of(dataset[0])
    classes = dataset.metainfo['classes']
    assert [classes[labels[5, 20 * i + 5]] for i in range(len(names))] == names
    assert classes[labels[30, 5]] == 'background' and dataset.metainfo['palette'][0] == [0, 0, 0]
    assert len({tuple(c) for c in dataset.metainfo['palette']}) == len(classes) == 11


def test_mmrs1m_boxes_become_the_class_of_their_name(tmp_path: Path) -> None:
    classes = ('background', 'ship', 'harbor', 'plane')
    cv2.imwrite(str(tmp_path / '0.png'), np.zeros((80, 80, 3), np.uint8))
    answer = ', '.join(
        f'<p>1 {name}</p>[{x / 4},0.25,{(x + 1) / 4},0.75]'
        for x, name in enumerate(reversed(classes[1:]))
    )
    (tmp_path / 'boxes.json').write_text(
        json.dumps(
            [
                dict(
                    image='0.png',
                    conversations=[
                        {'from': 'human', 'value': 'Where?'},
                        {'from': 'gpt', 'value': f'There are {answer}.'},
                    ],
                )
            ]
        )
    )
    palette = [[0, 0, 0], [0, 130, 200], [230, 25, 75], [60, 180, 75]]
    pipeline = [dict(type=t) for t in ('LoadImageFromFile', 'LoadBoxPseudoMasks', 'PackSegInputs')]
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                type='MMRS1MDataset',
                data_root=str(tmp_path),
                ann_file='boxes.json',
                data_prefix=dict(img_path=''),
                box_supervised=True,
                pipeline=pipeline,
                metainfo=dict(classes=classes, palette=palette),
            )
        )
    labels = labels_of(dataset[0])
    names = [dataset.metainfo['classes'][labels[40, x]] for x in (10, 30, 50, 70)]
    assert names == ['plane', 'harbor', 'ship', 'background']
    assert [dataset.metainfo['palette'][labels[40, x]] for x in (10, 30)] == palette[:1:-1]
    assert labels[40, 20] == 255
