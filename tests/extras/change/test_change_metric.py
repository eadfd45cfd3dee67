"""ChangeMetric, compared with computations from label maps of both dates, and on three ranks."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from mmengine.logging import MMLogger

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.extras.change.metric import ChangeMetric
from mapsage.geo.change_classes import ChangeClassError, from_to_classes, transition_of

LAND = ('field', 'house', 'water', 'wood')
NAMES = from_to_classes(LAND)


def maps(number: int, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return prediction and truth of an image with many unchanged and some ignored pixels."""
    rng = np.random.default_rng(number)
    shape = 20, 30 + number
    truth = np.where(rng.random(shape) < 0.6, 0, rng.integers(0, count, shape))
    prediction = np.where(rng.random(truth.shape) < 0.7, truth, rng.integers(0, count, truth.shape))
    truth[:2] = 255
    return prediction, truth


def evaluate(names: Tuple[str, ...], numbers: List[int], size: int) -> Dict[str, float]:
    metric = ChangeMetric()
    metric.dataset_meta = dict(classes=names)
    for number in numbers:
        prediction, truth = (torch.from_numpy(labels)[None] for labels in maps(number, len(names)))
        metric.process(
            None,
            [
                dict(
                    pred_sem_seg=dict(data=prediction),
                    gt_sem_seg=dict(data=truth),
                    img_path=f'{number}.png',
                )
            ],
        )
    return metric.evaluate(size)


def counted_pixels(count: int) -> Tuple[np.ndarray, np.ndarray]:
    pairs = [maps(number, count) for number in range(5)]
    prediction, truth = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    return prediction[truth != 255], truth[truth != 255]


def test_scores_of_change_equal_their_definitions() -> None:
    prediction, truth = counted_pixels(2)
    both = int(((prediction == 1) & (truth == 1)).sum())
    precision, recall = both / (prediction == 1).sum(), both / (truth == 1).sum()
    expected = dict(
        Precision=precision,
        Recall=recall,
        F1=2 * precision * recall / (precision + recall),
        IoU=both / ((prediction == 1) | (truth == 1)).sum(),
        aAcc=(prediction == truth).mean(),
    )
    result = evaluate(('unchanged', 'changed'), list(range(5)), 5)
    assert {key: result[key] for key in expected} == {
        key: round(100 * float(value), 2) for key, value in expected.items()
    }
    assert 'SeK' not in result


def open_cd_scores(prediction: np.ndarray, truth: np.ndarray) -> Dict[str, float]:
    """Compute Open-CD's scores from class maps of both dates, where 0 is unchanged."""
    land = {name: 1 + LAND.index(name) for name in LAND}
    tables = [
        np.array(
            [
                0 if transition_of(name) is None else land[transition_of(name)[date]]
                for name in NAMES
            ]
        )
        for date in (0, 1)
    ]
    predicted = np.concatenate([table[prediction] for table in tables])
    actual = np.concatenate([table[truth] for table in tables])
    # Areas by class as in SCDMetric.get_sek: intersections, predictions and labels.
    count = len(LAND) + 1
    intersect = np.array([((predicted == c) & (actual == c)).sum() for c in range(count)], float)
    area_predicted = np.array([(predicted == c).sum() for c in range(count)], float)
    area_actual = np.array([(actual == c).sum() for c in range(count)], float)
    unchanged = intersect[0]
    for area in (intersect, area_predicted, area_actual):
        area[0] -= unchanged
    iou = (area_actual[1:].sum() - area_predicted[0]) / area_actual.sum()
    po = intersect.sum() / area_actual.sum()
    pe = (area_actual * area_predicted).sum() / area_predicted.sum() ** 2
    sek = (po - pe) / (1 - pe) * math.exp(iou) / math.e
    ious = [
        ((prediction > 0) == side)[(truth > 0) == side].sum()
        / (((prediction > 0) == side) | ((truth > 0) == side)).sum()
        for side in (True, False)
    ]
    return dict(SeK=sek, SCD_Score=0.3 * np.mean(ious) + 0.7 * sek, mIoU=np.mean(ious), IoU=iou)


def test_sek_and_score_equal_open_cds_from_class_maps() -> None:
    result = evaluate(NAMES, list(range(5)), 5)
    expected = open_cd_scores(*counted_pixels(len(NAMES)))
    assert {key: result[key] for key in expected} == pytest.approx(
        {key: 100 * float(value) for key, value in expected.items()}, abs=0.00501
    )
    assert 0 < result['SeK'] < result['IoU']


def test_the_mean_iou_of_from_to_classes_leaves_unchanged_out() -> None:
    prediction, truth = counted_pixels(len(NAMES))
    ious = [
        ((prediction == label) & (truth == label)).sum()
        / ((prediction == label) | (truth == label)).sum()
        for label in range(1, len(NAMES))
    ]
    result = evaluate(NAMES, list(range(5)), 5)
    assert result['from_to_mIoU'] == round(100 * float(np.mean(ious)), 2)


@pytest.fixture
def lines() -> Iterator[List[str]]:
    """Lines of the log, whatever its handlers are."""
    messages: List[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.extend(record.getMessage().splitlines())

    logger, collector = MMLogger.get_current_instance(), Collector()
    logger.addHandler(collector)
    yield messages
    logger.removeHandler(collector)


def test_the_log_names_the_class_that_each_is_confused_with(lines: List[str]) -> None:
    metric = ChangeMetric()
    metric.dataset_meta = dict(classes=('unchanged', 'wood > field', 'field > house'))
    truth = torch.tensor([[[0] * 10 + [1] * 10 + [2] * 4]])
    prediction = torch.tensor([[[0] * 10 + [1] * 6 + [2] * 3 + [0] + [2] * 4]])
    metric.process(
        None,
        [dict(pred_sem_seg=dict(data=prediction), gt_sem_seg=dict(data=truth), img_path='a.png')],
    )
    metric.evaluate(1)
    rows = {
        cells[1].strip(): cells[5:7]
        for cells in (line.split('|') for line in lines)
        if len(cells) > 6
    }
    assert [cell.strip() for cell in rows['wood > field']] == ['10', 'field > house (30.0 %)']
    # Nothing else is predicted there.
    assert [cell.strip() for cell in rows['field > house']] == ['4', '']


def on_rank() -> Dict[str, float]:
    init_process_group(set_current_accelerator(resolve_accelerator('cpu')), timeout=40)
    return evaluate(NAMES, list(range(dist.get_rank(), 5, 3)), 5)


def test_three_ranks_give_the_scores_of_one(tmp_path: Path) -> None:
    results = fork_scenarios({'three': (on_rank, 3)}, tmp_path)['three']
    assert all(result == evaluate(NAMES, list(range(5)), 5) for result in results)


def test_truth_without_change_is_reported(lines: List[str]) -> None:
    metric = ChangeMetric()
    metric.dataset_meta = dict(classes=('unchanged', 'changed'))
    nothing: Any = dict(data=torch.zeros(1, 4, 4, dtype=torch.int64))
    metric.process(None, [dict(pred_sem_seg=nothing, gt_sem_seg=nothing, img_path='a.png')])
    result = metric.evaluate(1)
    assert math.isnan(result['F1']) and result['aAcc'] == 100
    assert [line for line in lines if 'no pixel of the evaluated truth is changed' in line]


def test_classes_without_unchanged_are_refused() -> None:
    with pytest.raises(ChangeClassError, match="called 'unchanged'"):
        evaluate(('background', 'new building'), [0], 1)
