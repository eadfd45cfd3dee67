"""Pairs in Open-CD's folders: images, labels of change and of classes, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, Optional

import cv2
import numpy as np
import pytest
import rasterio
from mmengine.dataset import RepeatDataset

from mapsage.engine.loading.build import notes_on_scenes
from mapsage.extras.change import ChangeDataError, ChangeDataset, LoadChangeLabels, LoadChangePair
from mapsage.geo import GeoError
from mapsage.geo.change_classes import ChangeClassError

SENSORS = dict(image=dict(bands=[1, 2, 3], max_dates=2))
LAND = ('field', 'house', 'water')
FROM_TO: Dict[str, Any] = dict(
    land_classes=LAND,
    reduce_semantic_zero_label=True,
    data_prefix=dict(
        img_path_from='A', img_path_to='B', seg_map_path_from='label1', seg_map_path_to='label2'
    ),
)


def write(folder: Path, name: str, **planes: np.ndarray) -> None:
    for kind, plane in planes.items():
        (folder / kind).mkdir(exist_ok=True)
        # OpenCV writes BGR.
        stored = plane[..., ::-1] if plane.ndim == 3 else plane
        assert cv2.imwrite(str(folder / kind / name), stored)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two pairs; in the second one a third of the pixels has changed from field to house."""
    rng = np.random.default_rng(0)
    for number, changed in enumerate((0, 8)):
        before = rng.integers(0, 255, (24, 30, 3), np.uint8)
        label, label1, label2 = (np.zeros((24, 30), np.uint8) for _ in range(3))
        label[:changed], label1[:changed], label2[:changed] = 255, 1, 2
        write(
            tmp_path,
            f'{number}.png',
            A=before,
            B=before // 2,
            label=label,
            label1=label1,
            label2=label2,
        )
    return tmp_path


def dataset(root: Path, **options: Any) -> ChangeDataset:
    pipeline = [LoadChangePair(), LoadChangeLabels()]
    return ChangeDataset(
        **dict(dict(sensors=SENSORS, data_root=str(root), pipeline=pipeline), **options)
    )


