"""Which tiles and drawn label maps the picture of rewards shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import cv2
import numpy as np
import torch

from mapsage.extras.labels.rewards.reward_pictures import RewardPictures
from mapsage.extras.labels.rewards.reward_sheet import RewardedTile, render_reward_sheet

METAINFO: Dict[str, Any] = dict(classes=('ground', 'road'), palette=[[90, 160, 90], [40, 40, 40]])
TOTALS = [0.9, 0.1, 0.5, 0.2, 0.3, 0.4, 0.6]


def test_the_tile_with_the_widest_spread_is_shown_from_the_smallest_reward_on(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 255, (3, 3, 20, 24), np.uint8))
    samples: List[Any] = [
        dict(inputs=image, data_samples=SimpleNamespace(metainfo=dict(img_path=f'{number}.png')))
        for number, image in enumerate(images)
    ]
    maps = torch.from_numpy(rng.integers(0, 2, (3, 7, 20, 24)))
    truth, likely = maps[:, 0] * 0, maps[:, 1] * 0 + 1
    rewards = rng.random((3, 7, 1))
    pictures, path = RewardPictures(['UnbrokenLength']), tmp_path / 'new' / 'reward_maps.png'
    flat = torch.full((3, 7), 0.5)
    # Maps that all have one reward teach nothing, and one that is no number is no spread.
    flat[2, 0] = float('nan')
    pictures.offer(samples, maps, likely, truth, flat, rewards)
    pictures.save(path, METAINFO, (0, 1, 2))
    assert not path.exists()
    totals = flat.clone()
    totals[1] = torch.tensor(TOTALS)
    totals[0, 0] = 0.6
    pictures.offer(samples, maps, likely, truth, totals, rewards)
    pictures.save(path, METAINFO, (0, 1, 2))
    # The smallest, the largest, and three between them.
    shown = [1, 4, 5, 2, 0]
    expected = render_reward_sheet(
        [
            RewardedTile(
                images[1].numpy().transpose(1, 2, 0),
                truth[1].numpy(),
                likely[1].numpy(),
                maps[1, shown].numpy(),
                rewards[1][shown],
                np.float32(TOTALS)[shown],
                2,
                '1.png',
            )
        ],
        ['UnbrokenLength'],
        METAINFO['classes'],
        METAINFO['palette'],
    )
    assert (cv2.imread(str(path))[..., ::-1] == expected).all()
