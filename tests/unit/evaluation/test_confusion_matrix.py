"""Confusion matrices against hand-written NumPy, MMSeg's IoUMetric and scikit-learn."""
from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import cv2
import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.evaluation import IoUMetric
from mmseg.structures import SegDataSample
from ranks import run_ranks

from mapsage.drawing.canvas import save_png
from mapsage.drawing.confusion_plot import render_confusion, short_count
from mapsage.evaluation import (
    ConfusionMatrixMetric,
    boundary_counts,
    boundary_iou,
    confusion_matrix,
    confusion_matrix_metric,
    count_pixels,
    scores,
)
from mapsage.evaluation.boundary import boundary_distance, boundary_of
from mapsage.evaluation.confusion_matrix_metric import is_repeat

NAMES = ('field', 'road', 'water', 'wood', 'roof', 'barren', 'crop')
ALL = ('mIoU', 'mDice', 'mFscore')


def labels(seed: int, num_classes: int, shape: Tuple[int, ...] = (40, 50),
           ignore_index: int = 255) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return (prediction, truth): right in about 60 % of pixels, a tenth is ignored."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, num_classes, shape)
    guess = rng.integers(0, num_classes, shape)
    prediction = np.where(rng.random(shape) < .6, truth, guess)
    truth[rng.random(shape) < .1] = ignore_index
    return torch.from_numpy(prediction), torch.from_numpy(truth)


def by_hand(prediction: torch.Tensor, truth: torch.Tensor, num_classes: int,
            ignore_index: int) -> np.ndarray:
    matrix = np.zeros((num_classes, num_classes), np.int64)
    for t, p in zip(truth.reshape(-1).tolist(), prediction.reshape(-1).tolist()):
        if t != ignore_index:
            matrix[int(t), int(p)] += 1
    return matrix


@pytest.mark.parametrize('num_classes, ignore_index', [
    (1, 255), (2, 255), (7, 255), (150, 255), (255, 255), (7, -1), (7, -100), (7, 7), (7, 3),
    (3, 65535), (256, 256)])
def test_counts_are_those_of_a_loop(num_classes: int, ignore_index: int) -> None:
    prediction, truth = labels(num_classes, num_classes, (2, 30, 40), ignore_index)
    matrix = confusion_matrix(prediction, truth, num_classes, ignore_index)
    assert matrix.dtype == torch.int64 and matrix.sum() > 1800
    np.testing.assert_array_equal(matrix, by_hand(prediction, truth, num_classes, ignore_index))


def test_counts_of_a_large_image_and_of_none() -> None:
    prediction, truth = labels(0, 7, (500, 601))  # a host counts 2**17 pixels at once
    expected, known = np.zeros((7, 7), np.int64), truth.numpy() != 255
    np.add.at(expected, (truth.numpy()[known], prediction.numpy()[known]), 1)
    np.testing.assert_array_equal(confusion_matrix(prediction, truth, 7), expected)
    assert not confusion_matrix(prediction[:0], truth[:0], 7).any()
    strided = prediction.t().contiguous().t(), truth.t().contiguous().t()
    np.testing.assert_array_equal(confusion_matrix(*strided, 7), expected)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32, torch.float32])
def test_any_dtype_and_no_change_to_the_labels(dtype: torch.dtype) -> None:
    prediction, truth = labels(1, 7)
    expected = confusion_matrix(prediction, truth, 7)
    given = [prediction.clone(), truth.clone(), prediction.to(dtype)]
    stored = truth.to(dtype) if dtype != torch.int16 else truth.to(torch.uint8)
    assert torch.equal(confusion_matrix(given[2], stored, 7), expected)
    confusion_matrix(given[0], given[1], 7)
    assert torch.equal(given[0], prediction) and torch.equal(given[1], truth)


def test_labels_outside_the_classes_are_counted_apart() -> None:
    truth = torch.tensor([0, 1, 7, 254, -1, 2**40, 255, 255, 2, 2, 2])
    prediction = torch.tensor([0, 1, 0, 0, 0, 0, 0, 99, 7, -3, 6])
    counts = count_pixels(prediction, truth, 7)
    assert counts.outside.tolist() == [4, 2]
    assert counts.matrix.sum() == 3 and counts.matrix[2, 6] == 1
    with pytest.raises(ValueError, match=r'4 truth pixel\(s\) and 2 predicted .* 0 to 6, or 255'):
        confusion_matrix(prediction, truth, 7)
    with pytest.raises(ValueError, match='expected equal ones'):
        count_pixels(prediction, truth[1:], 7)
    with pytest.raises(ValueError, match='ignore_index=100000'):
        count_pixels(prediction, truth, 7, 100000)


