"""A card that predicts is fed from pinned memory, and finished pixels alone come back from it."""

from __future__ import annotations

import threading
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
from color_model import MemoryScene, PixelModel
from mmseg.registry import MODELS
from transfers import Transfers

from mapsage.accelerator import current_accelerator
from mapsage.maps import strips as strips_module
from mapsage.maps.blending import RowBlender
from mapsage.maps.errors import PredictError
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.strips import Strip, WriteBehind, predict_strips
from mapsage.maps.windows import Grid

SIDE = 8
PIXELS = np.random.RandomState(0).randint(0, 256, (3, SIDE, 8 * SIDE)).astype(np.uint8)


class Following(MemoryScene):
    """Notes when the first window of the second batch is read."""

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__(pixels)
        self.begun = threading.Event()

    def read(self, column: int, row: int, window: Tuple[int, int]) -> Any:
        if column == 2 * SIDE:
            self.begun.set()
        values, valid, damage = super().read(column, row, window)
        # Mirrored, as Scene hands out the bands of a picture.
        return values[::-1], valid, damage


class Device(PixelModel):
    """Computes only when the next batch is read."""

    def __init__(self, scene: Following, device: str) -> None:
        super().__init__(context=3)
        self.scene = scene
        self.preprocessor = MODELS.build(
            dict(type='SegDataPreProcessor', mean=[0.0] * 3, std=[1.0] * 3, bgr_to_rgb=True)
        )
        self.to(device)
        # As a model of MMEngine does: the preprocessor must learn its device.
        self.preprocessor.to(torch.device(device))

    def data_preprocessor(self, data: dict, training: bool) -> dict:
        return self.preprocessor(data, training)

    def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
        assert self.scene.begun.wait(60)
        return super().encode_decode(inputs, metas)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """Copies of the calling thread, and of the thread that blends."""
    counted = Transfers()

    class CountedWriteBehind(WriteBehind):
        def __init__(self, function: Any, depth: int) -> None:
            def counting(*arguments: Any) -> None:
                with counted:
                    function(*arguments)

            super().__init__(counting, depth)

    monkeypatch.setattr(strips_module, 'WriteBehind', CountedWriteBehind)
    return counted


def predicted(device: str, pixels: np.ndarray = PIXELS) -> np.ndarray:
    torch.manual_seed(0)
    scene = Following(pixels)
    model = Device(scene, device)
    grid = Grid(SIDE, PIXELS.shape[2], (SIDE, SIDE), 0)
    predictor = WindowPredictor(model, torch.device(device), grid.window, 0, 2)
    strips: List[Strip] = []
    predict_strips(
        scene, grid, [0], predictor, 2, True, strips.append, lambda count: None, most_readers=2
    )
    return np.stack([strips[0].classes, strips[0].confidence])


def test_windows_come_from_pinned_memory_while_the_next_ones_are_read(transfers: Any) -> None:
    with transfers:
        on_card = predicted('cuda')
    windows = [copy for copy in transfers.copies if copy[0] == torch.uint8]
    assert windows == [(torch.uint8, False)] * 4
    transfers.copies.clear()
    with transfers:
        on_cpu = predicted('cpu')
    assert not transfers.copies
    np.testing.assert_array_equal(on_card, on_cpu)


def test_16_bits_of_a_scene_come_as_16_bits(transfers: Any) -> None:
    deep = np.random.RandomState(2).randint(0, 1 << 16, PIXELS.shape)
    with transfers:
        on_card = predicted('cuda', deep.astype(np.uint16))
    windows = [copy for copy in transfers.copies if copy[0] == torch.int16]
    assert windows == [(torch.int16, False)] * 4
    np.testing.assert_array_equal(on_card, predicted('cpu', deep.astype(np.float32)))


class SevenClasses(Device):
    """A model of seven classes, whose scores depend on the colors around a pixel."""

    out_channels = num_classes = 7

    def __init__(self, scene: Following, device: str) -> None:
        super().__init__(scene, device)
        self.convolution = torch.nn.Conv2d(3, 7, 3, padding=1).to(device)
        scene.begun.set()


