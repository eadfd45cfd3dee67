"""What a prediction takes from a config: the window that the model was trained on."""

from __future__ import annotations

from typing import Any

import pytest
from mmengine.config import Config

from mapsage.maps.model import default_window

CROP = dict(type='RandomCrop', crop_size=(96, 128))


def scenes(window: int, *steps: dict) -> dict:
    return dict(
        dataset=dict(
            type='GeoTiffDataset',
            scenes='x',
            window=window,
            pipeline=[dict(type='LoadGeoTiffWindow'), *steps],
        )
    )


def wrapped(loader: dict) -> dict:
    return dict(
        dataset=dict(
            type='RepeatDataset',
            times=2,
            dataset=dict(type='ConcatDataset', datasets=[loader['dataset'], loader['dataset']]),
        )
    )


@pytest.mark.parametrize(
    'size, words, settings',
    [
        ((512, 512), 'names no size', {}),
        ((80, 80), 'size of the data_preprocessor', dict(preprocessor=dict(size=(80, 80)))),
        ((64, 72), 'crop_size in', dict(crop_size=(64, 72), preprocessor=dict(size=(80, 80)))),
        # A base file's crop size is not what this dataset gives.
        (
            (256, 256),
            "window of the train_dataloader's",
            dict(crop_size=(64, 72), train_dataloader=scenes(256), test_dataloader=scenes(400)),
        ),
        (
            (256, 256),
            "window of the train_dataloader's",
            dict(train_dataloader=wrapped(scenes(256))),
        ),
        ((400, 400), "window of the test_dataloader's", dict(test_dataloader=scenes(400))),
        (
            (96, 128),
            "RandomCrop of the train_dataloader's",
            dict(train_dataloader=scenes(256, CROP)),
        ),
        (
            (40, 40),
            "model's test_cfg",
            dict(test_cfg=dict(crop_size=(40, 40)), train_dataloader=scenes(256)),
        ),
        # A dataset of one's own may mean something else by this word.
        ((512, 512), 'names no size', dict(train_dataloader=dict(dataset=dict(window='hann')))),
    ],
)
def test_the_window_is_the_one_of_the_training(size: tuple, words: str, settings: Any) -> None:
    settings = dict(settings)
    model = dict(
        data_preprocessor=settings.pop('preprocessor', {}),
        test_cfg=settings.pop('test_cfg', dict(mode='whole')),
    )
    found, why = default_window(Config(dict(model=model, **settings)))
    assert found == size and words in why
