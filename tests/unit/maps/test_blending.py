"""Blended windows equal the whole image where the model allows it; finished rows move out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, List

import numpy as np
import pytest
import torch
from color_model import MemoryScene, PixelModel
from hypothesis import given, settings
from hypothesis import strategies as st

from mapsage.maps import device_blending
from mapsage.maps.blending import NO_DATA, RowBlender, winners
from mapsage.maps.device_blending import DeviceBlender
from mapsage.maps.errors import PredictError
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.strips import Strip, predict_strips
from mapsage.maps.windows import Grid, blend_weights


def tensors_of(blender: Any, scores: np.ndarray) -> Any:
    """Return scores or weights as the blender takes them."""
    return torch.from_numpy(scores) if isinstance(blender, DeviceBlender) else scores


# What holds for sums on the host holds for sums on a device, to the byte.
both_blenders = pytest.mark.parametrize(
    'make_blender',
    [RowBlender, partial(DeviceBlender, torch.device('cpu'), lambda tensor: tensor.cpu)],
)


def random_pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (3, height, width)).astype(np.uint8)


def predict_all(
    scene: Any,
    model: Any,
    window: tuple,
    overlap: int,
    strips: Any = None,
    batch_size: int = 3,
    tta: bool = False,
) -> List[Strip]:
    grid = Grid(*scene.pixels.shape[1:], window, overlap)
    predictor = WindowPredictor(model, torch.device('cpu'), window, overlap, batch_size, tta)
    kept: List[Strip] = []
    numbers = range(len(grid.rows)) if strips is None else strips
    predict_strips(scene, grid, numbers, predictor, batch_size, True, kept.append, lambda n: None)
    return sorted(kept, key=lambda strip: strip.number)


def whole(strips: List[Strip]) -> tuple:
    return (
        np.concatenate([strip.classes for strip in strips]),
        np.concatenate([strip.confidence for strip in strips]),
    )


@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(4, 24), st.integers(4, 24), st.data())
def test_a_model_of_single_pixels_gives_what_it_gives_for_the_whole_image(
    height: int, width: int, high: int, wide: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, min(high, wide) - 1))
    scene = MemoryScene(random_pixels(height, width))
    model = PixelModel()
    with torch.no_grad():
        expected = model.encode_decode(torch.from_numpy(scene.pixels[None]).float(), []).softmax(1)
    classes, confidence = whole(predict_all(scene, model, (high, wide), overlap))
    best = expected[0].max(0)
    np.testing.assert_array_equal(classes, best.indices.numpy())
    # equal but for a rounding of the per cent
    np.testing.assert_allclose(confidence, 100 * best.values.numpy(), atol=0.501)


def test_a_constant_model_leaves_no_seam() -> None:
    scene = MemoryScene(np.full((3, 50, 61), 90, np.uint8))
    classes, confidence = whole(predict_all(scene, PixelModel(), (16, 16), 5))
    assert len(np.unique(classes)) == 1 and len(np.unique(confidence)) == 1


class Ramp(PixelModel):
    """Answers by where in the window a pixel is: the worst case for seams."""

    def encode_decode(self, inputs: torch.Tensor, metas: list) -> torch.Tensor:
        ramp = torch.linspace(-1, 1, inputs.shape[3]).expand(len(inputs), 1, inputs.shape[2], -1)
        return torch.cat([ramp, -ramp], 1)

    out_channels = num_classes = 2


def test_windows_that_disagree_are_blended_smoothly() -> None:
    scene = MemoryScene(np.zeros((3, 32, 104), np.uint8))
    _, confidence = whole(predict_all(scene, Ramp(), (32, 32), 8))
    steps = np.abs(np.diff(confidence[0].astype(int)))
    # Side by side the windows would jump from 88 % of one class to 88 % of the other.
    assert steps.max() <= 12


@pytest.mark.parametrize('strips', [[0], [2, 3], [1, 4]])
def test_strips_predicted_apart_are_the_same_bits(strips: list) -> None:
    torch.manual_seed(0)
    model = PixelModel(context=5)
    scene = MemoryScene(random_pixels(75, 60))
    everything = predict_all(scene, model, (24, 24), 10)
    apart = predict_all(scene, model, (24, 24), 10, strips)
    assert len(everything) > 4 and [strip.number for strip in apart] == strips
    for strip in apart:
        np.testing.assert_array_equal(strip.classes, everything[strip.number].classes)
        np.testing.assert_array_equal(strip.confidence, everything[strip.number].confidence)


@pytest.mark.parametrize('blocks', [2, 3, 8])
def test_blocks_of_columns_are_the_same_bits(blocks: int) -> None:
    """Memory is bounded by them; windows of single batches, since kernels follow the batch."""
    torch.manual_seed(0)
    scene = MemoryScene(random_pixels(40, 130))
    scene.valid[:, 50:] = False
    scene.valid[5:, 90:] = True
    whole_grid = Grid(40, 130, (24, 24), 10)
    predictor = WindowPredictor(PixelModel(context=5), torch.device('cpu'), (24, 24), 10, 1)
    rows = len(whole_grid.rows)
    maps = []
    for grid in (whole_grid, replace(whole_grid, blocks=blocks)):
        assert [grid.span(number)[0] for number in range(0, grid.strip_count, rows)][0] == 0
        strips: List[Strip] = []
        # The last one of each block alone, as a rank may get it.
        apart = range(rows - 1, grid.strip_count, rows)
        others = [number for number in range(grid.strip_count) if number not in apart]
        for numbers in (apart, others):
            predict_strips(
                scene, grid, numbers, predictor, 1, True, strips.append, lambda count: None, True
            )
        planes = np.full((6, 40, 130), 99, np.uint8)
        for strip in strips:
            box = slice(*grid.strip(strip.number)), slice(*grid.span(strip.number))
            assert (planes[(slice(None), *box)] == 99).all()
            planes[(0, *box)], planes[(1, *box)] = strip.classes, strip.confidence
            planes[(slice(2, None), *box)] = strip.probabilities
        maps.append(planes)
    np.testing.assert_array_equal(*maps)


def test_blocks_bound_the_memory_of_any_width() -> None:
    assert Grid(10_000, 10_000, (512, 512), 128).bounded(150).blocks == 1
    grid = Grid(600, 400_000, (512, 512), 128).bounded(7)
    widest = max(np.subtract(*grid.reach(number)[::-1]) for number in range(0, grid.strip_count, 2))
    assert 4 * 8 * grid.shared_rows * widest < 1.02 * 768 * 2**20


def test_mirrored_windows_make_a_model_symmetric() -> None:
    torch.manual_seed(0)
    model = PixelModel(context=5)
    pixels = random_pixels(24, 24)
    plain, _ = whole(predict_all(MemoryScene(pixels), model, (24, 24), 0, tta=True))
    turned = np.ascontiguousarray(pixels[:, :, ::-1])
    mirrored, _ = whole(predict_all(MemoryScene(turned), model, (24, 24), 0, tta=True))
    assert (plain == mirrored[:, ::-1]).mean() > 0.999  # sums of four in another order
    without, _ = whole(predict_all(MemoryScene(turned), model, (24, 24), 0))
    assert (plain == without[:, ::-1]).mean() < 0.95


def test_no_data_and_damage_stay_out_of_the_map() -> None:
    scene = MemoryScene(random_pixels(40, 40))
    scene.valid[:20, :20] = False
    scene.damaged = (30, 30)
    strips = predict_all(scene, PixelModel(), (16, 16), 4)
    classes, confidence = whole(strips)
    np.testing.assert_array_equal(classes == NO_DATA, ~scene.valid)
    np.testing.assert_array_equal(confidence == NO_DATA, ~scene.valid)
    lines = [line for strip in strips for line in strip.damage]
    assert lines and all('damaged' in line for line in lines)


@both_blenders
def test_a_binary_model_with_one_output_keeps_its_threshold(make_blender: Any) -> None:
    blender = make_blender(1, (4, 4), 4, 0, threshold=0.3, confidence=True, probabilities=True)
    blender.begin(4)
    weights = np.full((4, 4), 0.5, np.float32)
    scores = np.linspace(0, 1, 16, dtype=np.float32).reshape(1, 4, 4)
    for _ in range(2):
        blender.add(
            0,
            tensors_of(blender, scores * weights),
            tensors_of(blender, weights),
            np.ones((4, 4), bool),
        )
    rows = blender.take()
    np.testing.assert_array_equal(rows.classes, scores[0] > 0.3)
    expected = 100 * np.where(scores[0] > 0.3, scores[0], 1 - scores[0])
    np.testing.assert_allclose(rows.confidence, expected, atol=0.501)
    np.testing.assert_array_equal(rows.probabilities[1], np.rint(250 * scores[0]))
    np.testing.assert_array_equal(rows.probabilities.sum(0), np.full((4, 4), 250))


def test_finished_rows_move_out_and_new_ones_start_empty() -> None:
    blender = RowBlender(2, (4, 3), 3, 1)
    blender.begin(3)
    ones, valid = np.ones((4, 3), np.float32), np.ones((4, 3), bool)
    blender.add(0, np.stack([2 * ones, ones]), ones, valid)
    assert (blender.take().classes == 0).all()
    blender.begin(4)
    blender.add(0, np.stack([ones, 3 * ones]), ones, valid)
    rows = blender.take()
    # 2 + 1 against 1 + 3 in the row of both, then the second alone
    assert (rows.classes == 1).all()
    blender.begin(4)
    assert (blender.take().classes == NO_DATA).all()


@both_blenders
@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 20), st.integers(2, 20), st.data())
def test_sums_are_the_bits_of_sums_over_the_whole_scene(
    make_blender: Any, height: int, width: int, high: int, wide: int, data: st.DataObject
) -> None:
    grid = Grid(height, width, (high, wide), data.draw(st.integers(0, min(high, wide) - 1)))
    random = np.random.RandomState(data.draw(st.integers(0, 99)))
    weights = np.outer(*(blend_weights(side, 1) for side in grid.window))
    sums = np.zeros((3, height + high, width + wide), np.float32)
    total, valid = np.zeros_like(sums[0]), np.zeros(sums.shape[1:], bool)
    # A box of one window, or of a few, is moved on; a larger one takes the whole width.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_blending, '_OPEN_COLUMNS', data.draw(st.sampled_from([1, 25, 4096])))
        blender = make_blender(
            3,
            (min(high, height), min(wide, width)),
            width,
            grid.shared_rows,
            confidence=True,
            probabilities=True,
        )
    strips = []
    for number, row in enumerate(grid.rows):
        start, stop = grid.strip(number)
        blender.begin(stop - start)
        for column in grid.columns:
            if random.rand() < 0.3:
                continue  # a window without data
            scores = random.rand(3, high, wide).astype(np.float32) * weights
            seen = random.rand(min(high, height), min(wide, width)) < 0.9
            blender.add(column, tensors_of(blender, scores), tensors_of(blender, weights), seen)
            box = np.s_[row : row + high, column : column + wide]
            sums[(slice(None), *box)] += scores
            total[box] += weights
            valid[row : row + seen.shape[0], column : column + seen.shape[1]] |= seen
        strips.append(blender.take())
    sums, total, valid = sums[:, :height, :width], total[:height, :width], valid[:height, :width]
    known = valid & (total > 0)
    classes = np.where(known, sums.argmax(0), NO_DATA)
    np.testing.assert_array_equal(np.concatenate([strip.classes for strip in strips]), classes)
    for planes, expected in (
        (
            [strip.confidence for strip in strips],
            np.rint(100 * np.minimum(sums.max(0) / np.where(known, total, 1), 1)),
        ),
        (
            np.concatenate([strip.probabilities for strip in strips], 1),
            np.minimum(np.rint(sums / (np.where(known, total, 1) / np.float32(250))), 250),
        ),
    ):
        stored = planes if isinstance(planes, np.ndarray) else np.concatenate(planes)
        np.testing.assert_array_equal(stored, np.where(known, expected, NO_DATA))


def test_memory_grows_with_the_width_by_the_shared_rows_only() -> None:
    def bytes_of(width: int) -> int:
        blender = RowBlender(150, (64, 64), width, 16)
        return sum(
            plane.nbytes for sums in (blender._open, blender._shared) for plane in sums.planes()
        )

    assert bytes_of(2000) - bytes_of(1000) == 1000 * 16 * (151 * 4 + 1)


@both_blenders
def test_scores_that_are_not_numbers_are_an_error(make_blender: Any) -> None:
    blender = make_blender(2, (2, 2), 2, 0)
    blender.begin(2)
    ones = np.ones((2, 2), np.float32)
    scores = np.stack([ones, np.nan * ones])
    blender.add(0, tensors_of(blender, scores), tensors_of(blender, ones), np.ones((2, 2), bool))
    with pytest.raises(PredictError, match='not numbers'):
        blender.take()


@given(st.integers(2, 255), st.integers(0, 2**32 - 1))
def test_winners_are_argmax(count: int, seed: int) -> None:
    # few values, so that many are equal
    sums = np.random.RandomState(seed).randint(0, 4, (count, 3, 5)).astype(np.float32)
    best, classes = winners(sums)
    np.testing.assert_array_equal(best, sums.max(0))
    np.testing.assert_array_equal(classes, sums.argmax(0))


class _Scores(PixelModel):
    """A model whose head gives scores: one class everywhere, with a sum above 1 at the left."""

    def __init__(self) -> None:
        super().__init__()
        self.decode_head = torch.nn.Identity()
        self.decode_head.gives_scores = True  # type: ignore[assignment]

    def encode_decode(self, inputs: torch.Tensor, metas: Any) -> torch.Tensor:
        scores = inputs.new_zeros(len(inputs), self.num_classes, *inputs.shape[2:])
        scores[:, 2] = torch.where(
            inputs[:, 0] < 100, inputs.new_tensor(1.6), inputs.new_tensor(0.4)
        )
        return scores


@pytest.mark.parametrize('tta', [False, True])
def test_scores_are_blended_as_they_are(tta: bool) -> None:
    """No softmax, under which 0.4 of one class and 0 of others would look like a guess."""
    pixels = np.full((3, 40, 40), 50, np.uint8)
    pixels[:, :, 20:] = 200
    strips = predict_all(MemoryScene(pixels), _Scores(), (16, 16), 5, tta=tta)
    classes, confidence = whole(strips)
    assert (classes == 2).all()
    assert (confidence[:, :20] == 100).all() and (confidence[:, 20:] == 40).all()
