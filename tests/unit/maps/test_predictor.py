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


def test_windows_of_16_bits_are_those_of_float32() -> None:
    deep = np.random.RandomState(1).randint(0, 1 << 16, (2, 3, 12, 16)).astype(np.uint16)
    predict = predictor(Watched(), 2)
    # Bands in another order are a mirrored view.
    windows = [window[::-1] for window in deep]
    batch = predict.stack(windows)
    assert batch.element_size() == 2
    np.testing.assert_array_equal(
        predict(batch), predict(predict.stack([window.astype(np.float32) for window in windows]))
    )


def test_a_map_on_a_device_asks_for_few_operators_beside_those_of_its_model() -> None:
    # PyTorch 1.10 lacks it.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    side, batch, step = 16, 8, 12
    model = PixelModel().to('meta')
    predict = WindowPredictor(model, torch.device('meta'), (side, side), 4, batch)
    width = step * (batch - 1) + side
    blender: Any = predict.blender((side, side), width, 4, confidence=False, probabilities=False)
    # Tensors without numbers arrive on the host as zeros.
    blender._copy_to_host = lambda tensor: lambda: torch.zeros(tensor.shape, dtype=tensor.dtype)
    windows = [np.zeros((3, side, side), np.uint8)] * batch

    def add_row() -> None:
        scores = predict(predict.stack(windows))
        blender.begin(step)
        for index in range(batch):
            blender.add(index * step, scores[index], predict.weights, np.ones((side, side), bool))
        blender.take()

    add_row()
    with Operators() as operators:
        add_row()
    # Two sums and their views a window, and what a batch and a row of windows cost. They were 28.
    assert operators.calls / batch <= 15


@pytest.mark.skipif(not hasattr(torch, 'compile'), reason='torch.compile needs PyTorch 2.0')
@pytest.mark.parametrize('amp', [None, torch.bfloat16])
def test_a_compiled_model_gets_batches_of_one_size(amp: Any, monkeypatch: Any) -> None:
    """The last batch is padded, so that the model is compiled once."""
    from torch._dynamo.testing import CompileCounter

    counter, sizes = CompileCounter(), []

    def compile_noted(function: Any, **options: Any) -> Any:
        compiled = compile_model(function, backend=counter, **options)

        def run(inputs: torch.Tensor, metas: Any) -> Any:
            sizes.append(len(inputs))
            return compiled(inputs, metas)

        return run

    compile_model = torch.compile
    expected = predictor(PixelModel(context=3), 3, amp)(WINDOWS)
    monkeypatch.setattr(torch, 'compile', compile_noted)
    predict = predictor(PixelModel(context=3), 3, amp)
    predict.compile()
    # Other kernels may differ in the last bits.
    np.testing.assert_allclose(predict(WINDOWS), expected, rtol=1e-2 if amp else 1e-5, atol=1e-6)
    assert len(expected) == 7 and sizes == [3, 3, 3] and counter.frame_count == 1


@pytest.mark.skipif(not hasattr(torch, 'compile'), reason='torch.compile needs PyTorch 2.0')
def test_a_model_that_cannot_be_compiled_computes_as_before(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError('no compiler here\nand a long trace')

    said: List[str] = []
    compile_model = torch.compile
    monkeypatch.setattr(
        torch, 'compile', lambda function, **options: compile_model(function, backend=refuse)
    )
    predict = predictor(PixelModel(context=3), 7, say=said.append)
    predict.compile()
    expected = predictor(PixelModel(context=3), 7)(WINDOWS)
    for _ in range(2):
        np.testing.assert_array_equal(predict(WINDOWS), expected)
    (line,) = said
    assert line.startswith('--compile: the model cannot be compiled, goes on without: ')
    assert 'no compiler here' in line and '\n' not in line


def test_compiling_needs_pytorch_2(monkeypatch: Any) -> None:
    monkeypatch.delattr(torch, 'compile', raising=False)
    with pytest.raises(PredictError, match='--compile needs PyTorch 2.0 or newer, .* leave it out'):
        predictor(PixelModel(context=3), 7).compile()