def mmseg_areas(matrix: np.ndarray) -> List[torch.Tensor]:
    both, truth, predicted = (torch.from_numpy(each.astype(np.float64)) for each in (
        matrix.diagonal(), matrix.sum(1), matrix.sum(0)))
    return [both, truth + predicted - both, predicted, truth]


@pytest.mark.parametrize('beta, nan_to_num', [(1, None), (2, None), (1, 0)])
def test_scores_are_mmsegs_with_its_undefined_figures(beta: int, nan_to_num: Optional[int]) -> None:
    matrix = confusion_matrix(*labels(3, 7), 7).numpy()
    matrix[4], matrix[:, 4] = 0, 0  # neither occurs nor is predicted
    matrix[2], matrix[:, 3] = 0, 0  # does not occur; is never predicted
    matrix[6, 6] = 0  # is never right
    expected = IoUMetric.total_area_to_metrics(*mmseg_areas(matrix), list(ALL), nan_to_num, beta)
    found = scores(matrix, beta, nan_to_num)
    assert np.isnan(found['Fscore'][6]) == (nan_to_num is None) and found['Dice'][6] == 0
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-14, err_msg=name)
        if name != 'aAcc':
            assert found[f'm{name}'] == pytest.approx(np.nanmean(values), rel=1e-14)


def test_scores_are_scikit_learns() -> None:
    metrics = pytest.importorskip('sklearn.metrics', reason='scikit-learn is not installed')
    for num_classes in (2, 7, 150):
        prediction, truth = labels(num_classes, num_classes, (200, 300))
        known = truth != 255
        matrix = confusion_matrix(prediction, truth, num_classes)
        pair = truth[known].numpy(), prediction[known].numpy()
        found = scores(matrix, beta=2)
        np.testing.assert_array_equal(matrix, metrics.confusion_matrix(*pair))
        for name, function in (('IoU', metrics.jaccard_score), ('Dice', metrics.f1_score),
                               ('Precision', metrics.precision_score),
                               ('Recall', metrics.recall_score)):
            np.testing.assert_array_equal(found[name], function(*pair, average=None), err_msg=name)
            assert found[f'm{name}'] == pytest.approx(function(*pair, average='macro'), rel=1e-15)
        np.testing.assert_allclose(found['Fscore'],
                                   metrics.fbeta_score(*pair, beta=2, average=None), rtol=1e-15)
        assert found['aAcc'] == metrics.accuracy_score(*pair)
        assert found['kappa'] == pytest.approx(metrics.cohen_kappa_score(*pair), rel=1e-14)


def test_kappa_by_hand_and_what_is_undefined() -> None:
    # Cohen's by hand: agreement 0.7, by chance 0.5 * 0.6 + 0.5 * 0.4
    assert scores(np.array([[20, 5], [10, 15]]))['kappa'] == pytest.approx((.7 - .5) / .5)
    assert scores(np.array([[5, 5], [5, 5]]))['kappa'] == 0
    assert np.isnan(scores(np.array([[9, 0], [0, 0]]))['kappa'])
    nothing = scores(np.zeros((3, 3), int))
    assert all(np.isnan(value).all() for value in nothing.values())
    assert scores(np.zeros((3, 3), int), nan_to_num=0)['mIoU'] == 0
    with pytest.raises(ValueError, match=r'\(2, 3\), expected \(C, C\)'):
        scores(np.zeros((2, 3)))


# The evaluator.


def sample(prediction: torch.Tensor, truth: torch.Tensor, **meta: Any) -> SegDataSample:
    data = SegDataSample(metainfo=meta)
    data.pred_sem_seg = PixelData(data=prediction[None])
    data.gt_sem_seg = PixelData(data=truth[None])
    return data


def evaluated(kind: str, pairs: List[Any], size: Optional[int] = None, classes: Any = NAMES,
              meta: Optional[Dict[str, Any]] = None, **options: Any) -> Dict[str, float]:
    with DefaultScope.overwrite_default_scope('mmseg'):
        evaluator = Evaluator(dict(type=kind, **options))
    evaluator.dataset_meta = dict(classes=classes)
    for number, pair in enumerate(pairs):
        evaluator.process([sample(*pair, img_path=f'/data/tile_{number}.tif', **meta or {})])
    return evaluator.evaluate(len(pairs) if size is None else size)


