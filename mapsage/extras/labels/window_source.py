"""Windows of images and scenes that a model measures to decide what to label.

Two pixel grids meet here: pixels of the file (`FileWindow`) and pixels in the size that the model
sees (`WindowCandidate.column` and `.row`), which differ if a scene is resized.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from mapsage.maps.description import Bands
from mapsage.maps.inputs import Scene, choose_size
from mapsage.maps.map_model import PlaceSource
from mapsage.maps.windows import window_starts

from .window_facts import FileWindow


@dataclass(frozen=True)
class WindowCandidate:
    """A window that may be chosen.

    Attributes:
        place: The window in pixels of its file.
        column, row: Upper left pixel in the size that the model sees.
    """

    place: FileWindow
    column: int
    row: int


class WindowSource:
    """Windows of images and scenes, in the size that the model sees.

    Args:
        bands: Bands to read, and how the model expects them.
        window: Height and width of a window in pixels that the model sees.
        scale: Factor by which scenes are resized for the model; see ``choose_size``.
        gsd: Ground sampling distance of the training data in meters, instead of ``scale``.
        places: Places of a model of scene stacks; None for images and scenes.
    """

    def __init__(
        self,
        bands: Bands,
        window: Tuple[int, int],
        scale: Optional[float] = None,
        gsd: Optional[float] = None,
        places: Optional[PlaceSource] = None,
    ) -> None:
        self.bands, self.window, self.places = bands, window, places
        self._scale, self._gsd = scale, gsd

    def scene(self, path: str) -> Scene:
        """Return an image or scene in the size that the model sees.

        Raises:
            PredictError: If the file cannot be read with the bands and size that the model needs.
        """
        if self.places is not None:
            return Scene(path, self.bands, open_place=self.places.open)
        scene = Scene(path, self.bands)
        size, _ = choose_size(scene, self.bands.resize, self._scale, self._gsd)
        return scene if size == scene.size else Scene(path, self.bands, size)

    def grid(self, scene: Scene) -> List[WindowCandidate]:
        """Return the smallest set of windows that covers an opened scene."""
        height, width = scene.size
        raster = scene.raster
        down, across = raster.height / height, raster.width / width
        candidates = []
        for row in window_starts(height, self.window[0], 0):
            for column in window_starts(width, self.window[1], 0):
                left, top = round(column * across), round(row * down)
                right = min(raster.width, round((column + self.window[1]) * across))
                bottom = min(raster.height, round((row + self.window[0]) * down))
                box = FileWindow(scene.path, left, top, max(1, right - left), max(1, bottom - top))
                candidates.append(WindowCandidate(box, column, row))
        return candidates

    def read(
        self, windows: Sequence[WindowCandidate]
    ) -> Iterator[Tuple[WindowCandidate, np.ndarray, np.ndarray]]:
        """Yield windows in their order, with their values and valid pixels.

        Only one file is open at a time, so the windows of a file should be consecutive.

        Yields:
            The window; its values ``(bands, height, width)`` as the model gets them; and bool
            ``(h, w)``, the extent of the window inside the scene, True where there is data.
        """
        for path, windows_of_file in itertools.groupby(
            windows, key=lambda window: window.place.path
        ):
            scene = self.scene(path)
            with scene.raster:
                for window in windows_of_file:
                    values, valid, _ = scene.read(window.column, window.row, self.window)
                    yield window, values, valid
