"""A card that predicts is fed from pinned memory, and the next batch is read while it computes."""

from __future__ import annotations

import threading
from typing import Any, List, Tuple

import numpy as np
import torch
from color_model import MemoryScene, PixelModel
from transfers import Transfers

from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.strips import Strip, predict_strips
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
    """Moves its input as a preprocessor does, and computes only when the next batch is read."""

    def __init__(self, scene: Following, device: str) -> None:
        super().__init__(context=3)
        self.scene, self.device = scene, device
        self.to(device)

    def data_preprocessor(self, data: dict, training: bool) -> dict:
        inputs = [image.to(self.device, non_blocking=image.is_pinned()) for image in data['inputs']]
        return dict(data, inputs=torch.stack(inputs).float())

    def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
        assert self.scene.begun.wait(60)
        return super().encode_decode(inputs, metas)


def predicted(device: str) -> Tuple[np.ndarray, List[Tuple[torch.dtype, bool]]]:
    """Return a map, and the copies of windows to the card."""
    torch.manual_seed(0)
    scene = Following(PIXELS)
    model = Device(scene, device)
    grid = Grid(SIDE, PIXELS.shape[2], (SIDE, SIDE), 0)
    predictor = WindowPredictor(model, torch.device(device), grid.window, 0, 2)
    strips: List[Strip] = []
    with Transfers() as transfers:
        predict_strips(
            scene, grid, [0], predictor, 2, True, strips.append, lambda count: None, most_readers=2
        )
    return np.stack([strips[0].classes, strips[0].confidence]), transfers.copies


def test_windows_come_from_pinned_memory_while_the_next_ones_are_read() -> None:
    on_card, copies = predicted('cuda')
    assert copies == [(torch.uint8, False)] * 8
    on_cpu, none = predicted('cpu')
    assert not none
    np.testing.assert_array_equal(on_card, on_cpu)
