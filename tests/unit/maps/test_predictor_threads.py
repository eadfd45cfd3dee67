"""Several threads compute batches: the bits of one thread, and no thread disturbs another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

import numpy as np
import pytest
import torch
from color_model import MemoryScene, PixelModel

from mapsage.maps.predictor import WindowPredictor, divide_threads
from mapsage.maps.strips import Strip, predict_strips
from mapsage.maps.windows import Grid

SIDE = 16


@pytest.fixture(autouse=True)
def threads_of_this_process() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Remembering(PixelModel):
    """Keeps its input in itself until another thread has done so, too."""

    # A class attribute, because a barrier cannot be copied.
    barrier: Any = None
    seen: Any = None

    def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
        self.seen = inputs
        if self.barrier is not None:
            self.barrier.wait(60)
        return super().encode_decode(self.seen, metas)


def predictor(model: Any, batch_size: int = 2) -> WindowPredictor:
    return WindowPredictor(model, torch.device('cpu'), (SIDE, SIDE), 4, batch_size)


def threaded_predictor(model: Any, threads: int) -> WindowPredictor:
    threaded = predictor(model)
    threaded.use_threads(threads)
    return threaded


def batches(count: int) -> List[np.ndarray]:
    random = np.random.RandomState(0)
    return [random.randint(0, 256, (2, 3, SIDE, SIDE)).astype(np.uint8) for _ in range(count)]


@pytest.mark.parametrize(
    'threads, expected',
    [
        (1, (1, 1)),
        (2, (2, 1)),
        (3, (3, 1)),
        (4, (4, 1)),
        (5, (4, 1)),
        (6, (3, 2)),
        (8, (4, 2)),
        (16, (4, 4)),
        (64, (4, 16)),
    ],
)
def test_few_threads_are_left_over(threads: int, expected: tuple) -> None:
    assert divide_threads(threads) == expected


def test_two_threads_compute_at_the_same_time_and_share_only_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Remembering, 'barrier', threading.Barrier(2))
    threaded = threaded_predictor(Remembering(), 2)
    assert threaded.parallel == 2
    windows = batches(6)
    with ThreadPoolExecutor(2) as pool:
        computed = list(pool.map(threaded, windows))
    alone = predictor(PixelModel())
    for scores, batch in zip(computed, windows):
        np.testing.assert_array_equal(scores, alone(batch))


def test_replicas_have_the_weights_in_the_same_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    model.num_classes = 2  # type: ignore[assignment]
    first = predictor(model)
    second = first._replica()
    assert second._model is not first._model
    for name, value in first._model.state_dict().items():
        assert second._model.state_dict()[name].data_ptr() == value.data_ptr()


def test_a_model_that_cannot_be_copied_computes_one_batch_at_a_time() -> None:
    model = PixelModel()
    model.lock = threading.Lock()
    threaded = threaded_predictor(model, 4)
    assert threaded.parallel == 1
    (batch,) = batches(1)
    np.testing.assert_array_equal(threaded(batch), predictor(PixelModel())(batch))
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize('threads', [2, 3])
def test_the_strips_of_a_scene_are_the_same_bits(threads: int) -> None:
    pixels = np.random.RandomState(1).randint(0, 256, (3, 70, 90)).astype(np.uint8)
    grid = Grid(70, 90, (SIDE, SIDE), 4)
    model = PixelModel(context=3)
    strips: List[List[Strip]] = []
    torch.set_num_threads(1)
    for threaded in (predictor(model), threaded_predictor(model, threads)):
        strips.append([])
        predict_strips(
            MemoryScene(pixels),
            grid,
            range(len(grid.rows)),
            threaded,
            2,
            True,
            strips[-1].append,
            lambda count: None,
        )
    assert len(strips[0]) == len(grid.rows)
    for one, other in zip(*strips):
        assert one.number == other.number
        np.testing.assert_array_equal(one.classes, other.classes)
        np.testing.assert_array_equal(one.confidence, other.confidence)