def test_a_sample_is_a_stack_of_two_dates(root: Path) -> None:
    pairs = dataset(root, dates=('2019-06-14', '2023-07-02'))
    sample = pairs[1]
    before = cv2.imread(str(root / 'A' / '1.png'))[..., ::-1]
    assert sample['img'].shape == (24, 30, 8) and sample['img'].dtype == np.uint8
    assert (sample['img'][..., :3] == before).all()
    assert (sample['img'][..., 3:6] == before // 2).all() and (sample['img'][..., 6:] == 1).all()
    assert sample['days'][1] - sample['days'][0] == 1479
    assert pairs.metainfo['classes'] == ('unchanged', 'changed')
    assert sample['gt_seg_map'].dtype == np.uint8
    assert (sample['gt_seg_map'][:8] == 1).all() and (sample['gt_seg_map'][8:] == 0).all()


def test_classes_of_both_dates_become_from_to_classes(root: Path) -> None:
    label1, label2 = (cv2.imread(str(root / name / '1.png'), 0) for name in ('label1', 'label2'))
    label1[10, :3], label2[10, :3] = (3, 255, 3), (1, 255, 3)
    write(root, '1.png', label1=label1, label2=label2)
    pairs = dataset(root, **FROM_TO)
    classes, labels = pairs.metainfo['classes'], pairs[1]['gt_seg_map']
    assert len(classes) == 1 + 3 * 2 == len(pairs.metainfo['palette'])
    assert {classes[label] for label in labels[:8].ravel()} == {'field > house'}
    # The same class at both dates is no change.
    assert [classes[labels[10, 0]], labels[10, 1], classes[labels[10, 2]]] == [
        'water > field',
        255,
        'unchanged',
    ]


def test_class_maps_without_a_value_for_unchanged(root: Path) -> None:
    pairs = dataset(
        root, **dict(FROM_TO, reduce_semantic_zero_label=False, transitions=['house > water'])
    )
    # Values 1 and 2 are now house and water, and 0 at both dates is a field that stays.
    assert np.unique(pairs[1]['gt_seg_map']).tolist() == [0, 1]


def test_both_kinds_of_labels_must_agree(root: Path) -> None:
    options = dict(FROM_TO, data_prefix=dict(FROM_TO['data_prefix'], seg_map_path='label'))
    assert (dataset(root, **options)[1]['gt_seg_map'] > 0).sum() == 8 * 30
    label = np.zeros((24, 30), np.uint8)
    label[:7] = 255
    write(root, '1.png', label=label)
    with pytest.raises(
        GeoError,
        match=r'(?s)disagree on 30 of 720 pixels.*\(0, 7\): unchanged.*'
        r'leave seg_map_path out',
    ):
        dataset(root, **options)


@pytest.mark.parametrize(
    'options, error, text',
    [
        (dict(land_classes=LAND), ChangeClassError, 'need land_classes, seg_map_path_from'),
        (dict(FROM_TO, land_classes=None), ChangeClassError, 'need land_classes'),
        (
            dict(data_prefix=dict(img_path_from='A', img_path_to='B', seg_map_path_to='label')),
            ChangeClassError,
            'seg_map_path_to only',
        ),
        (dict(data_prefix=dict(img_path='A')), ChangeClassError, 'expected img_path_from'),
        (dict(sensors=dict(image=dict(bands=[1, 2, 3]))), ChangeDataError, 'max_dates=2'),
        (
            dict(sensors=dict(image=dict(bands=['red'], max_dates=2))),
            ChangeDataError,
            'numbers of bands',
        ),
        (dict(dates=('2023-07-02', '2019-06-14')), ChangeDataError, 'second date is before'),
        (dict(dates=('2023', '2024')), ChangeDataError, 'expected two days'),
        (
            dict(FROM_TO, transitions=['field > water']),
            GeoError,
            "'field > house'.*not in transitions",
        ),
        (dict(FROM_TO, land_palette=[[0, 0, 0]]), ChangeClassError, 'land_palette has 1'),
        (
            dict(data_prefix=dict(img_path_from='A', img_path_to='C', seg_map_path='label')),
            ChangeDataError,
            'C does not exist',
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    root: Path, options: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=f'(?s){text}'):
        dataset(root, **options)


def test_files_that_do_not_fit_are_refused(root: Path) -> None:
    (root / 'B' / '0.png').rename(root / 'B' / '2.png')
    with pytest.raises(ChangeDataError, match=r'(?s)1 of 2 names.*not in .*B.*first is 0\.png'):
        dataset(root)
    (root / 'B' / '2.png').rename(root / 'B' / '0.png')
    write(root, '7.png', label=np.zeros((24, 30), np.uint8))
    with pytest.raises(ChangeDataError, match=r'(?s)label.*1 file\(s\) that .*A lacks'):
        dataset(root)
    (root / 'label' / '7.png').unlink()
    write(root, '0.png', B=np.zeros((24, 31, 3), np.uint8))
    with pytest.raises(GeoError, match='30x24 and 31x24 pixels'):
        dataset(root)


def test_a_list_names_the_pairs(root: Path) -> None:
    for folder in ('A', 'B', 'label'):
        (root / folder / '1.png').rename(root / folder / '镇.png')
    (root / 'list.txt').write_text('\n镇\n', encoding='utf-8-sig')
    options: Dict[str, Any] = dict(ann_file='list.txt', img_suffix='.png')
    pairs = dataset(root, **options)
    assert [Path(pairs.get_data_info(index)['img_path']).name for index in range(len(pairs))] == [
        '镇.png'
    ]
    (root / 'list.txt').write_text('镇\nlost\n', encoding='utf-8')
    with pytest.raises(ChangeDataError, match=r'1 of 2 names of .*list\.txt.*first is lost\.png'):
        dataset(root, **options)
    (root / 'list.txt').write_bytes('镇\n'.encode('gbk'))
    with pytest.raises(ChangeDataError, match=r'not in UTF-8, at byte 0.*iconv -f gbk'):
        dataset(root, **options)
    (root / 'list.txt').write_text('\n')
    with pytest.raises(ChangeDataError, match=r'list\.txt has no pair'):
        dataset(root, **options)
    # Training on all pairs instead might include those of the validation.
    with pytest.raises(ChangeDataError, match=r'lst\.txt \(ann_file\) cannot be read'):
        dataset(root, ann_file='lst.txt')


def test_folders_without_any_pair_are_refused(root: Path) -> None:
    for folder in ('A', 'B', 'label'):
        for path in (root / folder).iterdir():
            path.unlink()
    for test_mode in (False, True):
        with pytest.raises(ChangeDataError, match=r'A has no pair, expected images.* \.png'):
            dataset(root, test_mode=test_mode)


def test_values_from_128_up_are_changed(root: Path) -> None:
    label = np.tile(np.array([0, 127, 128, 254, 255], np.uint8), (24, 6))
    write(root, '1.png', label=label)
    assert (dataset(root)[1]['gt_seg_map'][0, :5] == [0, 0, 1, 1, 1]).all()


def test_dates_of_8_and_16_bits_keep_their_values(root: Path) -> None:
    write(root, '1.png', B=np.full((24, 30, 3), 5000, np.uint16))
    image = dataset(root)[1]['img']
    assert image.dtype == np.float32 and (image[..., 3:6] == 5000).all()
    assert (image[..., :3] == cv2.imread(str(root / 'A' / '1.png'))[..., ::-1]).all()


def test_bands_count_before_training(root: Path, tmp_path: Path) -> None:
    with pytest.raises(GeoError, match=r'no band \[4\]'):
        dataset(root, sensors=dict(image=dict(bands=[2, 4], max_dates=2)))
    rng = np.random.default_rng(1)
    ground = cv2.GaussianBlur(rng.integers(0, 255, (70, 70, 3), np.uint8), (0, 0), 1.5)
    after = ground[:64, 6:].copy()
    # Blue is shifted by 3 pixels, red and green are not.
    after[..., 2] = ground[:64, 3:67, 2]
    for number in range(3):
        write(
            tmp_path,
            f'{number}.png',
            A=ground[:64, 6:],
            B=after,
            label=np.full((64, 64), 255, np.uint8),
        )
    for bands, right in (([3], 3), ([1, 2], 0)):
        pairs = dataset(tmp_path, sensors=dict(image=dict(bands=bands, max_dates=2)))
        assert pairs.measure_shift().columns == pytest.approx(right, abs=0.1)


def test_labels_that_cannot_be_labels_are_refused(root: Path) -> None:
    write(root, '0.png', label=np.ones((24, 30), np.uint8))
    with pytest.raises(GeoError, match='holds 0 and 1.*Multiply it by 255'):
        dataset(root)
    write(root, '0.png', label=np.zeros((24, 29), np.uint8))
    with pytest.raises(GeoError, match='29x24 pixels and the images .* 30x24'):
        dataset(root)[0]
    label1 = np.full((24, 30), 2, np.uint8)
    write(root, '0.png', label1=label1)
    with pytest.raises(GeoError, match='hold 2 and 0.*both files hold 0'):
        dataset(root, **FROM_TO)
    write(root, '0.png', label1=label1 * 4)
    with pytest.raises(GeoError, match='holds the value 8; 3 land classes allow 1 to 3'):
        dataset(root, **FROM_TO)


def test_training_labels_without_any_change_are_refused(root: Path) -> None:
    write(root, '1.png', label=np.zeros((24, 30), np.uint8))
    with pytest.raises(ChangeDataError, match='no pixel of the 2 pairs is changed'):
        dataset(root)
    assert len(dataset(root, test_mode=True)) == 2


@pytest.mark.parametrize(
    'shift, max_shift, level',
    [(0, 1, logging.INFO), (3, 1, logging.WARNING), (3, 4, logging.INFO), (3, None, None)],
)
def test_a_shift_beyond_the_bound_is_reported_before_training(
    tmp_path: Path, shift: int, max_shift: Optional[float], level: Optional[int]
) -> None:
    rng = np.random.default_rng(1)
    for number in range(3):
        ground = cv2.GaussianBlur(rng.integers(0, 255, (80, 80, 3), np.uint8), (0, 0), 1.5)
        label = np.zeros((64, 64), np.uint8)
        label[:8] = 255
        write(
            tmp_path,
            f'{number}.png',
            A=ground[8:72, 8:72],
            B=ground[8:72, 8 - shift : 72 - shift],
            label=label,
        )
    # Validation shows the same ground; its shift is not measured.
    assert dataset(tmp_path, test_mode=True).start_notes() == []
    notes = notes_on_scenes(RepeatDataset(dataset(tmp_path, max_shift=max_shift), 2))
    assert [note[0] for note in notes] == ([] if level is None else [level])
    if level is not None:
        right = float(notes[0][1].split('(')[1].split()[0])
        assert right == pytest.approx(shift, abs=0.1)
        assert ('max_shift=1' in notes[0][1]) == (level == logging.WARNING)


def test_pixels_without_data_at_one_date_have_no_label(root: Path) -> None:
    values = np.full((3, 24, 30), 9, np.uint8)
    values[:, 0, :4] = 0
    for folder, pixels in (('A', values), ('B', values * 0 + 7)):
        for name in ('0.png', '1.png'):
            (root / folder / name).unlink()
            with rasterio.open(
                str(root / folder / name.replace('png', 'tif')),
                'w',
                nodata=0,
                driver='GTiff',
                dtype='uint8',
                count=3,
                height=24,
                width=30,
            ) as file:
                file.write(pixels)
    for name in ('0', '1'):
        label = cv2.imread(str(root / 'label' / f'{name}.png'), 0)
        (root / 'label' / f'{name}.png').unlink()
        cv2.imwrite(str(root / 'label' / f'{name}.tif'), label)
    sample = dataset(root, max_shift=None)[1]
    assert (sample['gt_seg_map'][0] == [255] * 4 + [1] * 26).all()
    assert (sample['img'][0, :4] == [0, 0, 0, 7, 7, 7, 0, 1]).all()


def test_dates_of_two_baselines(tmp_path: Path) -> None:
    """The later image has the offset of Sentinel-2's newer baselines, and its bands in another order."""
    ground = np.random.default_rng(0).integers(200, 3000, (3, 24, 30)).astype('uint16')
    names = ('B02', 'B03', 'B04')
    for folder, values, offset, order in (
        ('A', ground, 0.0, names),
        ('B', ground[::-1] + np.uint16(1000), -0.1, names[::-1]),
    ):
        (tmp_path / folder).mkdir()
        with rasterio.open(
            tmp_path / folder / '0.tif', 'w', driver='GTiff', count=3, height=24, width=30,
            dtype='uint16', crs='EPSG:32633', transform=rasterio.Affine(10, 0, 5e5, 0, -10, 5e6),
        ) as file:  # fmt: skip
            file.write(values)
            file.scales, file.offsets, file.descriptions = (1e-4,) * 3, (offset,) * 3, order
    write(tmp_path, '0.png', label=np.full((24, 30), 255, np.uint8))
    (tmp_path / 'label/0.png').rename(tmp_path / 'label/0.tif')
    with pytest.raises(GeoError, match=r"A/0.tif has .* offset 0, and .*B/0.tif .*'harmonized'"):
        dataset(tmp_path)
    image = dataset(tmp_path, units='harmonized')[0]['img']
    np.testing.assert_array_equal(image[..., :3], ground.transpose(1, 2, 0))
    np.testing.assert_array_equal(image[..., 3:6], image[..., :3])
