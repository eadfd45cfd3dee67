"""Scores of windows in 16 bits, and with too little memory for a batch."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch
from color_model import PixelModel

from mapsage.maps.errors import PredictError
from mapsage.maps.predictor import WindowPredictor

WINDOWS = torch.from_numpy(
    np.random.RandomState(0).randint(0, 256, (7, 3, 12, 16)).astype(np.uint8)
)


class Watched(PixelModel):
    """Notes the dtype of its answers and the sizes of its batches; memory suffices for ``most``."""

    def __init__(self, most: int = 99) -> None:
        super().__init__(context=3)
        self.most = most
        self.dtypes: List[torch.dtype] = []
        self.batches: List[int] = []

    def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
        self.batches.append(len(inputs))
        if len(inputs) > self.most:
            torch.empty(1 << 60, dtype=torch.uint8)  # torch's allocator refuses
        answer = super().encode_decode(inputs, metas)
        self.dtypes.append(answer.dtype)
        return answer


def predictor(
    model: Any, batch_size: int, amp: Any = None, say: Any = print, tta: bool = False
) -> WindowPredictor:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    return WindowPredictor(model, torch.device('cpu'), (12, 16), 4, batch_size, tta, amp, say)


def test_autocast_computes_the_model_and_scores_are_float32() -> None:
    half, full = Watched(), Watched()
    scores = predictor(half, 7, torch.bfloat16, tta=True)(WINDOWS)
    expected = predictor(full, 7, tta=True)(WINDOWS)
    assert set(half.dtypes) == {torch.bfloat16} and set(full.dtypes) == {torch.float32}
    assert scores.dtype == np.float32 and (scores != expected).any()
    # Scores are sums of four, and processors add up products of 16 bits in their own order.
    np.testing.assert_allclose(scores, expected, atol=0.04)
    # Four probabilities times the weight of a pixel: their sum has no error of 16 bits.
    np.testing.assert_allclose(scores.sum(1), expected.sum(1), rtol=1e-5)


def test_too_little_memory_halves_the_batch_and_gives_the_same_scores() -> None:
    # Libraries choose kernels by the size of a batch: equal but for the last bits.
    close = dict(rtol=1e-4, atol=1e-6)
    said: List[str] = []
    model = Watched(most=2)
    predict = predictor(model, 7, say=said.append)
    np.testing.assert_allclose(predict(WINDOWS), predictor(Watched(), 7)(WINDOWS), **close)
    # Halved from 7 to 3 and 1: 2 would fit, and only halves are tried.
    assert model.batches == [7, 3] + 7 * [1] and predict.batch_size == 1
    assert said == [
        'out of memory with 7 windows of 16x12 pixels at a time: goes on with 3',
        'out of memory with 3 windows of 16x12 pixels at a time: goes on with 1',
    ]
    model = Watched(most=4)
    predict = predictor(model, 4, say=said.append)
    np.testing.assert_allclose(predict(WINDOWS), predictor(Watched(), 7)(WINDOWS), **close)
    assert model.batches == [4, 3] and len(said) == 2


def test_one_window_that_is_too_large_is_an_error_with_the_next_step() -> None:
    with pytest.raises(PredictError, match='single window of 16x12 pixels: take a smaller'):
        predictor(Watched(most=0), 2)(WINDOWS)


def test_another_error_of_the_model_is_not_hidden() -> None:
    model = Watched()
    predict = predictor(model, 2)
    model.convolution = torch.nn.Conv2d(5, 4, 1)
    with pytest.raises(RuntimeError, match='channels'):
        predict(WINDOWS)