class Table(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def with_table(kind: str, *args: Any, **options: Any) -> Any:
    table, logger = Table(), MMLogger.get_current_instance()
    logger.addHandler(table)
    try:
        return evaluated(kind, *args, **options), table.lines[-2:]
    finally:
        logger.removeHandler(table)


@pytest.mark.parametrize('options', [
    {}, dict(iou_metrics=ALL), dict(iou_metrics=['mFscore'], beta=2), dict(iou_metrics=['mDice']),
    dict(iou_metrics=ALL, nan_to_num=0), dict(prefix='val'), dict(ignore_index=2)])
def test_figures_and_table_are_those_of_iou_metric(options: Dict[str, Any]) -> None:
    # Class 5 neither occurs nor is predicted, class 4 is never predicted; sizes differ.
    pairs = [(prediction.clamp(max=3), truth) for prediction, truth in (
        labels(number, 5, (30, 20 + number), options.get('ignore_index', 255))
        for number in range(4))]
    pairs.append((pairs[0][0], torch.full_like(pairs[0][1], options.get('ignore_index', 255))))
    expected, table = with_table('IoUMetric', pairs, **options)
    found, lines = with_table('ConfusionMatrixMetric', pairs, **options)
    assert lines == table and 'field' in table[-1]
    assert list(found) == list(expected)
    assert found == {key: round(float(value), 2) for key, value in expected.items()}
    assert all(isinstance(value, float) for value in found.values())


def test_kappa_and_boundary_iou_when_asked_for() -> None:
    pairs = [labels(number, 7) for number in range(2)]
    found, lines = with_table('ConfusionMatrixMetric', pairs, iou_metrics=['mBoundaryIoU', 'kappa'])
    matrix = sum(confusion_matrix(*pair, 7) for pair in pairs)
    values = boundary_iou(sum(boundary_counts(*pair, 7) for pair in pairs))
    assert found == dict(aAcc=round(100 * scores(matrix)['aAcc'], 2),
                         mBoundaryIoU=round(100 * float(values.mean()), 2),
                         kappa=round(100 * scores(matrix)['kappa'], 2))
    assert f'{100 * values[0]:.2f}' in lines[-1] and 'BoundaryIoU' in lines[-1]


def test_nothing_but_ignored_pixels_is_no_number_and_no_error() -> None:
    blank = torch.full((8, 8), 255)
    found = evaluated('ConfusionMatrixMetric', [(torch.zeros(8, 8).long(), blank)])
    assert set(found) == {'aAcc', 'mIoU', 'mAcc'} and np.isnan(list(found.values())).all()


def test_float_labels_of_a_binary_head() -> None:
    prediction, truth = labels(0, 2)
    one, other = (evaluated('ConfusionMatrixMetric', [(each, truth)], classes=('no', 'yes'))
                  for each in (prediction, prediction.float()))
    assert one == other


def test_counts_that_a_small_integer_cannot_hold_are_summed_on_the_host(
        monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [labels(number, 7) for number in range(5)]
    expected = evaluated('ConfusionMatrixMetric', pairs, size=4)
    drains = []
    original = confusion_matrix_metric._PixelTally._drain

    def drain(tally: Any) -> None:
        drains.append(tally)
        original(tally)

    monkeypatch.setattr(confusion_matrix_metric._PixelTally, '_drain', drain)
    monkeypatch.setattr(confusion_matrix_metric, '_MAX_ON_DEVICE', 2 * 2000)
    assert evaluated('ConfusionMatrixMetric', pairs, size=4) == expected
    assert len(drains) == 3  # after two images, after four, at the end


def test_a_second_evaluation_starts_from_nothing() -> None:
    metric = ConfusionMatrixMetric()
    metric.dataset_meta = dict(classes=NAMES)
    found = []
    for number in (0, 0):
        metric.process(None, [sample(*labels(number, 7)).to_dict()])
        found.append((metric.evaluate(1), metric.matrix))
    assert found[0][0] == found[1][0] and found[0][1].sum() == found[1][1].sum()
    wrong = torch.full((40, 50), 9)
    metric.process(None, [sample(wrong, wrong).to_dict()])
    with pytest.raises(ValueError, match='outside the classes'):
        metric.evaluate(1)
    metric.process(None, [sample(*labels(0, 7)).to_dict()])
    assert metric.evaluate(1) == found[0][0]


def test_mistakes_are_named() -> None:
    good = labels(0, 7)
    wrong = good[1].clone()
    wrong[3, 4:6] = 7
    with pytest.raises(ValueError, match=r'/data/tile_1.tif: 4 truth .* check reduce_zero_label'):
        evaluated('ConfusionMatrixMetric', [good, (good[0], wrong), (good[0], wrong), good])
    with pytest.raises(ValueError, match=r'tile_1.tif: 0 truth pixel\(s\) and .* num_classes of'):
        evaluated('ConfusionMatrixMetric', [good, (good[0] + 3, good[1])])
    with pytest.raises(ValueError, match=r'tile_1.tif.* 20 x 50 pixels and the truth 40 x 50'):
        evaluated('ConfusionMatrixMetric', [good, (good[0][:20], good[1])])
    with pytest.raises(ValueError, match='no image was evaluated, expected 3'):
        evaluated('ConfusionMatrixMetric', [], size=3)
    with pytest.raises(ValueError, match=r'\[5\] images of a dataset of 3'):
        evaluated('ConfusionMatrixMetric', [good] * 5, size=3)
    with pytest.raises(ValueError, match='METAINFO'):
        evaluated('ConfusionMatrixMetric', [good], classes=())
    with pytest.raises(ValueError, match="iou_metrics has 'IoU', expected some of mIoU"):
        ConfusionMatrixMetric(iou_metrics=['mIoU', 'IoU'])
    with pytest.raises(ValueError, match='set output_dir'):
        ConfusionMatrixMetric(format_only=True)
    with pytest.raises(ValueError, match='evaluate first'):
        ConfusionMatrixMetric().plot('nowhere.png')


@pytest.mark.parametrize('meta', [{}, dict(reduce_zero_label=True)])
def test_masks_are_those_of_iou_metric(meta: Dict[str, Any], tmp_path: Path) -> None:
    pairs = [labels(number, 7) for number in range(2)]
    for kind in ('IoUMetric', 'ConfusionMatrixMetric'):
        found = evaluated(kind, pairs, meta=meta, format_only=True, output_dir=str(tmp_path / kind))
        assert found == {}
    for number in range(2):
        one, other = (cv2.imread(str(tmp_path / kind / f'tile_{number}.png'), cv2.IMREAD_UNCHANGED)
                      for kind in ('IoUMetric', 'ConfusionMatrixMetric'))
        assert one.shape == (40, 50) and one.dtype == np.uint8
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, pairs[number][0] + len(meta))


# Which image is a repeat.


@pytest.mark.parametrize('world', [1, 2, 3, 5])
def test_each_image_of_a_rounded_sampler_counts_once(world: int) -> None:
    for size in range(1, 12):
        each = -(-size // world)
        padded = [index % size for index in range(each * world)]
        kept = [padded[rank::world][number] for rank in range(world) for number in range(each)
                if not is_repeat([each] * world, rank, number, size)]
        assert sorted(kept) == list(range(size))


def test_uneven_ranks_lose_nothing_they_did_not_repeat() -> None:
    # contiguous parts, as of torch's split: nothing was repeated, so nothing is dropped
    for images in ([5, 2], [0, 4], [3, 3, 1], [1, 0, 6]):
        assert not any(is_repeat(images, rank, number, sum(images))
                       for rank, count in enumerate(images) for number in range(count))
    # the order of mmengine's collect_results: 0a 1a 0b 1b 0c 0d
    assert [is_repeat([4, 2], 0, number, 4) for number in range(4)] == [False, False, True, True]


# Boundary IoU.


def cheng_boundary(mask: np.ndarray, distance: int) -> np.ndarray:
    """The paper's mask_to_boundary on one uint8 mask."""
    height, width = mask.shape
    padded = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    eroded = cv2.erode(padded, np.ones((3, 3), np.uint8), iterations=distance)
    return mask - eroded[1:height + 1, 1:width + 1]


def blobs(seed: int, shape: Tuple[int, int], num_classes: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, num_classes, (4, 5)).astype(np.uint8)
    coarse = cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_NEAREST)
    turned = np.roll(coarse, rng.integers(0, 9, 2), (0, 1))
    return torch.from_numpy(turned.astype(np.int64))


@pytest.mark.parametrize('shape, ratio', [((90, 140), .02), ((61, 40), .05), ((20, 16), .3),
                                          ((7, 9), 1.), ((1, 30), .02)])
def test_boundary_counts_are_those_of_the_paper(shape: Tuple[int, int], ratio: float) -> None:
    prediction, truth = blobs(1, shape, 4), blobs(2, shape, 4)
    truth[:, 10:13] = 255
    distance = boundary_distance(*shape, ratio)
    ignored = truth.numpy() == 255
    expected = np.zeros((3, 4), np.int64)
    for label in range(4):
        masks = [((each.numpy() == label) & ~ignored).astype(np.uint8)
                 for each in (prediction, truth)]
        edges = [cheng_boundary(mask, distance).astype(bool) for mask in masks]
        expected[:, label] = [(edges[0] & edges[1]).sum(), edges[0].sum(), edges[1].sum()]
    found = boundary_counts(prediction, truth, 4, 255, ratio)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found, expected)