@pytest.mark.parametrize('planes', [(False, False), (True, True)])
def test_one_byte_a_pixel_comes_back_and_no_batch_waits_for_the_host(
    transfers: Any, planes: Tuple[bool, bool]
) -> None:
    side, overlap = 512, 128
    pixels = np.random.RandomState(1).randint(0, 256, (3, 900, 1700)).astype(np.uint8)
    grid, maps = Grid(900, 1700, (side, side), overlap), {}
    for device in ('cuda', 'cpu'):
        torch.manual_seed(0)
        scene = Following(pixels)
        scene.valid = np.ones(pixels.shape[1:], bool)
        scene.valid[300:600, 100:900] = False
        predictor = WindowPredictor(
            SevenClasses(scene, device), torch.device(device), grid.window, overlap, 2
        )
        maps[device] = []
        torch.cuda.set_sync_debug_mode('error')
        try:
            with transfers:
                predict_strips(
                    scene,
                    grid,
                    range(len(grid.rows)),
                    predictor,
                    2,
                    planes[0],
                    maps[device].append,
                    lambda count: None,
                    planes[1],
                )
        finally:
            torch.cuda.set_sync_debug_mode('default')
    windows = len(grid.rows) * len(grid.columns)
    count = 1 + planes[0] + 7 * planes[1]
    # One byte a pixel for each plane, and one byte a row of windows for NaN.
    assert transfers.bytes_to_host == count * 900 * 1700 + len(grid.rows)
    assert planes[0] or transfers.bytes_to_host / windows <= 0.3e6
    for on_card, on_cpu in zip(maps['cuda'], maps['cpu']):
        np.testing.assert_array_equal(on_card.classes, on_cpu.classes)
        if planes[0]:
            np.testing.assert_array_equal(on_card.confidence, on_cpu.confidence)
            np.testing.assert_array_equal(on_card.probabilities, on_cpu.probabilities)
    assert current_accelerator().name == 'cuda'


def test_a_card_too_small_for_the_sums_leaves_blending_to_the_host() -> None:
    lines: List[str] = []
    scene = Following(PIXELS)
    window = (512, 512)
    predictor = WindowPredictor(
        SevenClasses(scene, 'cuda'), torch.device('cuda'), window, 128, 2, say=lines.append
    )
    # Memory of other tests that PyTorch keeps would be enough.
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0001)
    try:
        blender = predictor.blender(window, 1700, 318)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert type(blender) is RowBlender
    (line,) = lines
    assert line.startswith('out of memory while scores are blended') and 'on the host' in line
    scores = predictor(predictor.stack([np.zeros((3, *window), np.uint8)]))
    assert isinstance(scores, np.ndarray) and isinstance(predictor.weights, np.ndarray)


def test_without_pinned_memory_the_scores_are_the_same() -> None:
    scene = Following(PIXELS)
    window = (SIDE, SIDE)
    predictor = WindowPredictor(SevenClasses(scene, 'cuda'), torch.device('cuda'), window, 0, 2)
    deep = np.random.RandomState(3).randint(0, 1 << 16, (2, 3, *window)).astype(np.uint16)
    batch = predictor.stack(list(deep))
    # What the stack is where the machine has no memory left that may be pinned.
    pageable = batch.clone()
    assert batch.is_pinned() and not pageable.is_pinned()
    assert torch.equal(predictor(pageable), predictor(batch))


@pytest.mark.parametrize(
    'convolution, error',
    [
        (torch.nn.Conv2d(3, 7, 1), r'not numbers \(NaN\)'),
        (torch.nn.Conv2d(3, 5, 1), 'gave 5 scores a pixel, expected 7'),
    ],
)
def test_scores_that_are_wrong_are_named(convolution: torch.nn.Conv2d, error: str) -> None:
    torch.nn.init.constant_(convolution.weight, np.nan)
    scene = Following(PIXELS)
    grid = Grid(SIDE, PIXELS.shape[2], (SIDE, SIDE), 0)
    model = SevenClasses(scene, 'cuda')
    model.convolution = convolution.to('cuda')
    predictor = WindowPredictor(model, torch.device('cuda'), grid.window, 0, 2)
    with pytest.raises(PredictError, match=error):
        predict_strips(scene, grid, [0], predictor, 2, True, print, lambda count: None)
