"""Windows are read in several threads, in order, while the model computes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
from color_model import MemoryScene, PixelModel, paint, write_scene

from mapsage.maps.description import Bands
from mapsage.maps.inputs import Scene
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.reading import WindowReader, most_readers
from mapsage.maps.strips import Strip, Waits, predict_strips
from mapsage.maps.windows import Grid

SIDE = 8


class Watched(MemoryScene):
    """Notes the threads that read, and lets them wait for each other."""

    def __init__(self, pixels: np.ndarray, barrier: Any = None) -> None:
        super().__init__(pixels)
        self.barrier, self.threads = barrier, []  # type: ignore[var-annotated]

    def read(self, column: int, row: int, window: Tuple[int, int]) -> Any:
        self.threads.append(threading.current_thread().name)
        if self.barrier is not None:
            self.barrier.wait(60)
        return super().read(column, row, window)


def reading_threads() -> List[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith('read-')]


def pixels(height: int, width: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (3, height, width)).astype(np.uint8)


@pytest.mark.parametrize('threads', [1, 2, 3])
def test_windows_come_in_order(threads: int) -> None:
    scene = Watched(pixels(24, 96))
    reader = WindowReader(scene, threads)
    reader.threads = threads
    corners = [(column, row) for row in (0, 8, 16) for column in range(0, 88, 4)]
    windows = list(reader.read(corners, (SIDE, SIDE)))
    assert len(windows) == len(corners) and len(set(scene.threads)) == threads
    for (column, row), (values, _, _) in zip(corners, windows):
        np.testing.assert_array_equal(values, scene.pixels[:, row : row + 8, column : column + 8])
    assert not reading_threads()


@pytest.mark.parametrize('waiting, expected', [(1 << 40, 9), (3 * 3 * SIDE**2, 4), (1, 3)])
def test_the_bytes_that_wait_are_limited(waiting: int, expected: int, monkeypatch: Any) -> None:
    """Four windows a thread, or as many as fit, but one a thread, and one that is handed out."""
    monkeypatch.setattr('mapsage.maps.reading._AHEAD_BYTES', waiting)
    scene = Watched(pixels(8, 512))
    reader = WindowReader(scene, 2)
    reader.threads = 2
    windows = reader.read([(column, 0) for column in range(0, 480, 4)], (SIDE, SIDE))
    for _ in range(20):
        next(windows)
    time.sleep(0.2)
    assert len(scene.threads) == 19 + expected
    windows.close()


def test_threads_read_at_the_same_time() -> None:
    # Each wait fails unless two threads are in it.
    reader = WindowReader(Watched(pixels(8, 64), threading.Barrier(2)), 2)
    reader.threads = 2
    corners = [(column, 0) for column in (0, 16, 32, 48)]
    assert len(list(reader.read(corners, (SIDE, SIDE)))) == 4


def test_an_error_ends_the_threads() -> None:
    class Broken(MemoryScene):
        def read(self, column: int, row: int, window: Tuple[int, int]) -> Any:
            if column == 16:
                raise OSError('the storage is gone')
            return super().read(column, row, window)

    scene = Broken(pixels(40, 40))
    grid = Grid(40, 40, (SIDE, SIDE), 0)
    predictor = WindowPredictor(PixelModel(), torch.device('cpu'), (SIDE, SIDE), 0, 2)
    with pytest.raises(OSError, match='the storage is gone'):
        predict_strips(
            scene,
            grid,
            range(5),
            predictor,
            2,
            False,
            lambda strip: None,
            lambda count: None,
            most_readers=3,
        )
    assert not reading_threads()


def test_threads_are_doubled_while_the_model_waits() -> None:
    reader = WindowReader(Watched(pixels(8, 8)), 6)
    numbers = []
    for waited in 8 * [0.01] + 8 * [0.5] + 8 * [0.2] + 8 * [0.0] + 16 * [0.9]:
        reader.note_batch(waited, 1.0)
        numbers.append(reader.threads)
    # Waiting 1 % of the time is tolerated.
    assert numbers[::8] == [1, 1, 2, 4, 4, 6] and numbers[7::8] == [1, 2, 4, 4, 6, 6]


def test_a_scene_that_is_read_slowly_gets_more_threads_and_the_same_map() -> None:
    class Slow(Watched):
        def read(self, column: int, row: int, window: Tuple[int, int]) -> Any:
            time.sleep(0.005)
            return super().read(column, row, window)

    scene = Slow(pixels(64, 64))
    grid = Grid(64, 64, (SIDE, SIDE), 2)
    predictor = WindowPredictor(PixelModel(context=3), torch.device('cpu'), (SIDE, SIDE), 2, 2)
    maps: List[List[Strip]] = []
    for most in (1, 4):
        scene.threads.clear()
        maps.append([])
        predict_strips(
            scene,
            grid,
            range(len(grid.rows)),
            predictor,
            2,
            True,
            maps[-1].append,
            lambda count: None,
            most_readers=most,
        )
        # The model does nothing to speak of, so it waits for the windows.
        assert len(set(scene.threads)) >= min(2, most)
    for one, other in zip(*maps):
        np.testing.assert_array_equal(one.classes, other.classes)
        np.testing.assert_array_equal(one.confidence, other.confidence)


@pytest.mark.parametrize(
    'reading, writing, text',
    [
        (8, 1, 'reading 80 %, model 10 %, writing 10 % of the time: tiled, uncompressed or local'),
        (1, 2, 'reading 10 %, model 70 %, writing 20 % of the time: more devices share'),
        (0, 9, 'reading 0 %, model 10 %, writing 90 % of the time: --confidence'),
        # Several threads may wait longer than the prediction takes.
        (11, 0, 'reading 110 %, model 0 %, writing 0 % of the time: tiled'),
    ],
)
def test_who_was_waited_for_is_named_with_a_remedy(
    reading: float, writing: float, text: str
) -> None:
    assert Waits(reading, writing).describe(10).startswith(text)


def test_the_next_batch_is_read_while_the_model_computes() -> None:
    begun = threading.Event()

    class Following(MemoryScene):
        def read(self, column: int, row: int, window: Tuple[int, int]) -> Any:
            if (column, row) == (2 * SIDE, 0):  # the first window of the second batch
                begun.set()
            return super().read(column, row, window)

    class Waiting(PixelModel):
        def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
            assert begun.wait(60)
            return super().encode_decode(inputs, metas)

    grid = Grid(SIDE, 4 * SIDE, (SIDE, SIDE), 0)
    predictor = WindowPredictor(Waiting(), torch.device('cpu'), (SIDE, SIDE), 0, 2)
    strips: List[Strip] = []
    predict_strips(
        Following(pixels(SIDE, 4 * SIDE)),
        grid,
        [0],
        predictor,
        2,
        False,
        strips.append,
        lambda count: None,
    )
    assert len(strips) == 1


def test_one_thread_reads_a_picture_and_a_mosaic(tmp_path: Path) -> None:
    scenes = [
        str(write_scene(tmp_path / f'{number}.tif', paint(40, 40), 'EPSG:32633', transform))
        for number, transform in enumerate(
            ((1, 0, 500000, 0, -1, 5000000), (1, 0, 500030, 0, -1, 5000000))
        )
    ]
    bands = Bands(3, True)
    assert most_readers(Scene('all', bands, members=scenes)) == 1
    assert 1 <= most_readers(Scene(scenes[0], bands)) <= 8
    picture = tmp_path / 'picture.png'
    write_scene(tmp_path / 'plain.tif', paint(40, 40))
    import cv2

    cv2.imwrite(str(picture), np.zeros((40, 40, 3), np.uint8))
    assert most_readers(Scene(str(picture), bands)) == 1
