"""MMRS-1M: records, boxes in pixels, and pseudo-masks only on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import cv2
import numpy as np
import pytest
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS, DefaultScope
from mmrs1m_samples import readme_box, record, text
from support import ROOT

from mapsage.extras.mmrs1m import MMRS1MDataset

CLASSES = ('background', 'ship', 'storage_tank')
PIPELINE = [dict(type=t) for t in ('LoadImageFromFile', 'LoadBoxPseudoMasks', 'PackSegInputs')]


WIDE, TALL = (64, 41), (30, 60)  # width, height
SHIPS = text(readme_box(4, 2, 20, 12, *WIDE), readme_box(40, 20, 24, 21, *WIDE))
TANK = text(readme_box(44, 24, 10, 10, *WIDE))
DETECTION = [
    record(
        'data/detection/wide.png',
        '<image>\nFind ships.',
        f'There are <p>2 ships</p>{SHIPS}, <p>a storage tank</p>{TANK}.',
    ),
    record(
        'data/detection/tall.png',
        'What is here: ' + text(readme_box(5, 50, 20, 10, *TALL)),
        'Ship.',
    ),
]
CLASSIFICATION = [
    record('data/detection/wide.png', 'Which class?', 'Ship'),
    record('data/detection/tall.png', 'Which class?', 'storage tank.'),
]


def build(root: Path, source: Any = DETECTION, **arguments: Any) -> MMRS1MDataset:
    (root / 'data/detection').mkdir(parents=True, exist_ok=True)
    for name, (width, height) in dict(wide=WIDE, tall=TALL).items():
        cv2.imwrite(
            str(root / f'data/detection/{name}.png'), np.zeros((height, width, 3), np.uint8)
        )
    written = source if isinstance(source, str) else json.dumps(source)
    (root / 'records.json').write_text(written)
    arguments = dict(
        dict(
            data_root=str(root),
            ann_file='records.json',
            data_prefix=dict(img_path=''),
            metainfo=dict(classes=CLASSES),
            names={'Storage tank': 'storage_tank'},
            pipeline=PIPELINE,
        ),
        **arguments,
    )
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(dict(type='MMRS1MDataset', **arguments))


def mask_of(dataset: MMRS1MDataset, index: int) -> np.ndarray:
    return dataset[index]['data_samples'].gt_sem_seg.data[0].numpy()


def test_segmentation_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no segmentation masks.*box_supervised=True'):
        build(tmp_path)


def test_pseudo_masks_and_what_they_are_called(tmp_path: Path) -> None:
    logger = MMLogger.get_instance('mmrs1m-test', log_file=str(tmp_path / 'run.log'))
    dataset = build(tmp_path, box_supervised=True, ignore_ring=2)
    logger.handlers[-1].flush()
    log = (tmp_path / 'run.log').read_text()
    assert log.count('box-supervised: the masks of') == 1 and 'WARNING' in log
    assert dataset.metainfo['supervision'] == 'box-supervised'
    expected = np.zeros((41, 64), int)
    expected[18:41, 38:64] = 255
    expected[22:39, 42:62] = 1
    expected[0:16, 2:26] = 255
    expected[4:12, 6:22] = 1
    expected[22:36, 42:56] = 255  # the tank, smaller, on top of a ship
    expected[26:32, 46:52] = 2
    np.testing.assert_array_equal(mask_of(dataset, 0), expected)
    tall = np.zeros((60, 30), int)
    tall[48:60, 3:27] = 255
    tall[52:58, 7:23] = 1
    np.testing.assert_array_equal(mask_of(dataset, 1), tall)


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    page = (ROOT / 'docs' / 'reference' / 'datasets.md').read_text()
    example = page.partition('## MMRS-1M')[2].partition('```python\n')[2].partition('```')[0]
    names: Dict[str, Any] = {}
    exec(example, names)
    config = dict(names['dataset'], data_root=str(tmp_path), ann_file='records.json')
    source = [record('data/detection/wide.png', '?', f'There are <p>2 vessels</p>{SHIPS}')]
    dataset = build(tmp_path, source, **{k: v for k, v in config.items() if k != 'type'})
    assert set(np.unique(mask_of(dataset, 0))) == {0, 1, 255}
    assert len(dataset.metainfo['palette']) == len(dataset.metainfo['classes']) == 2


def test_no_ring_and_a_box_that_rounding_emptied(tmp_path: Path) -> None:
    source = [record('data/detection/wide.png', '?', '<p>ship</p>[0.5,0.5,0.5,0.5]')]
    assert not mask_of(build(tmp_path, source, box_supervised=True, ignore_ring=0), 0).any()
    mask = mask_of(build(tmp_path, source, box_supervised=True, ignore_ring=1), 0)
    assert (mask == 255).sum() == 4 and not (mask == 1).any()


def test_box_records_are_in_pixels(tmp_path: Path) -> None:
    dataset = build(tmp_path, task='box', metainfo=None)
    wide, tall = dataset.records()
    assert wide['image'] == str(tmp_path / 'data/detection/wide.png') and wide['record'] == 0
    assert [o['phrase'] for o in wide['objects']] == ['2 ships', '2 ships', 'a storage tank']
    np.testing.assert_allclose(
        [o['box'] for o in wide['objects']],
        [(4, 2, 24, 14), (40, 20, 64, 41), (44, 24, 54, 34)],
        atol=1e-6,
    )
    assert tall['objects'][0]['phrase'] == 'Ship'
    np.testing.assert_allclose(tall['objects'][0]['box'], (5, 50, 25, 60), atol=1e-6)
    assert 'supervision' not in dataset.metainfo


def test_classification_records(tmp_path: Path) -> None:
    dataset = build(
        tmp_path,
        CLASSIFICATION,
        task='classification',
        pipeline=[],
        metainfo=dict(classes=CLASSES[1:]),
    )
    assert [r['label'] for r in dataset.records()] == ['ship', 'storage_tank']
    assert [dataset[i]['gt_label'] for i in range(2)] == [0, 1]


def _answer(value: str) -> List[Dict[str, Any]]:
    return [DETECTION[1], record('data/detection/wide.png', 'Where?', value)]


@pytest.mark.parametrize(
    'source, message',
    [
        ('[{"image": "a.p', 'records.json is not valid JSON.*cut off'),
        (dict(images=[]), r'records.json holds dict, expected a list'),
        ([], 'holds list, expected a list with records'),
        ([DETECTION[0], dict(image='x')], r'record 1 is .*expected \{"image"'),
        ([dict(DETECTION[0], conversations=DETECTION[0]['conversations'][:1])], 'record 0 is'),
        (
            [record('data/detection/lost.png', '?', '!')],
            r'record 0: the image .*lost.png does not exist.*data_root',
        ),
        (
            _answer('There are no ships.'),
            "record 1 asks 'Where.' and answers 'There are no ships.'",
        ),
        (_answer('<p>ship</p>[0.1,0.2,0.3,0.4] and [0.1,0.2'), 'record 1 asks'),
        (_answer('<p>ship</p>[0.1,0.2,0.3]'), r'record 1 has the box \[0.1,0.2,0.3\]'),
        (_answer('<p>ship</p>[0.1,0.2,0.3,x]'), 'record 1 has the box'),
        (_answer('<p>ship</p>[0.1,0.2,3,0.4]'), r'box \[0.1,0.2,3,0.4\], expected .* in 0..1'),
        (_answer('<p>ship</p>[0.3,0.2,0.1,0.4]'), 'x0 <= x1'),
        (_answer('<p>ship</p>[.1,.1,.2,.1,.2,.2,.1,.2]'), 'oriented box.*HBB'),
        (
            _answer('<p>2 planes</p>[0.1,0.3,0.2,0.4]'),
            r"record 1 names 'planes'.*\['ship', 'storage_tank'\].*names=\{'planes': <class>\}",
        ),
        (_answer('<p>background</p>[0.1,0.3,0.2,0.4]'), "names 'background', which is not one of"),
    ],
)
def test_records_that_are_refused(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, source, box_supervised=True)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(task='caption'), "task='caption'.*'classification', 'box'"),
        (dict(task='box', box_supervised=True), 'box_supervised=True is for'),
        (dict(box_supervised=True, ignore_ring=-1), 'ignore_ring=-1'),
        (dict(box_supervised=True, metainfo=None), r'needs the classes: metainfo=dict\(classes='),
        (dict(task='classification'), 'record 0 answers .*expected one class name'),
        (dict(task='box', ann_file='lost.json'), 'lost.json does not exist.*ann_file'),
    ],
)
def test_arguments_that_are_refused(
    arguments: Dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **arguments)


def test_a_box_that_was_not_padded_is_noticed(tmp_path: Path) -> None:
    """Normalized by width and height, y reaches into the padding of a wide image."""
    source = [record('data/detection/wide.png', '?', '<p>ship</p>[0.1,0.0,0.2,0.4]')]
    dataset = build(tmp_path, source, box_supervised=True)
    with pytest.raises(ValueError, match='record 0 has the box.*outside it.*64 x 41|64 x 41.*outs'):
        dataset[0]
