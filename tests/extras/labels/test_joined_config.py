"""Datasets in the config of a training on labels and pseudo-labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
from mmengine.config import Config

from mapsage.extras.labels.joined_config import join, without_unlabeled
from mapsage.extras.labels.pseudo_masks import MapPair
from mapsage.maps.description import Bands
from mapsage.maps.errors import PredictError

SPLIT = dict(by='blocks', size=150, unit='meters', share=0.2, part='train')
SCENES: Dict[str, Any] = dict(
    type='GeoTiffDataset',
    scenes='scenes',
    labels='l.gpkg',
    window=96,
    stride=48,
    split=SPLIT,
    windows=dict(type='random', per_epoch=7, balance=dict(house=0.3), seed=5),
    pipeline=[
        dict(type='LoadGeoTiffWindow'),
        dict(type='LoadGeoTiffLabels'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackSegInputs'),
    ],
)
TILES: Dict[str, Any] = dict(
    type='BaseSegDataset',
    data_root='data',
    reduce_zero_label=True,
    pipeline=[
        dict(type='LoadImageFromFile', color_type='color'),
        dict(type='LoadAnnotations', reduce_zero_label=True),
        dict(type='PackSegInputs'),
    ],
)
CLASSES = dict(classes=('house', 'rest'), palette=[[1, 2, 3], [4, 5, 6]], label_map={0: 255})


def joined(
    dataset: Dict[str, Any],
    folder: Path,
    path: str,
    is_picture: bool = False,
    like_opencv: bool = True,
    **settings: Any,
) -> Config:
    cfg = Config(dict(train_dataloader=dict(dataset=dataset), **settings))
    pair = MapPair('a', path, Path('a.tif'), Path('a_confidence.tif'), is_picture)
    return join(
        cfg,
        [pair],
        folder,
        CLASSES,
        64,
        Bands(3, like_opencv, None, (), None, 'color', None),
        lambda labeled, added: 1,
        'there',
    )


def test_scenes_are_cut_and_split_as_the_labeled_ones(tmp_path: Path) -> None:
    dataset = joined(SCENES, tmp_path, '/x/a.tif').train_dataloader.dataset
    labeled, added = dataset.datasets
    assert labeled == SCENES and dataset.ignore_keys == ['label_map', 'reduce_zero_label']
    assert (added.window, added.stride, added.split) == (96, 48, SPLIT)
    # The area gives the number of windows. A share by class would be an error without its mask.
    assert added.windows == dict(type='random', seed=5)
    assert added.pipeline == SCENES['pipeline'] and added.labels == str(tmp_path / 'masks')
    assert added.metainfo == dict(classes=('house', 'rest'), palette=[[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize('like_opencv, bands', [(True, [3, 2, 1]), (False, [1, 2, 3])])
def test_a_model_of_pictures_gets_scenes_in_its_order_of_bands(
    tmp_path: Path, like_opencv: bool, bands: list
) -> None:
    added = joined(
        TILES, tmp_path, '/x/a.tif', like_opencv=like_opencv
    ).train_dataloader.dataset.datasets[1]
    assert (added.type, added.bands, added.window) == ('GeoTiffDataset', bands, 64)
    assert [step.type for step in added.pipeline] == [
        'LoadGeoTiffWindow',
        'LoadGeoTiffLabels',
        'PackSegInputs',
    ]


def test_pictures_keep_their_loader_without_the_shift_of_labels(tmp_path: Path) -> None:
    both = dict(type='ConcatDataset', datasets=[dict(type='ConcatDataset', datasets=[TILES]), {}])
    cfg = joined(
        both,
        tmp_path,
        str(tmp_path / 'b/t 1.png'),
        True,
        resume=True,
        load_from='x.pth',
        work_dir='here',
        launcher='pytorch',
    )
    added = cfg.train_dataloader.dataset.datasets[2]
    assert added.pipeline[:2] == [
        dict(type='LoadImageFromFile', color_type='color'),
        dict(type='LoadAnnotations'),
    ]
    assert added.data_prefix == dict(
        img_path=str(tmp_path / 'b'), seg_map_path=str(tmp_path / 'masks')
    )
    assert Path(added.ann_file).read_text() == 't 1\n' and added.img_suffix == '.png'
    assert (cfg.resume, cfg.load_from, cfg.work_dir) == (False, None, 'there')
    assert 'launcher' not in cfg


def test_a_config_without_training_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictError, match='no train_dataloader'):
        join(
            Config(dict(model={})),
            [],
            tmp_path,
            {},
            64,
            Bands(3, True, None, (), None, 'color', None),
            lambda *_: 1,
            'there',
        )


def test_the_sampler_is_finite_if_the_sampler_of_fixmatch_was() -> None:
    dataset = dict(type='SemiSupervisedDataset', labeled=TILES, unlabeled={})
    for sampler, expected in (
        (dict(infinite=False), 'DefaultSampler'),
        (dict(), 'InfiniteSampler'),
    ):
        cfg = Config(dict(train_dataloader=dict(dataset=dataset, sampler=sampler)))
        loader = without_unlabeled(cfg).train_dataloader
        assert (loader.sampler.type, loader.dataset) == (expected, TILES)
    plain = Config(dict(train_dataloader=dict(dataset=TILES)))
    assert without_unlabeled(plain) is plain
