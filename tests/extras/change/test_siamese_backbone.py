"""Features of two dates: encoded with the same weights, and fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

from mapsage.extras.change import SiameseBackbone
from mapsage.geo.stacks import StackLayoutError

PAIR = dict(image=dict(bands=[1, 2, 3], max_dates=2))


@MODELS.register_module()
class TwoLevels(BaseModule):
    """A backbone with two levels of 4 and 6 channels."""

    def __init__(self, bands: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(bands, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)

    def forward(self, image: torch.Tensor) -> Any:
        level = self.first(image)
        return level, self.second(level.relu())


def stacks(model: SiameseBackbone, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    valid = torch.ones(len(before), 2, *before.shape[2:])
    return model.layout.add_planes(
        torch.cat([before, after, valid], 1), torch.tensor([[40000.0, 41000.0]] * len(before))
    )


@pytest.mark.parametrize('fusion, factor', [('concat', 2), ('abs_diff', 1), ('concat_abs_diff', 3)])
def test_levels_are_fused_from_features_of_both_dates(fusion: str, factor: int) -> None:
    torch.manual_seed(0)
    model = SiameseBackbone(PAIR, dict(type='TwoLevels'), fusion).eval()
    before, after = torch.randn(2, 2, 3, 16, 24).unbind(0)
    encoder = model.encoders['shared']
    levels = model(stacks(model, before, after))
    for level, first, second in zip(levels, encoder(before), encoder(after)):
        difference = (second - first).abs()
        expected = dict(
            concat=[first, second],
            abs_diff=[difference],
            concat_abs_diff=[first, second, difference],
        )[fusion]
        torch.testing.assert_allclose(level, torch.cat(expected, 1))
    assert [level.shape[1] for level in levels] == [4 * factor, 6 * factor]
    exchanged = model(stacks(model, after, before))
    assert torch.equal(exchanged[0], levels[0]) == (fusion == 'abs_diff')


def test_two_sensors_with_an_encoder_for_each() -> None:
    sensors = dict(optical=dict(bands=[1, 2, 3]), radar=dict(bands=[1, 2]))
    model = SiameseBackbone(
        sensors,
        dict(optical=dict(type='TwoLevels'), radar=dict(type='TwoLevels', bands=2)),
        'abs_diff',
    )
    levels = model(torch.rand(1, model.layout.input_channels, 8, 8))
    assert [tuple(level.shape) for level in levels] == [(1, 4, 4, 4), (1, 6, 2, 2)]


@pytest.mark.parametrize(
    'sensors, fusion, text',
    [
        (dict(image=dict(bands=[1, 2, 3], max_dates=3)), 'concat', 'expected two dates in all'),
        (PAIR, 'difference', "fusion='difference', expected one of concat"),
    ],
)
def test_other_dates_and_fusions_are_refused(sensors: Any, fusion: str, text: str) -> None:
    with pytest.raises(StackLayoutError, match=text):
        SiameseBackbone(sensors, dict(type='TwoLevels'), fusion)
