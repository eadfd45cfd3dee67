"""COCO polygons as masks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import cv2
import numpy as np
import pytest
import shapely
from mmengine.registry import DATASETS, DefaultScope
from support import count_class_pixels

from mapsage.datasets import CocoPolygonDataset, LoadPolygonAnnotations, NWPUPolygonDataset

ROOT = Path(__file__).resolve().parents[3]
NWPU = ROOT.parent / 'shared' / 'data' / 'nwpu_polygons'
PIPELINE = [dict(type=t) for t in ('LoadImageFromFile', 'LoadPolygonAnnotations', 'PackSegInputs')]
METAINFO = dict(classes=('background', 'ship', 'tank'), palette=[[0] * 3, [9] * 3, [7] * 3])


def _box(x0: float, y0: float, x1: float, y1: float) -> List[float]:
    return [x0, y0, x1, y0, x1, y1, x0, y1]


# Category ids are neither dense nor in the order of the classes.
SOURCE: Dict[str, List[Dict[str, Any]]] = dict(
    categories=[dict(id=30, name='tank'), dict(id=4, name='ship')],
    images=[
        dict(id=7, file_name='a.png', height=20, width=30),
        dict(id=3, file_name='b.png', height=16, width=16),
    ],
    annotations=[
        dict(id=1, image_id=7, category_id=30, segmentation=[_box(2, 2, 4, 4)]),
        dict(id=2, image_id=7, category_id=4, segmentation=[_box(0, 0, 9, 9)]),
        dict(
            id=3,
            image_id=7,
            category_id=4,
            segmentation=[_box(20, 10, 25, 15), _box(22, 12, 27, 17)],
        ),
        dict(id=4, image_id=7, category_id=4, segmentation=[_box(8, 8, 14, 14)], iscrowd=1),
    ],
)


def _build(root: Path, source: Any = SOURCE, **arguments: Any) -> CocoPolygonDataset:
    (root / 'images').mkdir(exist_ok=True)
    for image in SOURCE['images']:
        picture = np.zeros((image['height'], image['width'], 3), np.uint8)
        cv2.imwrite(str(root / 'images' / image['file_name']), picture)
    text = source if isinstance(source, str) else json.dumps(source)
    (root / 'train.json').write_text(text)
    arguments = dict(dict(metainfo=METAINFO), **arguments)
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(
            dict(
                type='CocoPolygonDataset',
                data_root=str(root),
                ann_file='train.json',
                data_prefix=dict(img_path='images'),
                pipeline=PIPELINE,
                **arguments,
            )
        )


def _mask(dataset: CocoPolygonDataset, index: int) -> np.ndarray:
    return dataset[index]['data_samples'].gt_sem_seg.data[0].numpy()


def test_values_overlap_parts_and_crowds(tmp_path: Path) -> None:
    expected = np.zeros((20, 30), int)
    expected[8:14, 8:14] = 255  # the crowd, under the large ship
    expected[0:9, 0:9] = 1
    expected[2:4, 2:4] = 2  # listed first, smaller, on top
    expected[10:15, 20:25] = 1
    expected[12:17, 22:27] = 1  # overlapping parts of one instance do not cancel out
    np.testing.assert_array_equal(_mask(_build(tmp_path), 0), expected)


@pytest.mark.parametrize('side', [1, 8, 16, 32])
@pytest.mark.parametrize('offset', [0, 0.3, -0.3])
def test_pixel_centers_decide(side: int, offset: float) -> None:
    box = np.reshape(_box(3, 5, 3 + side, 5 + side), (-1, 2)) + offset
    mask = LoadPolygonAnnotations().transform(
        dict(
            img_path='a.png',
            mask_shape=(40, 50),
            polygons=[(2, [box])],
            label_map=None,
            seg_fields=[],
        )
    )['gt_seg_map']
    expected = np.zeros((40, 50), np.uint8)
    expected[5 : 5 + side, 3 : 3 + side] = 2
    np.testing.assert_array_equal(mask, expected)


def test_image_without_annotations_is_background(tmp_path: Path) -> None:
    dataset = _build(tmp_path)
    assert len(dataset) == 2
    assert _mask(dataset, 1).shape == (16, 16) and not _mask(dataset, 1).any()
    assert count_class_pixels(dataset).tolist() == [
        int((_mask(dataset, 0) == 0).sum()) + 256,
        *[int((_mask(dataset, 0) == c).sum()) for c in (1, 2)],
    ]


def test_subset_of_a_subclass_ignores_the_rest(tmp_path: Path) -> None:
    source = copy.deepcopy(SOURCE)
    source['categories'][0]['name'] = 'storage_tank'
    (tmp_path / 'images').mkdir()
    cv2.imwrite(str(tmp_path / 'images/a.png'), np.zeros((20, 30, 3), np.uint8))
    source['images'] = source['images'][:1]
    (tmp_path / 'train.json').write_text(json.dumps(source))
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = NWPUPolygonDataset(
            ann_file='train.json',
            data_root=str(tmp_path),
            pipeline=PIPELINE,
            data_prefix=dict(img_path='images'),
            metainfo=dict(classes=('background', 'ship')),
        )
    mask = _mask(dataset, 0)
    assert mask[3, 3] == 255 and mask[0, 0] == 1 and mask[19, 0] == 0


def _set(*path: Any) -> Callable[[Any], None]:
    """A change of the JSON: ``_set('images', 0, 'id', 5)`` sets images[0]['id'] = 5."""

    def change(source: Any) -> None:
        for key in path[:-2]:
            source = source[key]
        source[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    'change, message',
    [
        (_set('images', []), 'annotation 1 belongs to image 7'),
        (_set('images', 0, 'file_name', 'c.png'), r'image 7 is .*c\.png, which does not exist'),
        (_set('images', 1, 'id', 7), 'two images have id 7'),
        (_set('images', 0, dict(id=7)), r"images\[0\] \(id 7\) lacks \['file_name', 'height'"),
        (_set('categories', 0, 'name', 'train'), "category 'train' .id 30.*'ship', 'tank'"),
        (_set('categories', 0, 'id', 4), r'category ids \[4\] occur twice'),
        (_set('categories', None), "no list 'categories'"),
        (
            _set('annotations', 1, 'category_id', 5),
            r'annotation 2 of image 7 has category_id 5.*4, 30',
        ),
        (
            _set('annotations', 1, 'segmentation', []),
            r'annotation 2 of image 7 has segmentation \[\]',
        ),
        (
            _set('annotations', 1, 'segmentation', [[1, 2, 3, 4]]),
            r'malformed polygon \[1, 2, 3, 4\]',
        ),
        (_set('annotations', 1, 'segmentation', [[1] * 7]), 'malformed polygon'),
        (_set('annotations', 1, 'segmentation', [[1, 2, 3, 4, 5, 'x']]), 'malformed polygon'),
        (_set('annotations', 1, 'segmentation', [[1, 2, 3, 4, 5, float('nan')]]), 'malformed'),
        (
            _set('annotations', 1, 'segmentation', dict(counts='x')),
            'run-length.*mapsage prepare coco',
        ),
        (
            _set('annotations', 1, 'segmentation', [_box(2, 22, 9, 29)]),
            'y 22..29, outside.*30 x 20',
        ),
    ],
)
def test_bad_files(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    source = copy.deepcopy(SOURCE)
    change(source)
    with pytest.raises(ValueError, match=message):
        _build(tmp_path, source)


def test_file_missing_or_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'train\.json is not valid JSON'):
        _build(tmp_path, json.dumps(SOURCE)[:-9])
    with pytest.raises(ValueError, match=r"nowhere\.json' does not exist"):
        CocoPolygonDataset(ann_file='nowhere.json', data_root=str(tmp_path), metainfo=METAINFO)


def test_classes_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"classes=\('background', 'tank', 'ship'\)"):
        _build(tmp_path, metainfo=None)


def test_more_classes_than_a_mask_can_hold(tmp_path: Path) -> None:
    names = ('background', 'ship', 'tank', *map(str, range(253)))
    with pytest.raises(ValueError, match='metainfo has 256 classes, expected at most 255'):
        _build(tmp_path, metainfo=dict(classes=names))


def test_image_of_another_size(tmp_path: Path) -> None:
    source = copy.deepcopy(SOURCE)
    source['images'][0]['width'] = 31
    with pytest.raises(ValueError, match=r'image 7\) is 20 x 30 .*20 x 31'):
        _build(tmp_path, source)[0]


@pytest.mark.skipif(not NWPU.is_dir(), reason=f'needs the real images in {NWPU}')
def test_real_images() -> None:
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = NWPUPolygonDataset(
            ann_file='val.json',
            data_root=str(NWPU),
            data_prefix=dict(img_path='images'),
            pipeline=PIPELINE,
        )
    assert len(dataset) == 40
    counts = count_class_pixels(dataset)
    # The areas of the polygons; only overlaps make a difference. Those that the annotators give
    # count the outline as well and are up to a tenth larger.
    source = json.loads((NWPU / 'val.json').read_text())
    for category in source['categories']:
        area = sum(
            shapely.Polygon(np.reshape(part, (-1, 2))).area
            for annotation in source['annotations']
            for part in annotation['segmentation']
            if annotation['category_id'] == category['id']
        )
        assert counts[category['id']] == pytest.approx(area, rel=0.002)