def test_boundary_iou_of_right_far_and_absent_classes() -> None:
    assert boundary_distance(1024, 1024) == 29 and boundary_distance(3, 3) == 1
    truth = torch.zeros(50, 60).long()
    truth[:, 30:] = 1
    truth[:5] = 255
    perfect = truth.masked_fill(truth == 255, 1)
    np.testing.assert_array_equal(boundary_iou(boundary_counts(perfect, truth, 3)), [1, 1, np.nan])
    assert not boundary_of(truth, 2)[20, 20] and boundary_of(truth, 2)[20, 28]
    moved = torch.roll(perfect, 4, 1)
    values = boundary_iou(boundary_counts(moved, truth, 3))
    assert 0 < values[0] < scores(confusion_matrix(moved, truth, 3))['IoU'][0]
    with pytest.raises(ValueError, match=r'expected one \(H, W\)'):
        boundary_counts(truth[None], truth[None], 3)


# The picture.


def test_picture_shows_rows_in_percent(tmp_path: Path) -> None:
    matrix = np.array([[990000, 10000, 0], [500, 500, 0], [0, 0, 0]])
    found = render_confusion(matrix, ('field', 'a$b$', 'water'), subtitle='mIoU 12.34')
    scaled = render_confusion(matrix * np.array([[1], [7], [1]]), ('field', 'a$b$', 'water'))
    assert found.dtype == np.uint8 and found.shape[2] == 3
    blue = [found.reshape(-1, 3) == color for color in ((8, 48, 107), (247, 251, 255))]
    strong, none = (int(each.all(1).sum()) for each in blue)
    assert none > 1500  # the cell of 0 %; that of 99 % is one step from the darkest
    assert strong == 0 and (found.sum(2) < 200).sum() > 1500
    rows = slice(140, None)
    assert np.abs(found[rows, :400].astype(int) - scaled[rows, :400]).mean() < 1
    metric = ConfusionMatrixMetric(picture=str(tmp_path / 'new' / 'matrix.png'))
    metric.dataset_meta = dict(classes=NAMES)
    metric.process(None, [sample(*labels(0, 7)).to_dict()])
    metric.evaluate(1)
    assert cv2.imread(str(tmp_path / 'new' / 'matrix.png')).shape[1] > 500
    with pytest.raises(ValueError, match='has 2 class names'):
        render_confusion(matrix, ('a', 'b'))


