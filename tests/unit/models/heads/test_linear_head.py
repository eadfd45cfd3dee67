"""The linear decode head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mmengine.registry import DefaultScope

from mapsage.models import LinearHead


def _head(**changes: Any) -> LinearHead:
    with DefaultScope.overwrite_default_scope('mmseg'):  # where its default loss is registered
        return LinearHead(
            **{
                **dict(
                    in_channels=[4, 6],
                    in_index=[0, 1],
                    input_transform='resize_concat',
                    channels=10,
                    num_classes=3,
                    norm_cfg=dict(type='BN'),
                    dropout_ratio=0.0,
                    align_corners=False,
                ),
                **changes,
            }
        )


def test_scores_come_from_all_maps_and_ignore_their_scale() -> None:
    torch.manual_seed(0)
    head = _head().train()
    maps = [torch.randn(2, 4, 8, 8), torch.randn(2, 6, 8, 8)]
    found = head(maps)
    assert found.shape == (2, 3, 8, 8)
    torch.testing.assert_allclose(head([100 * each for each in maps]), found, rtol=1e-3, atol=1e-3)
    assert not torch.isclose(head([maps[0], -maps[1]]), found).all()


def test_wrong_channels_and_a_missing_norm_are_named() -> None:
    with pytest.raises(ValueError, match='channels=12 .*expected channels=10'):
        _head(channels=12)
    with pytest.raises(ValueError, match='norm_cfg=None'):
        _head(norm_cfg=None)
