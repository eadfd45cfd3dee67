"""Labeled and unlabeled samples in one dataset: what is hidden, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import cv2
import numpy as np
import pytest
import torch
from geotiff_data import METAINFO, write_scene
from mmengine.registry import DATASETS, init_default_scope

from mapsage.engine.loading.data_checks import check_files_exist, check_labels
from mapsage.extras.labels.unlabeled import HideLabels
from mapsage.host.dataset_parts import innermost

LOAD = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
WEAK = [
    *LOAD,
    dict(type='HideLabels'),
    dict(type='RandomCrop', crop_size=(24, 24)),
    dict(type='Pad', size=(32, 32)),
    dict(type='PackUnlabeledInputs'),
]


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support import write_tiny_data

    root = write_tiny_data(tmp_path_factory.mktemp('tiles'), train=6, val=1, size=32)
    (root / 'more' / 'deep').mkdir(parents=True)
    (root / 'more' / 'empty').mkdir()
    for name in ('a.PNG', 'deep/遥感.jpg'):
        cv2.imencode(name[-4:].lower(), np.full((32, 32, 3), 9, np.uint8))[1].tofile(
            str(root / 'more' / name)
        )
    (root / 'more' / 'notes.txt').write_text('no image')
    (root / 'labeled.txt').write_text('# two tiles\n1\n\n3\n', encoding='utf-8-sig')
    init_default_scope('mmseg')
    return root


def tiles(data: Path, pipeline: Any = None, **settings: Any) -> Dict[str, Any]:
    return dict(
        dict(
            type='LoveDADataset',
            data_root=str(data),
            pipeline=pipeline or [*LOAD, dict(type='PackSegInputs')],
            data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
        ),
        **settings,
    )


def named(data: Path, exclude: bool = False, pipeline: Any = None) -> Dict[str, Any]:
    return dict(
        type='NamedSamples',
        names=str(data / 'labeled.txt'),
        exclude=exclude,
        dataset=tiles(data, pipeline),
    )


def images(data: Path, **settings: Any) -> Dict[str, Any]:
    return dict(
        dict(
            type='UnlabeledImages',
            data_root=str(data),
            folders='more',
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='HideLabels'),
                dict(type='PackUnlabeledInputs'),
            ],
        ),
        **settings,
    )


def joined(labeled: Any, unlabeled: Any) -> Any:
    return DATASETS.build(dict(type='SemiSupervisedDataset', labeled=labeled, unlabeled=unlabeled))


def test_the_list_divides_one_dataset(data: Path) -> None:
    dataset = joined(named(data), [named(data, True, WEAK), images(data)])
    assert dataset.sizes == (2, 6) and len(dataset) == 8
    stems = [Path(dataset.get_data_info(index)['img_path']).stem for index in range(8)]
    assert stems == ['1', '3', '0', '2', '4', '5', 'a', '遥感']
    assert dataset.metainfo['classes'][1] == 'building'
    assert innermost(dataset, 7)[1] == 1
    check_files_exist(dataset)


def test_an_unlabeled_sample_shows_no_label(data: Path) -> None:
    dataset = joined(named(data), named(data, True, WEAK))
    plain = DATASETS.build(tiles(data))
    for index in (2, 5):
        sample = dataset[index]['data_samples']
        assert (sample.gt_sem_seg.data == 255).all() and sample.metainfo['unlabeled']
        hidden = sample.hidden_sem_seg.data[0]
        assert hidden.dtype == torch.uint8
        assert (hidden[:24, :24] != 255).all()  # padding is no part of the image
        assert (hidden[24:] == 255).all() and (hidden[:, 24:] == 255).all()
        truth = plain[[0, 2, 4, 5][index - 2]]['data_samples'].gt_sem_seg.data
        assert set(hidden[:24, :24].unique().tolist()) <= {254, *truth.unique().tolist()}
        check_labels(dataset, index, dataset[index])
    assert 'unlabeled' not in dataset[0]['data_samples'].metainfo


def test_images_of_a_folder_have_no_truth(data: Path) -> None:
    sample = joined(named(data), images(data))[3]['data_samples']
    assert (sample.hidden_sem_seg.data == 254).all() and (sample.gt_sem_seg.data == 255).all()


def test_a_hidden_mask_knows_classes_and_what_has_none() -> None:
    given = np.zeros((4, 4), np.uint8)
    given[0], given[1] = 255, 3
    results = HideLabels().transform(
        dict(img=np.zeros((4, 4, 3)), gt_seg_map=given, seg_fields=['gt_seg_map'])
    )
    assert results['gt_seg_map'][:, 0].tolist() == [254, 3, 0, 0]
    assert results['seg_fields'] == ['gt_seg_map']
    with pytest.raises(ValueError, match='a mask with the label 254'):
        HideLabels().transform(dict(img=np.zeros((4, 4, 3)), gt_seg_map=given * 0 + 254))


def test_windows_of_scenes_without_labels(tmp_path: Path) -> None:
    for name in ('a', 'b'):
        write_scene(tmp_path, name)
    common = dict(type='GeoTiffDataset', data_root=str(tmp_path), window=128, metainfo=METAINFO)
    labeled = dict(
        common,
        scenes='scenes/a.tif',
        labels='labels',
        pipeline=[
            dict(type='LoadGeoTiffWindow'),
            dict(type='LoadGeoTiffLabels'),
            dict(type='PackSegInputs'),
        ],
    )
    unlabeled = dict(
        common,
        scenes='scenes/b.tif',
        pipeline=[
            dict(type='LoadGeoTiffWindow'),
            dict(type='HideLabels'),
            dict(type='PackUnlabeledInputs'),
        ],
    )
    dataset = joined(labeled, unlabeled)
    first, last = dataset[0], dataset[len(dataset) - 1]
    assert first['inputs'].shape == last['inputs'].shape == (3, 128, 128)
    hidden = last['data_samples'].hidden_sem_seg.data[0]
    valid = torch.from_numpy(
        dataset.datasets[1]
        .pipeline.transforms[0]
        .transform(dataset.get_data_info(len(dataset) - 1))['valid']
    )
    assert torch.equal(hidden != 255, valid) and set(hidden.unique().tolist()) <= {254, 255}
    with pytest.raises(ValueError, match='images of 2 bands, and the labeled one .* of 3'):
        joined(labeled, dict(unlabeled, bands=[1, 2]))


def test_a_scene_of_both_is_named_also_inside_of_wrappers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mapsage.extras.labels.unlabeled import joined as module

    said: List[str] = []
    monkeypatch.setattr(module, 'print_log', lambda text, **_: said.append(text))
    for name in ('a', 'b', 'c'):
        write_scene(tmp_path, name)

    def windows(scene: str, *pipeline: str, **settings: Any) -> Dict[str, Any]:
        return dict(
            dict(
                type='GeoTiffDataset',
                data_root=str(tmp_path),
                window=128,
                metainfo=METAINFO,
                scenes=f'scenes/{scene}.tif',
                pipeline=[dict(type=each) for each in pipeline],
            ),
            **settings,
        )

    hidden = 'LoadGeoTiffWindow', 'HideLabels', 'PackUnlabeledInputs'
    labeled = dict(
        type='ConcatDataset',
        datasets=[
            windows(
                each, 'LoadGeoTiffWindow', 'LoadGeoTiffLabels', 'PackSegInputs', labels='labels'
            )
            for each in ('a', 'b')
        ],
    )
    joined(labeled, windows('c', *hidden))
    assert not said
    again = dict(type='RepeatDataset', times=2, dataset=windows('b', *hidden))
    assert len(joined(labeled, [windows('c', *hidden), again])) > 3
    assert said[0].startswith(f'scene {tmp_path}/scenes/b.tif is read by') and len(said) == 1
    # The file of a scene as an image of a folder, too.
    joined(labeled, images(tmp_path, folders='scenes'))
    assert f'scene {tmp_path}/scenes/a.tif' in said[1] and 'and so are 1 more' in said[1]


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda data: [], 'unlabeled is empty'),
        (lambda data: tiles(data, WEAK, indices=0), r'unlabeled dataset \(LoveDADataset\) has no'),
        (
            lambda data: [
                images(data),
                tiles(
                    data, WEAK, data_prefix=dict(img_path='more/empty', seg_map_path='more/empty')
                ),
            ],
            'has no sample: expected images in',
        ),
        (
            lambda data: dict(type='RepeatDataset', times=2, dataset=tiles(data, WEAK)),
            r'1\.png is a labeled and an unlabeled image, .* 1 more',
        ),
        (lambda data: tiles(data, WEAK), r'1\.png is a labeled and an unlabeled image, .* 1 more'),
        (lambda data: named(data, True), 'packed as labeled ones.*HideLabels'),
        (lambda data: images(data, folders='none'), "none' of unlabeled images does not exist"),
        (lambda data: images(data, folders='ann_dir/val', data_root=str(data.parent)), 'not exist'),
        (
            lambda data: named(
                data,
                True,
                [
                    *WEAK[:3],
                    dict(type='RandomCrop', crop_size=(24, 24), cat_max_ratio=0.5),
                    WEAK[-1],
                ],
            ),
            'RandomCrop of the unlabeled dataset .* chooses crops by labels',
        ),
        (
            lambda data: images(
                data, pipeline=[dict(type='LoadImageFromFile'), dict(type='PackUnlabeledInputs')]
            ),
            'without HideLabels',
        ),
    ],
)
def test_what_does_not_go_together(data: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(named(data), change(data))


@pytest.mark.parametrize(
    'text, exclude, message',
    [
        (b'1\n99', False, "names '99', and 0 more"),
        (b'# none\n', False, 'is empty'),
        ('遥感'.encode('gbk'), False, 'is not in UTF-8'),
        (None, False, 'cannot be read'),
        (b'0\n1\n2\n3\n4\n5', True, 'names all 6 images'),
    ],
)
def test_lists_that_name_nothing(
    data: Path, tmp_path: Path, text: Any, exclude: bool, message: str
) -> None:
    path = tmp_path / 'names.txt'
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        DATASETS.build(
            dict(type='NamedSamples', names=str(path), exclude=exclude, dataset=tiles(data))
        )


def test_the_random_numbers_of_a_run_stay(data: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    joined(named(data), named(data, True, WEAK))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
