"""Which pipeline and model --tta tests with."""

from __future__ import annotations

from typing import Any, List

import pytest
from mmengine.config import Config

from mapsage.commands.test import use_tta
from mapsage.engine.env_cfg import ConfigError

PACK = dict(type='PackSegInputs')
FLIPS = [dict(type='RandomFlip', prob=p) for p in (0.0, 1.0)]
WINDOWS = [dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'), PACK]


def steps(label: Any = 'LoadAnnotations', image: str = 'LoadImageFromFile') -> List[Any]:
    """A pipeline with test-time augmentation."""
    return [
        dict(type=image),
        dict(
            type='TestTimeAug', transforms=[FLIPS, *([[dict(type=label)]] if label else []), [PACK]]
        ),
    ]


def with_tta(dataset: dict, **settings: Any) -> Config:
    cfg = Config(
        dict(dict(model=dict(type='M'), test_dataloader=dict(dataset=dataset)), **settings)
    )
    use_tta(cfg)
    return cfg


def test_the_configs_own_are_used() -> None:
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), PACK]
    cfg = with_tta(
        dict(type='D', pipeline=pipeline), tta_pipeline=steps(), tta_model=dict(type='T', x=1)
    )
    assert cfg.model.to_dict() == dict(type='T', x=1, module=dict(type='M'))
    assert cfg.test_dataloader.dataset.pipeline == steps()


@pytest.mark.parametrize(
    'own, wanted',
    [
        (WINDOWS, steps('LoadGeoTiffLabels', 'LoadGeoTiffWindow')),
        (WINDOWS[:1] + WINDOWS[2:], steps(None, 'LoadGeoTiffWindow')),
        (
            [dict(type='LoadImageFromFile'), dict(type='LoadPolygonAnnotations'), PACK],
            steps('LoadPolygonAnnotations'),
        ),
        ([dict(type='LoadImageFromFile'), PACK], steps()),
        ([dict(type='mmseg.LoadImageFromFile'), dict(type='mmseg.LoadAnnotations'), PACK], steps()),
    ],
)
def test_an_inherited_pipeline_loads_what_the_dataset_has(own: Any, wanted: Any) -> None:
    cfg = with_tta(dict(type='D', pipeline=own), tta_pipeline=steps())
    assert cfg.test_dataloader.dataset.pipeline == wanted
    assert cfg.model.type == 'SegTTAModel'


def test_without_one_images_are_mirrored_inside_of_wrappers(capsys: Any) -> None:
    resize = dict(type='Resize', scale=(8, 8))
    other = [dict(type='LoadImageFromFile'), resize, dict(type='LoadAnnotations'), PACK]
    cfg = with_tta(
        dict(
            type='ConcatDataset',
            datasets=[
                dict(type='D', pipeline=WINDOWS),
                dict(type='RepeatDataset', times=1, dataset=dict(type='D', pipeline=other)),
            ],
        )
    )
    first, repeated = cfg.test_dataloader.dataset.datasets
    flips = [
        dict(type='RandomFlip', prob=0.0),
        dict(type='RandomFlip', prob=1.0, direction='horizontal'),
        dict(type='RandomFlip', prob=1.0, direction='vertical'),
    ]
    assert first.pipeline == [
        WINDOWS[0],
        dict(type='TestTimeAug', transforms=[flips, WINDOWS[1:2], [PACK]]),
    ]
    assert repeated.dataset.pipeline == [
        other[0],
        dict(type='TestTimeAug', transforms=[flips, [resize], other[2:3], [PACK]]),
    ]
    assert 'pipeline' not in cfg.test_dataloader.dataset
    assert 'the config has no tta_pipeline' in capsys.readouterr().out


def test_a_pipeline_that_loads_nothing_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"test pipeline \['Mine', 'PackSegInputs'\] has no "
        r'transform Load.*Set tta_pipeline',
    ):
        with_tta(dict(type='D', pipeline=[dict(type='Mine'), PACK]))
