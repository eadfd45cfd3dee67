"""ConfusionMatrixMetric, compared with MMSeg's IoUMetric."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, List

import cv2
import numpy as np
import pytest
import torch
from label_pairs import NAMES, data_sample, evaluate, label_maps
from mmengine.logging import MMLogger
from ranks import run_ranks

from mapsage.evaluation import (
    ConfusionMatrixMetric,
    boundary_counts,
    boundary_iou,
    confusion_matrix,
    confusion_matrix_metric,
    scores,
)
from mapsage.evaluation.confusion_matrix_metric import is_repeat

ALL = ('mIoU', 'mDice', 'mFscore')


class Table(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def with_table(kind: str, *args: Any, count: int = 2, **options: Any) -> Any:
    table, logger = Table(), MMLogger.get_current_instance()
    logger.addHandler(table)
    try:
        return evaluate(kind, *args, **options), table.lines[-count:]
    finally:
        logger.removeHandler(table)


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(iou_metrics=ALL),
        dict(iou_metrics=['mFscore'], beta=2),
        dict(iou_metrics=['mDice']),
        dict(iou_metrics=ALL, nan_to_num=0),
        dict(prefix='val'),
        dict(ignore_index=2),
    ],
)
def test_scores_and_table_equal_iou_metrics(options: Dict[str, Any]) -> None:
    # Class 5 neither occurs nor is predicted, class 4 is never predicted; sizes differ.
    pairs = [
        (prediction.clamp(max=3), truth)
        for prediction, truth in (
            label_maps(number, 5, (30, 20 + number), options.get('ignore_index', 255))
            for number in range(4)
        )
    ]
    pairs.append((pairs[0][0], torch.full_like(pairs[0][1], options.get('ignore_index', 255))))
    expected, table = with_table('IoUMetric', pairs, **options)
    result, lines = with_table('ConfusionMatrixMetric', pairs, **options)
    assert lines == table and 'field' in table[-1]
    assert list(result) == list(expected)
    assert result == {key: round(float(value), 2) for key, value in expected.items()}
    assert all(isinstance(value, float) for value in result.values())


def test_kappa_and_boundary_iou_on_request() -> None:
    pairs = [label_maps(number, 7) for number in range(2)]
    result, lines = with_table(
        'ConfusionMatrixMetric', pairs, iou_metrics=['mBoundaryIoU', 'kappa']
    )
    matrix = sum(confusion_matrix(*pair, 7) for pair in pairs)
    values = boundary_iou(sum(boundary_counts(*pair, 7) for pair in pairs))
    assert result == dict(
        aAcc=round(100 * scores(matrix)['aAcc'], 2),
        mBoundaryIoU=round(100 * float(values.mean()), 2),
        kappa=round(100 * scores(matrix)['kappa'], 2),
    )
    assert f'{100 * values[0]:.2f}' in lines[-1] and 'BoundaryIoU' in lines[-1]


def test_a_class_without_a_hit_counts_in_fbeta_only() -> None:
    # One of two classes has only false alarms as errors, and the other has no correct pixel.
    truth = torch.cat([torch.zeros(90), torch.ones(10)]).long().reshape(10, 10)
    prediction = torch.zeros_like(truth)
    options: Dict[str, Any] = dict(classes=('ground', 'house', 'lake'))
    host, _ = with_table('IoUMetric', [(prediction, truth)], iou_metrics=['mFscore'], **options)
    result, lines = with_table(
        'ConfusionMatrixMetric', [(prediction, truth)], iou_metrics=['mFscore', 'mFbeta'], **options
    )
    assert {key: result[key] for key in host} == {k: round(float(v), 2) for k, v in host.items()}
    assert (result['mFscore'], result['mFbeta']) == (94.74, 47.37)
    assert ' Fbeta ' in lines[-1]
    _, lines = with_table(
        'ConfusionMatrixMetric', [(prediction, truth)], iou_metrics=['mFscore'], count=3, **options
    )
    assert (
        'mFscore 94.74 leaves out house' in lines[0]
        and 'mFbeta' in lines[0]
        and '47.37' in lines[0]
    )
    metrics = pytest.importorskip('sklearn.metrics', reason='scikit-learn is not installed')
    expected = metrics.f1_score(truth.reshape(-1), prediction.reshape(-1), average='macro')
    assert result['mFbeta'] == round(100 * expected, 2)


def test_scores_of_ignored_pixels_only_are_nan() -> None:
    blank = torch.full((8, 8), 255)
    result = evaluate('ConfusionMatrixMetric', [(torch.zeros(8, 8).long(), blank)])
    assert set(result) == {'aAcc', 'mIoU', 'mAcc'} and np.isnan(list(result.values())).all()


def test_float_labels_of_a_binary_head() -> None:
    prediction, truth = label_maps(0, 2)
    from_integers, from_floats = (
        evaluate('ConfusionMatrixMetric', [(labels, truth)], classes=('no', 'yes'))
        for labels in (prediction, prediction.float())
    )
    assert from_integers == from_floats


def test_counts_that_a_small_integer_cannot_hold_are_summed_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [label_maps(number, 7) for number in range(5)]
    expected = evaluate('ConfusionMatrixMetric', pairs, size=4)
    drains = []
    original = confusion_matrix_metric._PixelTally._drain

    def drain(tally: Any) -> None:
        drains.append(tally)
        original(tally)

    monkeypatch.setattr(confusion_matrix_metric._PixelTally, '_drain', drain)
    monkeypatch.setattr(confusion_matrix_metric, '_MAX_ON_DEVICE', 2 * 2000)
    assert evaluate('ConfusionMatrixMetric', pairs, size=4) == expected
    # After two images, after four, and at the end.
    assert len(drains) == 3


def test_a_second_evaluation_starts_from_zero() -> None:
    metric = ConfusionMatrixMetric()
    metric.dataset_meta = dict(classes=NAMES)
    results = []
    for number in (0, 0):
        metric.process(None, [data_sample(*label_maps(number, 7)).to_dict()])
        results.append((metric.evaluate(1), metric.matrix))
    assert results[0][0] == results[1][0] and results[0][1].sum() == results[1][1].sum()
    wrong = torch.full((40, 50), 9)
    metric.process(None, [data_sample(wrong, wrong).to_dict()])
    with pytest.raises(ValueError, match='outside the classes'):
        metric.evaluate(1)
    metric.process(None, [data_sample(*label_maps(0, 7)).to_dict()])
    assert metric.evaluate(1) == results[0][0]


def test_mistakes_are_named() -> None:
    good = label_maps(0, 7)
    wrong = good[1].clone()
    wrong[3, 4:6] = 7
    with pytest.raises(ValueError, match=r'/data/tile_1.tif: 4 truth .* check reduce_zero_label'):
        evaluate('ConfusionMatrixMetric', [good, (good[0], wrong), (good[0], wrong), good])
    with pytest.raises(ValueError, match=r'tile_1.tif: 0 truth pixel\(s\) and .* num_classes of'):
        evaluate('ConfusionMatrixMetric', [good, (good[0] + 3, good[1])])
    with pytest.raises(ValueError, match=r'tile_1.tif.* 20 x 50 pixels and the truth 40 x 50'):
        evaluate('ConfusionMatrixMetric', [good, (good[0][:20], good[1])])
    with pytest.raises(ValueError, match='no image was evaluated, expected 3'):
        evaluate('ConfusionMatrixMetric', [], size=3)
    with pytest.raises(ValueError, match=r'\[5\] images of a dataset of 3'):
        evaluate('ConfusionMatrixMetric', [good] * 5, size=3)
    with pytest.raises(ValueError, match='METAINFO'):
        evaluate('ConfusionMatrixMetric', [good], classes=())
    with pytest.raises(ValueError, match="iou_metrics has 'IoU', expected some of mIoU"):
        ConfusionMatrixMetric(iou_metrics=['mIoU', 'IoU'])
    with pytest.raises(ValueError, match='set output_dir'):
        ConfusionMatrixMetric(format_only=True)
    with pytest.raises(ValueError, match='evaluate first'):
        ConfusionMatrixMetric().plot('nowhere.png')


@pytest.mark.parametrize('meta', [{}, dict(reduce_zero_label=True)])
def test_masks_equal_iou_metrics(meta: Dict[str, Any], tmp_path: Path) -> None:
    pairs = [label_maps(number, 7) for number in range(2)]
    for kind in ('IoUMetric', 'ConfusionMatrixMetric'):
        scores_of_kind = evaluate(
            kind, pairs, meta=meta, format_only=True, output_dir=str(tmp_path / kind)
        )
        assert scores_of_kind == {}
    for number in range(2):
        expected, mask = (
            cv2.imread(str(tmp_path / kind / f'tile_{number}.png'), cv2.IMREAD_UNCHANGED)
            for kind in ('IoUMetric', 'ConfusionMatrixMetric')
        )
        assert mask.shape == (40, 50) and mask.dtype == np.uint8
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(mask, pairs[number][0] + len(meta))


@pytest.mark.parametrize('world', [1, 2, 3, 5])
def test_each_image_of_a_rounded_sampler_counts_once(world: int) -> None:
    for size in range(1, 12):
        per_rank = -(-size // world)
        padded = [index % size for index in range(per_rank * world)]
        counted = [
            padded[rank::world][number]
            for rank in range(world)
            for number in range(per_rank)
            if not is_repeat([per_rank] * world, rank, number, size)
        ]
        assert sorted(counted) == list(range(size))


def test_uneven_ranks_without_repeats_lose_no_image() -> None:
    # Contiguous splits, as torch's split makes them: nothing was repeated, so nothing is dropped.
    for images in ([5, 2], [0, 4], [3, 3, 1], [1, 0, 6]):
        assert not any(
            is_repeat(images, rank, number, sum(images))
            for rank, count in enumerate(images)
            for number in range(count)
        )
    # The order of mmengine's collect_results is 0a 1a 0b 1b 0c 0d.
    assert [is_repeat([4, 2], 0, number, 4) for number in range(4)] == [False, False, True, True]


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
        pair = [labels.to(device) for labels in label_maps(number, 7)]
        metric.process(None, [data_sample(*pair).to_dict()])
        torch_xla.sync()
        compile_times = metrics.metric_data('CompileTime')
        compiled.append(compile_times[0] if compile_times else 0)
    fallbacks = [
        name
        for name in metrics.counter_names()
        if name.startswith('aten::') and name != 'aten::_local_scalar_dense'
    ]
    return compiled, fallbacks, metric.evaluate(6)


def test_a_lazy_device_compiles_once_and_has_no_fallback(tmp_path: Path) -> None:
    pytest.importorskip('torch_xla', reason='torch_xla is not installed: the xla leg runs this')
    compiled, fallbacks, result = run_ranks(count_on_xla, 1, tmp_path, tmp_path)[0]
    # The first image starts the sums, the second adds to them; further images reuse the graph.
    assert compiled[0] > 0 and compiled[-1] == compiled[1], compiled
    assert fallbacks == []
    pairs = [label_maps(number, 7) for number in range(6)]
    assert result == evaluate(
        'ConfusionMatrixMetric', pairs, iou_metrics=['mIoU', 'mBoundaryIoU', 'kappa']
    )
