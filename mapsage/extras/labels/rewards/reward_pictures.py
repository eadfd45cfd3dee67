"""Some of the latest tiles with their drawn label maps, for a picture of what rewards prefer."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Deque, Mapping, Sequence

import numpy as np
import torch
from mmengine.dist import is_main_process

from mapsage.host.batch_images import Channels, choose_channels
from mapsage.pictures.canvas import save_png

from .reward_sheet import RewardedTile, render_reward_sheet

# Tiles of the picture, and label maps of a tile.
_LENGTH, _MAPS = 6, 5


class RewardPictures:
    """The latest tiles of the first rank whose label maps have different rewards.

    Args:
        names: Names of the K reward functions.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._tiles: Deque[RewardedTile] = deque(maxlen=_LENGTH)
        self._batches = 0

    def offer(
        self,
        samples: Sequence[Any],
        maps: torch.Tensor,
        likely: torch.Tensor,
        truth: torch.Tensor,
        totals: torch.Tensor,
        rewards: np.ndarray,
    ) -> None:
        """Keep a tile of a batch, on the first rank.

        Args:
            samples: Samples, each with ``inputs`` (B, H, W).
            maps: Drawn label maps, (N, G, H, W).
            likely: Most likely labels, (N, H, W).
            truth: True labels, (N, H, W).
            totals: Weighted sums of the rewards, (N, G).
            rewards: Rewards of each function, (N, G, K).
        """
        self._batches += 1
        if not is_main_process():
            return
        spreads = totals.max(1)[0] - totals.min(1)[0]
        index = int(torch.nan_to_num(spreads, nan=-1).argmax())
        if not spreads[index] > 0:
            return
        order = totals[index].argsort()
        # The smallest and largest rewards, and some between them.
        chosen = order[np.unique(np.linspace(0, len(order) - 1, _MAPS).round().astype(int))]
        inputs = samples[index]['inputs']
        height, width = inputs.shape[-2:]
        self._tiles.append(
            RewardedTile(
                inputs.cpu().numpy().transpose(1, 2, 0).copy(),
                truth[index, :height, :width].numpy(),
                likely[index, :height, :width].numpy(),
                maps[index, chosen, :height, :width].numpy(),
                rewards[index][chosen.numpy()],
                totals[index, chosen].numpy(),
                self._batches,
                str(samples[index]['data_samples'].metainfo.get('img_path') or ''),
            )
        )

    def save(self, path: Path, metainfo: Mapping[str, Any], channels: Channels) -> None:
        """Write the picture as PNG, if there is a tile.

        Args:
            path: Path of the file.
            metainfo: ``classes`` and ``palette`` of the dataset.
            channels: Channels of the images to show, see ``shown_channels``.
        """
        if not self._tiles:
            return
        tiles = [replace(tile, image=choose_channels(tile.image, channels)) for tile in self._tiles]
        palette = metainfo.get('palette')
        save_png(
            str(path),
            render_reward_sheet(
                tiles,
                self._names,
                metainfo.get('classes') or (),
                None if isinstance(palette, str) else palette,
            ),
        )
