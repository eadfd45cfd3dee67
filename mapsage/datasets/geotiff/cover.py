"""Which ground of its scenes a ``GeoTiffDataset`` shows with labels that count.

The checks at the start of a run use it to find ground that training and validation share
(`mapsage/engine/loading/ground_checks.py`). Ground is sampled in squares, so a scene of any size
needs little memory.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, List, Tuple

import numpy as np

from .dataset import GeoTiffDataset


class SceneCover:
    """The ground of a dataset's scenes that lies in windows and counts in ``split`` and ``aoi``.

    Args:
        dataset: Dataset of scenes.

    Attributes:
        paths: Path of each scene.
    """

    def __init__(self, dataset: GeoTiffDataset) -> None:
        self.dataset = dataset
        self._scenes: List[Dict[str, Any]] = dataset.scene_facts
        self.paths: List[str] = [scene['scene'] for scene in self._scenes]
        # Number of a scene -> (column, row) of its windows.
        self._windows: Dict[int, List[Tuple[int, int]]] = defaultdict(list)
        numbers = {path: number for number, path in enumerate(self.paths)}
        if dataset.random_windows is None:
            for index in range(len(dataset)):
                info = dataset.get_data_info(index)
                self._windows[numbers[info['scene']]].append(info['window'][:2])

    def of(self, number: int, step: int) -> np.ndarray:
        """Return where scene ``number`` is covered, for the middle of each square.

        Random windows cover the cells at which they may be drawn.

        Args:
            number: Number of the scene, counted from 0.
            step: Side of a square in pixels.

        Returns:
            bool (rows, columns) of the squares that cover the scene from its upper left corner.
        """
        scene = self._scenes[number]
        shape = tuple(-(-side // step) for side in scene['scene_shape'])
        if self.dataset.random_windows is not None:
            covered = self.dataset.random_windows.cover(number, step, shape)
        else:
            covered = np.zeros(shape, bool)
        for corner in self._windows[number]:
            # A square counts if its middle lies in the window, hence the rounding up.
            (left, top), (right, bottom) = (
                [max(0, -(-(start + size - step // 2) // step)) for start in corner]
                for size in (0, self.dataset.window)
            )
            covered[top:bottom, left:right] = True
        if scene['part'] is not None:
            covered &= scene['part'].mask(0, 0, shape[1], shape[0], step)
        if scene['area'] is not None:
            covered &= scene['area'].resized(shape).mask(0, 0, shape[1], shape[0])
        return covered
