"""Normalization of images with any number of bands."""

from __future__ import annotations

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope

import mapsage.datasets  # noqa: F401  (registers the data preprocessor)


def test_preprocessor_for_any_number_of_bands() -> None:
    with DefaultScope.overwrite_default_scope('mmseg'):
        prepare = MODELS.build(
            dict(
                type='BandDataPreProcessor',
                mean=[1.0, 2, 3, 4, 5],
                std=[1.0, 2, 4, 8, 16],
                size=(4, 4),
            )
        )
    image = torch.arange(80.0).view(5, 4, 4)
    out = prepare(dict(inputs=[image], data_samples=None))['inputs'][0]
    for band in range(5):
        assert torch.equal(out[band], (image[band] - (band + 1)) / 2**band)
    for wrong in (dict(mean=[1.0], std=[1.0, 2.0]), dict(mean=[1.0]), dict(mean=[1.0], std=[0.0])):
        with pytest.raises(ValueError, match='expected'):
            MODELS.build(dict(type='mmseg.BandDataPreProcessor', **wrong))
