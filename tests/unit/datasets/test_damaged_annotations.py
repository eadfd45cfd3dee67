"""Files of annotations and of prepared folders with anything in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import cv2
import numpy as np
import pytest
from fuzzing import documents
from hypothesis import example, given

from mapsage.datasets import CocoPolygonDataset
from mapsage.extras.demo.demo_folder import MARKER, is_complete
from mapsage.extras.demo.prepare.archives import LEDGER, PrepareError, _open_ledger
from mapsage.extras.mmrs1m.records import read_class, read_conversations, read_objects

COCO: Dict[str, Any] = dict(
    categories=[dict(id=30, name='tank'), dict(id=4, name='ship')],
    images=[dict(id=7, file_name='a.png', height=20, width=30)],
    annotations=[
        dict(id=1, image_id=7, category_id=30, segmentation=[[2, 2, 4, 2, 4, 4, 2, 4]], iscrowd=0)
    ],
)
RECORDS = [
    dict(
        image='a.png',
        conversations=[
            {'from': 'human', 'value': 'where? [0.1,0.2,0.3,0.4]'},
            {'from': 'gpt', 'value': 'There are <p>2 ships</p>[0.1,0.1,0.2,0.2;0,0,1,1]'},
        ],
    )
]
ASKED = dict(version=1, layout='loveda')
ENTRY = dict(image='a', files=['img_dir/a.png'])


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp('annotations')
    cv2.imwrite(str(root / 'a.png'), np.zeros((20, 30, 3), np.uint8))
    return root


@given(documents(COCO))
def test_any_coco_file(folder: Path, content: bytes) -> None:
    (folder / 'a.json').write_bytes(content)
    try:
        dataset = CocoPolygonDataset(
            ann_file='a.json',
            data_root=str(folder),
            pipeline=[],
            data_prefix=dict(img_path=''),
            metainfo=dict(classes=('background', 'ship', 'tank'), palette=[[0] * 3] * 3),
        )
        assert len(dataset) == 1
    except ValueError as error:
        assert 'a.json' in str(error)


@given(documents(RECORDS))
def test_any_conversations(folder: Path, content: bytes) -> None:
    path = folder / 'records.json'
    path.write_bytes(content)
    try:
        conversations = read_conversations(path)
    except ValueError as error:
        assert 'records.json' in str(error)
        return
    for conversation in conversations:
        for read in (read_class, read_objects):
            try:
                read(conversation, 'record 0')
            except ValueError as error:
                assert 'record 0' in str(error)


@given(documents(dict(seed=0, size=64)))
def test_any_marker_of_a_demo(folder: Path, content: bytes) -> None:
    root = folder / 'demo'
    root.mkdir(exist_ok=True)
    (root / MARKER).write_bytes(content)
    try:
        assert is_complete(root, dict(seed=0, size=64))
    except ValueError as error:
        assert str(root) in str(error)


@given(documents(ASKED), documents(ENTRY))
@example(json.dumps(ASKED).encode(), b'7')
@example(json.dumps(ASKED).encode(), json.dumps(dict(image='a', files='img')).encode())
def test_any_ledger(folder: Path, first: bytes, second: bytes) -> None:
    root = folder / 'prepared'
    root.mkdir(exist_ok=True)
    (root / LEDGER).write_bytes(first + b'\n' + second + b'\n')
    try:
        assert isinstance(_open_ledger(root, ASKED), dict)
    except PrepareError as error:
        assert str(root) in str(error)
