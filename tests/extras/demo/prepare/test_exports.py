"""Exports of labeling tools become images and masks that the tutorial's config takes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import cv2
import numpy as np
import pytest
from PIL import Image

from mapsage.extras.demo import prepare_data
from mapsage.extras.demo.prepare.coco_export import decode_counts
from mapsage.extras.demo.prepare.exports import Division


def write_image(path: Path, height: int = 20, width: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), (10, 20, 30), np.uint8)).save(path)


def count_runs(pixels: np.ndarray) -> List[int]:
    """Return the counts of a run-length mask, columns one after the other, zeros first."""
    flat = pixels.T.ravel().astype(int)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [-1]])))
    return np.diff(np.concatenate([[0], edges])).tolist()


def compress(counts: List[int]) -> str:
    """Write counts as maskApi.c does (rleToString)."""
    text = ''
    for index, value in enumerate(counts):
        value -= counts[index - 2] if index > 2 else 0
        more = True
        while more:
            bits, value = value & 0x1F, value >> 5
            more = value != (-1 if bits & 0x10 else 0)
            text += chr(bits + (0x20 if more else 0) + 48)
    return text


def write_coco(
    folder: Path, annotations: List[Dict[str, Any]], images: int = 1, name: str = 'labels.json'
) -> Path:
    """Write a project of the classes pool and 屋顶, with Roboflow's placeholder."""
    names = [f'tile_{number}.jpg' for number in range(images)]
    for image in names:
        write_image(folder / image)
    document = dict(
        categories=[
            dict(id=0, name='roofs', supercategory='none'),
            dict(id=7, name='pool', supercategory='roofs'),
            dict(id=3, name='屋顶', supercategory='roofs'),
        ],
        images=[
            dict(id=number, file_name=image, height=20, width=30)
            for number, image in enumerate(names)
        ],
        annotations=[
            dict(id=number, image_id=0, **item) for number, item in enumerate(annotations)
        ],
    )
    (folder / name).write_text(json.dumps(document), encoding='utf-8')
    return folder


def run(*arguments: Any) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def read(path: Path) -> np.ndarray:
    mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert mask.dtype == np.uint8
    return mask


def box(left: int, top: int, right: int, bottom: int) -> List[float]:
    return [left, top, right, top, right, bottom, left, bottom]


def test_polygons_holes_and_both_kinds_of_run_lengths(tmp_path: Path, capsys: Any) -> None:
    expected = np.zeros((20, 30), np.uint8)
    # A roof with a courtyard, in which a pool lies; another pool next to, in two kinds of masks.
    expected[2:16, 2:14], expected[5:12, 5:11], expected[7:9, 6:9] = 2, 0, 1
    one, two = np.zeros((2, 20, 30), bool)
    one[3:9, 20:24] = two[12:18, 25:30] = True
    expected[one | two] = 1
    write_coco(
        tmp_path / 'export',
        [
            dict(category_id=7, segmentation=[box(6, 7, 9, 9)]),
            dict(category_id=3, segmentation=[box(5, 5, 11, 12), box(2, 2, 14, 16)]),
            dict(
                category_id=7,
                iscrowd=1,
                segmentation=dict(size=[20, 30], counts=count_runs(one)),
            ),
            dict(
                category_id=7,
                iscrowd=1,
                segmentation=dict(size=[20, 30], counts=compress(count_runs(two))),
            ),
        ],
    )
    assert run('coco', tmp_path / 'export', '--out', tmp_path / 'out') == 0
    np.testing.assert_array_equal(read(tmp_path / 'out/masks/train/tile_0.png'), expected)
    assert read(tmp_path / 'out/images/train/tile_0.png').shape == (20, 30, 3)
    said = capsys.readouterr().out
    assert "classes = ('background', 'pool', '屋顶')" in said
    assert (
        'left out: roofs' in said and '2 annotation(s) with iscrowd=1 have their category' in said
    )
    ignored = tmp_path / 'ignored'
    assert run('coco', tmp_path / 'export', '--out', ignored, '--ignore-crowds') == 0
    assert (read(ignored / 'masks/train/tile_0.png') == 255).sum() == (one | two).sum()


def test_counts_of_any_size_are_decoded() -> None:
    random = np.random.RandomState(0)
    for _ in range(50):
        counts = random.randint(0, 10 ** random.randint(1, 6), random.randint(1, 40)).tolist()
        assert decode_counts(compress(counts)) == counts


def test_parts_of_the_export_are_kept_and_copies_stay_together(tmp_path: Path) -> None:
    for part in ('train', 'valid', 'test'):
        write_coco(tmp_path / 'export' / part, [], 2, '_annotations.coco.json')
    with zipfile.ZipFile(tmp_path / 'roofs.zip', 'w') as archive:
        for path in sorted((tmp_path / 'export').rglob('*.*')):
            archive.write(path, path.relative_to(tmp_path / 'export').as_posix())
    assert run('coco', tmp_path / 'roofs.zip', '--out', tmp_path / 'out') == 0
    counts = {
        folder.name: len(list(folder.iterdir())) for folder in (tmp_path / 'out/masks').iterdir()
    }
    assert counts == dict(train=2, val=2, test=2)
    names = [f'{image}_jpg.rf.{copy}' for image in 'abcdefgh' for copy in ('0a', '1b', '2c')]
    parts = Division(0.25).parts(names)
    assert list(parts.values()).count('val') == 6
    assert all(len({parts[name] for name in names[at : at + 3]}) == 1 for at in range(0, 24, 3))
    places = Division(0.5, '^(.+)_[0-9]+$').parts(['hof_1', 'hof_2', 'see_1', 'see_2'])
    assert places['hof_1'] == places['hof_2'] != places['see_1'] == places['see_2']


