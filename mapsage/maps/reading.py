"""Read the windows of a scene ahead of the model, in one thread or several.

One thread decodes a window in milliseconds, which keeps any CPU busy and no GPU. So the number of
threads is found while the prediction runs: it is doubled as long as the model waits for windows.
Windows are handed out in their order, so neither the batches nor the map depend on that number.
GDAL decodes without Python's lock: two threads read 1.6 to 1.9 times as fast as one.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from typing import Deque, Generator, Iterable, List, Protocol, Tuple

import numpy as np

from mapsage.base.process import BackgroundWorker
from mapsage.geo import Mosaic

from .inputs import Scene

# Pixels, mask of pixels with data, and lines about damaged blocks, see Scene.read.
Window = Tuple[np.ndarray, np.ndarray, List[str]]

# Windows that are read ahead for each thread, and the bytes of pixels that may wait in total. Every
# thread has a window in any case.
_AHEAD, _AHEAD_BYTES = 4, 512 << 20
# Neighbors share blocks of the file, which GDAL decodes once a thread. A thread therefore reads all
# windows that begin in a column of the scene as wide as this many windows.
_WIDE = 2
# Batches between two decisions, and the share of the time in which the model may wait.
_BATCHES, _TOLERATED = 8, 0.05
_MOST_THREADS = 8


class ReadableScene(Protocol):
    """A scene, see :class:`mapsage.maps.inputs.Scene`."""

    def read(self, column: int, row: int, window: Tuple[int, int]) -> Window:
        """Return the window that begins at a pixel. Several threads may call this."""


def most_readers(scene: Scene) -> int:
    """Return how many threads may read a scene: the processors of this process, at most eight.

    A picture is decoded as a whole by the first thread that needs it, and a mosaic keeps a list of
    its open files that threads cannot share, so one thread reads these.
    """
    if scene.is_picture or isinstance(scene.raster, Mosaic):
        return 1
    affinity = getattr(os, 'sched_getaffinity', None)
    return min(_MOST_THREADS, len(affinity(0)) if affinity else os.cpu_count() or 1)


class WindowReader:
    """Reads windows of a scene with as many threads as the model needs.

    Args:
        scene: The scene.
        most: Largest number of threads; 1 for a scene that threads cannot share.

    Attributes:
        threads: Current number of threads.
    """

    def __init__(self, scene: ReadableScene, most: int) -> None:
        self._scene, self._most = scene, most
        self.threads = 1
        self._window_bytes = 1
        self._batches, self._waited, self._elapsed = 0, 0.0, 0.0

    def read(
        self, corners: Iterable[Tuple[int, int]], size: Tuple[int, int]
    ) -> Generator[Window, None, None]:
        """Yield the windows in the order of their corners.

        An error is raised when its window is due. The threads end when the generator is closed.

        Args:
            corners: First column and row of each window.
            size: Height and width of a window in pixels.
        """
        workers = [BackgroundWorker(f'read-{number}') for number in range(self._most)]
        waiting: Deque[Future] = deque()
        try:
            for column, row in corners:
                worker = workers[column // (_WIDE * size[1]) % self.threads]
                waiting.append(worker.submit(self._scene.read, column, row, size))
                while len(waiting) > self._most_waiting():
                    window = waiting.popleft().result()
                    self._window_bytes = max(1, window[0].nbytes)
                    yield window
            while waiting:
                yield waiting.popleft().result()
        finally:
            for worker in workers:
                worker.close()

    def _most_waiting(self) -> int:
        """Return the number of windows that may be read or being read before they are needed."""
        return max(self.threads, min(_AHEAD * self.threads, _AHEAD_BYTES // self._window_bytes))

    def note_batch(self, waited: float, elapsed: float) -> None:
        """Take more threads if the model has waited for windows.

        Args:
            waited: Seconds that the model waited for a batch.
            elapsed: Seconds from the batch before to this one.
        """
        self._batches, self._waited = self._batches + 1, self._waited + waited
        self._elapsed += elapsed
        if self._batches < _BATCHES:
            return
        if self._waited > _TOLERATED * self._elapsed:
            self.threads = min(2 * self.threads, self._most)
        self._batches, self._waited, self._elapsed = 0, 0.0, 0.0
