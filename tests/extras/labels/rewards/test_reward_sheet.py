"""The picture of drawn label maps: a row for each tile, maps in the order of their rewards."""

from __future__ import annotations

import numpy as np
import pytest

from mapsage.extras.labels.rewards.reward_sheet import RewardedTile, render_reward_sheet

_PALETTE = [[255, 0, 0], [0, 0, 255]]


def _tile(totals: list) -> RewardedTile:
    maps = np.stack([np.full((16, 16), number % 2) for number in range(len(totals))])
    return RewardedTile(
        np.full((16, 16, 3), 100, np.uint8),
        np.zeros((16, 16), int),
        np.zeros((16, 16), int),
        maps,
        np.array([totals, totals]).T,
        np.array(totals),
        3,
        '牡蛎.png',
    )


def test_maps_stand_in_the_order_of_their_rewards() -> None:
    picture = render_reward_sheet(
        [_tile([0.9, 0.1, 0.5])] * 2,
        ['ComponentsFound', 'PolygonCount'],
        ['ground', 'house'],
        _PALETTE,
    )
    # Columns: image, truth, most likely, then the maps with rewards 0.1, 0.5 and 0.9.
    center = picture[70 + 96, [28 + column * 206 + 96 for column in range(6)]].astype(int)
    assert (abs(center[0] - 100) < 3).all()
    is_house = center[:, 2] > center[:, 0]
    assert is_house.tolist() == [False, False, False, True, False, False]


def test_no_tile_is_refused() -> None:
    with pytest.raises(ValueError, match='0 tiles'):
        render_reward_sheet([], ['PolygonCount'], ['ground'])