@pytest.mark.parametrize(
    'annotation, words',
    [
        (dict(category_id=7, segmentation=[], bbox=[1, 2, 3, 4]), 'boxes alone make no mask'),
        (dict(category_id=9, segmentation=[box(0, 0, 4, 4)]), 'category_id 9, expected one of'),
        (
            dict(category_id=7, segmentation=dict(size=[20, 30], counts=[5])),
            'run-length mask that does not fill its size',
        ),
        (
            dict(category_id=7, segmentation=dict(size=[10, 30], counts=[300])),
            'has a mask of 30 x 10 pixels, its image 30 x 20',
        ),
    ],
)
def test_what_makes_no_mask_is_said(
    annotation: Dict[str, Any], words: str, tmp_path: Path, capsys: Any
) -> None:
    write_coco(tmp_path / 'export', [annotation])
    assert run('coco', tmp_path / 'export', '--out', tmp_path / 'out') == 1
    assert words in capsys.readouterr().err


def test_images_and_files_that_are_missing_are_named(tmp_path: Path, capsys: Any) -> None:
    source = write_coco(tmp_path / 'export', [], 2)
    (source / 'tile_1.jpg').unlink()
    assert run('coco', source, '--out', tmp_path / 'out') == 1
    assert 'names the image tile_1.jpg, of which the export has 0' in capsys.readouterr().err
    (source / 'labels.json').write_text('{"images": []}')
    assert run('coco', source, '--out', tmp_path / 'out') == 1
    assert 'holds no JSON file with images, annotations' in capsys.readouterr().err
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/mine.txt').touch()
    write_coco(source, [], 2)
    assert run('coco', source, '--out', tmp_path / 'out') == 1
    assert 'is not empty' in capsys.readouterr().err


COLORS = dict(background=(0, 0, 0), building=(250, 50, 83), road=(184, 61, 245))


def write_voc(
    folder: Path, mask: np.ndarray, colors: Optional[Dict[str, Any]] = None, lists: bool = True
) -> Path:
    for name in 'ab':
        write_image(folder / f'JPEGImages/{name}.jpg')
        (folder / 'SegmentationClass').mkdir(exist_ok=True)
        Image.fromarray(mask).save(folder / f'SegmentationClass/{name}.png')
        if lists:
            (folder / 'ImageSets/Segmentation').mkdir(parents=True, exist_ok=True)
            part = dict(a='train', b='val')[name]
            (folder / f'ImageSets/Segmentation/{part}.txt').write_text(f'{name}\n')
    if colors:
        lines = [f'{name}:{",".join(map(str, color))}::' for name, color in colors.items()]
        (folder / 'labelmap.txt').write_text('\n'.join(['# label:color_rgb:parts:actions', *lines]))
    return folder


def test_colored_masks_of_cvat(tmp_path: Path, capsys: Any) -> None:
    expected = np.zeros((20, 30), np.uint8)
    expected[3:9, 4:20], expected[12:] = 1, 2
    colors = np.array(list(COLORS.values()), np.uint8)
    source = write_voc(tmp_path / 'export', colors[expected], COLORS)
    assert run('voc', source, '--out', tmp_path / 'out') == 0
    for part, name in (('train', 'a'), ('val', 'b')):
        np.testing.assert_array_equal(read(tmp_path / f'out/masks/{part}/{name}.png'), expected)
    assert f'palette = {[list(color) for color in COLORS.values()]}' in capsys.readouterr().out
    unknown = colors[expected]
    unknown[0, 0] = 1, 2, 3
    write_voc(source, unknown)
    assert run('voc', source, '--out', tmp_path / 'more') == 1
    assert 'has the color 1,2,3 in 1 pixel(s), which is no class' in capsys.readouterr().err
    assert run('voc', source, '--out', tmp_path / 'other', '--ignore-other-colors') == 0
    assert (read(tmp_path / 'other/masks/val/b.png') == 255).sum() == 1


def test_masks_of_pascal_voc_without_a_label_map(tmp_path: Path) -> None:
    # Colors of Pascal VOC 2012: aeroplane, person, and the outline of objects.
    mask = np.zeros((20, 30, 3), np.uint8)
    mask[:4], mask[4:8], mask[8:9] = (128, 0, 0), (192, 128, 128), (224, 224, 192)
    source = write_voc(tmp_path / 'export', mask, lists=False)
    assert run('voc', source, '--out', tmp_path / 'out', '--val-share', 0) == 0
    labels = read(tmp_path / 'out/masks/train/a.png')
    assert labels[0, 0] == 1 and labels[5, 0] == 15 and labels[8, 0] == 255 and labels[9, 0] == 0
