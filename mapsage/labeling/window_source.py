"""The windows of images and scenes that a model looks at to say what to label."""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from mapsage.inference.description import Bands
from mapsage.inference.inputs import Scene, choose_size
from mapsage.inference.windows import window_starts

from .window_facts import Place


@dataclass(frozen=True)
class WindowCandidate:
    """A window that may be chosen.

    Attributes:
        place: The window in pixels of its file.
        column, row: Its first pixel in the size that the model sees the file in.
    """

    place: Place
    column: int
    row: int


class WindowSource:
    """Windows of images and scenes, in the size that the model sees them in.

    Args:
        bands: Bands that are read, and how the model sees them.
        window: Height and width of a window in pixels that the model sees.
        scale: Size that the model sees a scene in, as a multiple of its own; see ``choose_size``.
        gsd: Side in meters of the pixels that the model was trained on, in place of ``scale``.
    """

    def __init__(self, bands: Bands, window: Tuple[int, int], scale: Optional[float] = None,
                 gsd: Optional[float] = None) -> None:
        self.bands, self.window = bands, window
        self._scale, self._gsd = scale, gsd

    def scene(self, path: str) -> Scene:
        """Return an image or scene.

        Raises:
            PredictError: If it cannot be read as the model needs it.
        """
        scene = Scene(path, self.bands)
        size, _ = choose_size(scene, self.bands.resize, self._scale, self._gsd)
        return scene if size == scene.size else Scene(path, self.bands, size)

    def grid(self, scene: Scene) -> List[WindowCandidate]:
        """Return the windows of an opened scene, as few as cover it."""
        height, width = scene.size
        raster = scene.raster
        down, across = raster.height / height, raster.width / width
        found = []
        for row in window_starts(height, self.window[0], 0):
            for column in window_starts(width, self.window[1], 0):
                left, top = round(column * across), round(row * down)
                right = min(raster.width, round((column + self.window[1]) * across))
                bottom = min(raster.height, round((row + self.window[0]) * down))
                found.append(WindowCandidate(Place(scene.path, left, top, max(1, right - left),
                                             max(1, bottom - top)), column, row))
        return found

    def read(self, windows: Sequence[WindowCandidate]
             ) -> Iterator[Tuple[WindowCandidate, np.ndarray, np.ndarray]]:
        """Yield windows, in their order, with their values and which pixels hold data.

        Files are opened one by one.

        Yields:
            The window, ``(bands, height, width)`` as the model gets them, and bool ``(h, w)``: the
            part in the scene, True where there is data.
        """
        for path, some in itertools.groupby(windows, key=lambda each: each.place.path):
            scene = self.scene(path)
            with scene.raster:
                for each in some:
                    values, valid, _ = scene.read(each.column, each.row, self.window)
                    yield each, values, valid