def test_picture_of_many_classes(tmp_path: Path) -> None:
    matrix = np.diag(np.arange(120)) + 1
    found = render_confusion(matrix, [f'class {number}' for number in range(120)])
    save_png(str(tmp_path / 'many.png'), found)
    assert 120 * 11 < found.shape[0] < 120 * 11 + 300  # a row is high enough for its name


def test_short_counts() -> None:
    assert [short_count(n) for n in (0, 999, 1000, 12345, 999949, 999950, 10**6, 999999999,
                                     123456789012)] == \
        ['0', '999', '1.0k', '12.3k', '999.9k', '1.0M', '1.0M', '1.0G', '123.5G']


# A lazy device.


def count_on_xla(folder: Path) -> Any:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from mapsage.accelerator import resolve_accelerator, set_current_accelerator
    accelerator = set_current_accelerator(resolve_accelerator('xla'))
    device = accelerator.device()
    metric = ConfusionMatrixMetric(iou_metrics=['mIoU', 'mBoundaryIoU', 'kappa'])
    metric.dataset_meta = dict(classes=NAMES)
    compiled = []
    for number in range(6):
        pair = [each.to(device) for each in labels(number, 7)]
        metric.process(None, [sample(*pair).to_dict()])
        torch_xla.sync()
        done = metrics.metric_data('CompileTime')
        compiled.append(done[0] if done else 0)
    fallbacks = [name for name in metrics.counter_names() if name.startswith('aten::')
                 and name != 'aten::_local_scalar_dense']
    return compiled, fallbacks, metric.evaluate(6)


def test_a_lazy_device_compiles_once_and_computes_everything(tmp_path: Path) -> None:
    pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')
    compiled, fallbacks, found = run_ranks(count_on_xla, 1, tmp_path, tmp_path)[0]
    # The first image begins the sums, the second adds to them; then nothing is new.
    assert compiled[0] > 0 and compiled[-1] == compiled[1], compiled
    assert fallbacks == []
    assert found == evaluated('ConfusionMatrixMetric', [labels(number, 7) for number in range(6)],
                              iou_metrics=['mIoU', 'mBoundaryIoU', 'kappa'])
