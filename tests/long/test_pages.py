"""Every block of the tutorials and how-tos, on the demo's data at reduced size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from page_blocks import Workspace, pages
from PIL import Image
from support import main_leg

pytestmark = [main_leg, pytest.mark.timeout(900)]


@pytest.fixture(scope='module')
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Provide a folder like a checkout with the demo trained in it."""
    workspace = Workspace(tmp_path_factory.mktemp('pages'))
    assert workspace.train_demo() == ''
    write_exports(workspace.folder)
    return workspace


def write_exports(folder: Path) -> None:
    """Write what own-folders.md converts: COCO of Roboflow, and colored masks of CVAT.

    The pages name archives; folders of these names are read as well.
    """
    size, box = 160, [40, 40, 90, 40, 90, 80, 40, 80]
    mask = np.zeros((size, size, 3), np.uint8)
    mask[40:80, 40:90] = 51, 221, 255
    categories = [dict(id=number, name=name) for number, name in enumerate(('roofs', 'pool'))]
    for part in ('train', 'valid', 'test'):
        names = [f'{part}_{number}_jpg.rf.0{number}.jpg' for number in range(4)]
        documents: List[Any] = [
            [
                dict(id=number, file_name=name, height=size, width=size)
                for number, name in enumerate(names)
            ],
            [
                dict(id=number, image_id=number, category_id=1, segmentation=[box])
                for number in range(4)
            ],
        ]
        (folder / 'roofs.zip' / part).mkdir(parents=True)
        for name in names:
            Image.fromarray(mask + 60).save(folder / 'roofs.zip' / part / name)
        (folder / 'roofs.zip' / part / '_annotations.coco.json').write_text(
            json.dumps(dict(zip(('images', 'annotations'), documents), categories=categories))
        )
    for name in ('JPEGImages', 'SegmentationClass'):
        (folder / 'task_5.zip' / name).mkdir(parents=True)
    for number in range(5):
        Image.fromarray(mask + 60).save(folder / f'task_5.zip/JPEGImages/city_{number}.jpg')
        Image.fromarray(mask).save(folder / f'task_5.zip/SegmentationClass/city_{number}.png')
    (folder / 'task_5.zip/labelmap.txt').write_text(
        '# label:color_rgb:parts:actions\nbackground:0,0,0::\nroad:51,221,255::\n'
    )


def train_export(workspace: Workspace, kind: str, source: str) -> None:
    """Train own-folders.md's config with the lines that the conversion of an export prints."""
    folder = workspace.folder
    out = f'data/again_{kind}'
    assert (
        workspace.run_shell(
            f'python tools/prepare_data.py {kind} {source} --out {out} > {kind}.txt'
        )
        == ''
    )
    config = (folder / 'configs/mine/tiles.py').read_text()
    lines = re.findall(r'^(\w+) = (.*)$', (folder / f'{kind}.txt').read_text(), re.MULTILINE)
    assert [name for name, _ in lines] == ['data_root', 'classes', 'palette']
    for name, value in lines:
        config, count = re.subn(rf'^{name} = .*', f'{name} = {value}', config, flags=re.MULTILINE)
        assert count == 1
    (folder / f'configs/mine/{kind}.py').write_text(config)
    assert (
        workspace.run_shell(
            f'python tools/train.py configs/mine/{kind}.py\n'
            f'python tools/predict.py work_dirs/{kind}/{kind}.py work_dirs/{kind}/iter_2000.pth '
            f'{out}/images/val --out maps/{kind}'
        )
        == ''
    )
    assert list((folder / 'maps' / kind).glob('*.tif'))


@pytest.mark.parametrize('page', pages())
def test_the_blocks_of_a_page_run(workspace: Workspace, page: str) -> None:
    failed = workspace.run_page(page)
    assert failed == [], '\n'.join(failed)
    if page == 'tutorials/own-folders.md':
        tiles = workspace.folder / 'work_dirs/tiles'
        assert len(list((tiles / 'masks').rglob('*.png'))) == 10
        assert len(list((workspace.folder / 'maps/tiles').glob('tile_*.tif'))) == 10
        assert (tiles / 'report.html').exists() and (tiles / 'preview.png').exists()
        train_export(workspace, 'coco', 'roofs.zip')
        train_export(workspace, 'voc', 'task_5.zip')
    if page == 'tutorials/scenes.md':
        assert len(list((workspace.folder / 'maps/survey').glob('*.tif'))) == 6


def test_a_block_that_fails_is_named(workspace: Workspace) -> None:
    assert 'status 3' in workspace.run_shell('exit 3')
    assert 'does not exist' in workspace.run_shell('python tools/doctor.py configs/no_such.py')
