"""Calibration of probabilities, compared with the paper's formula and with other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import cv2
import numpy as np
import pytest
import torch
from label_pairs import NAMES
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from support import main_leg

from mapsage.extras.calibration import calibration_metric
from mapsage.extras.calibration.calibration_metric import (
    CalibrationError,
    calibration_error,
    count_confidence,
)
from mapsage.extras.calibration.reliability_plot import render_reliability
from mapsage.extras.calibration.test_options import add_options, is_asked, run

CLASSES = 4


def prediction(
    seed: int, channels: int = CLASSES, ignored: bool = True
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return logits (C, 30, 40), correct more often where they are confident, and the truth."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, max(channels, 2), (30, 40), generator=random)
    logits = torch.randn(channels, 30, 40, generator=random) * 2
    if channels > 1:
        logits += torch.nn.functional.one_hot(truth, channels).permute(2, 0, 1)
    else:
        logits += truth * 2 - 1
    if ignored:
        truth[torch.rand(30, 40, generator=random) < 0.2] = 255
    return logits, truth


def sample(
    logits: torch.Tensor, truth: torch.Tensor, name: str = '/data/tile.tif', threshold: float = 0.3
) -> SegDataSample:
    """Return logits as a data sample, like MMSegmentation's EncoderDecoder."""
    data = SegDataSample(metainfo=dict(img_path=name))
    scores = logits.sigmoid() if len(logits) == 1 else logits
    labels = (scores > threshold).to(scores) if len(logits) == 1 else logits.argmax(0, keepdim=True)
    data.set_data(
        dict(
            seg_logits=PixelData(data=scores),
            pred_sem_seg=PixelData(data=labels),
            gt_sem_seg=PixelData(data=truth[None]),
        )
    )
    return data


def evaluate(
    samples: List[SegDataSample], size: Optional[int] = None, classes: int = CLASSES, **options: Any
) -> Tuple[Dict[str, float], CalibrationError]:
    metric = CalibrationError(**options)
    evaluator = Evaluator([metric])
    evaluator.dataset_meta = dict(classes=NAMES[:classes])
    for data in samples:
        evaluator.process([data])
    return evaluator.evaluate(len(samples) if size is None else size), metric


def expected(
    pairs: List[Tuple[torch.Tensor, torch.Tensor]], bins: int = 15, threshold: float = 0.3
) -> Tuple[float, float]:
    """Return ECE and overconfidence in percent by equation 3 of Guo et al., bin by bin."""
    confidences, hits = [], []
    for logits, truth in pairs:
        scores = logits.double().sigmoid() if len(logits) == 1 else logits.double().softmax(0)
        if len(logits) == 1:
            labels = (scores[0] > threshold).long()
            confidence = torch.where(labels == 1, scores[0], 1 - scores[0])
        else:
            confidence, labels = scores.max(0)
        labeled = truth != 255
        confidences.append(confidence[labeled].numpy())
        hits.append((labels == truth)[labeled].numpy())
    confidence, hit = np.concatenate(confidences), np.concatenate(hits)
    error = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            error += (
                inside.sum() / len(confidence) * abs(hit[inside].mean() - confidence[inside].mean())
            )
    return 100 * error, 100 * (confidence.mean() - hit.mean())


@pytest.mark.parametrize('channels, bins', [(4, 15), (2, 15), (1, 15), (4, 3), (4, 100)])
def test_the_error_equals_the_formula(channels: int, bins: int) -> None:
    pairs = [prediction(seed, channels) for seed in range(3)]
    samples = [sample(*pair) for pair in pairs]
    result, metric = evaluate(samples, classes=max(channels, 2), bins=bins)
    error, over = expected(pairs, bins)
    assert result == dict(
        ECE=pytest.approx(error, abs=0.0051), overconfidence=pytest.approx(over, abs=0.0051)
    )
    assert 100 * calibration_error(metric.counts.sum(1)) == pytest.approx(error, abs=2e-5)
    assert metric.counts[0].sum() == sum(int((truth != 255).sum()) for _, truth in pairs)


def test_a_calibrated_model_has_no_error_and_an_overconfident_model_has() -> None:
    random = torch.Generator().manual_seed(3)
    share = torch.rand(200, 500, generator=random) * 0.5 + 0.5
    truth = (torch.rand(200, 500, generator=random) > share).long()
    logits = torch.stack([torch.log(share / (1 - share)), torch.zeros_like(share)])
    assert evaluate([sample(logits, truth)], classes=2)[0]['ECE'] < 0.5
    sure, _ = evaluate([sample(logits * 4, truth)], classes=2)
    unsure, _ = evaluate([sample(logits / 4, truth)], classes=2)
    assert sure['ECE'] > 10 and sure['overconfidence'] > 10
    assert unsure['ECE'] > 10 and unsure['overconfidence'] < -10


@main_leg
def test_bins_equal_scikit_learns() -> None:
    curve = pytest.importorskip('sklearn.calibration').calibration_curve
    logits, truth = prediction(1, ignored=False)
    sure, labels = logits.softmax(0).max(0)
    shares, means = curve((labels == truth).flatten().numpy(), sure.flatten().numpy(), n_bins=15)
    counts = count_confidence(sure, labels, truth, CLASSES).sum(1).numpy()
    used = counts[0] > 0
    np.testing.assert_allclose(counts[1][used] / counts[0][used], shares, atol=1e-12)
    np.testing.assert_allclose(counts[2][used] * 2.0**-24 / counts[0][used], means, atol=1e-7)


def test_edges_belong_to_the_bin_below() -> None:
    values = torch.tensor([[0.0, 0.25, 0.2500001, 0.5, 1.0]])
    zeros = torch.zeros(1, 5, dtype=torch.long)
    assert count_confidence(values, zeros, zeros, 1, bins=4)[0].tolist() == [[2, 2, 0, 1]]


def test_the_log_names_the_classes_that_are_too_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, truth = prediction(0)
    messages: List[str] = []
    monkeypatch.setattr(calibration_metric, 'print_log', lambda text, **_: messages.append(text))
    _, metric = evaluate([sample(logits, truth)])
    by_class = 100 * calibration_error(metric.counts)
    line = next(line for line in messages[0].splitlines() if NAMES[2] in line)
    cells = [float(cell) for cell in line.split('|')[2:-1]]
    labels, labeled = logits.argmax(0), truth != 255
    predicted = (labels == 2) & labeled
    assert cells == pytest.approx(
        [
            100 * float(predicted.sum() / labeled.sum()),
            100 * float(logits.softmax(0)[2][predicted].mean()),
            100 * float((truth == 2)[predicted].float().mean()),
            by_class[2],
        ],
        abs=0.0051,
    )


def test_probabilities_need_no_softmax() -> None:
    logits, truth = prediction(2)
    data = sample(logits, truth)
    data.seg_logits.data = logits.softmax(0)
    result, _ = evaluate([data], scores='probabilities')
    assert result == evaluate([sample(logits, truth)])[0]
    with pytest.raises(
        ValueError, match="tile.tif: seg_logits are probabilities.*set scores='probabilities'"
    ):
        evaluate([data])
    with pytest.raises(ValueError, match="seg_logits hold .*set scores='logits'"):
        evaluate([sample(logits, truth)], scores='probabilities')


def test_mistakes_are_named(tmp_path: Path) -> None:
    logits, truth = prediction(0)
    bare = sample(logits, truth)
    del bare.seg_logits
    with pytest.raises(
        ValueError,
        match='tile.tif: the prediction has .*pred_sem_seg and no '
        'seg_logits.*take CalibrationError out',
    ):
        evaluate([bare])
    with pytest.raises(ValueError, match=r'tile.tif: the confidence has shape \(30, 40\)'):
        evaluate([sample(logits, truth[:20])])
    with pytest.raises(ValueError, match='tile.tif: a pixel has the probability nan'):
        evaluate([sample(logits / 0, truth)], size=1)
    with pytest.raises(ValueError, match=r'tile.tif: \d+ truth pixel.s. and 0 predicted'):
        evaluate([sample(logits, truth + 1)])
    one, binary = prediction(0, 1)
    wrong = sample(one, binary)
    wrong.seg_logits.data = one
    with pytest.raises(ValueError, match='seg_logits of one channel hold -.*expected the prob'):
        evaluate([wrong], classes=2)
    with pytest.raises(ValueError, match='no image was evaluated, expected 3'):
        evaluate([], size=3)
    with pytest.raises(ValueError, match=r'\[5\] images of a dataset of 3'):
        evaluate([sample(logits, truth)] * 5, size=3)
    with pytest.raises(ValueError, match="scores='odds', bins=15: expected one of logits, prob"):
        CalibrationError(scores='odds')
    empty, _ = evaluate(
        [sample(logits, torch.full_like(truth, 255))], picture=str(tmp_path / 'none.png')
    )
    assert all(np.isnan(value) for value in empty.values()) and not list(tmp_path.iterdir())


def test_the_picture_shows_how_far_it_is_from_the_diagonal(tmp_path: Path) -> None:
    pairs = [prediction(seed) for seed in range(3)]
    path = tmp_path / 'new' / 'reliability.png'
    evaluate([sample(*pair) for pair in pairs], picture=str(path))
    assert cv2.imread(str(path)).std() > 20
    middles = (np.arange(15) + 0.5) / 15
    good = render_reliability(np.full(15, 100), middles, middles)
    bad = render_reliability(np.full(15, 100), middles, middles / 2)

    def reddish(picture: np.ndarray) -> int:
        red, green, blue = picture.astype(int).transpose(2, 0, 1)
        return int(((red > green + 40) & (red > blue + 20)).sum())

    assert reddish(bad) > 20 * max(1, reddish(good))
    assert render_reliability([0, 5], [np.nan, 0.7], [np.nan, 0.6]).shape == good.shape
    with pytest.raises(ValueError, match='2 counts, 1 probabilities, 2 shares'):
        render_reliability([1, 2], [0.5], [0.5, 0.5])


@pytest.mark.parametrize(
    'given, kinds',
    [
        (dict(type='IoUMetric'), ['IoUMetric', 'CalibrationError']),
        (None, ['CalibrationError']),
        ([dict(type='A'), dict(type='CalibrationError', bins=10)], ['A', 'CalibrationError']),
    ],
)
def test_calibration_is_measured_once_and_drawn_in_the_work_dir(given: Any, kinds: Any) -> None:
    cfg = Config(dict(test_evaluator=given, work_dir='w'))
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert not is_asked(parser.parse_args([])) and is_asked(parser.parse_args(['--calibration']))
    for _ in range(2):
        run(parser.parse_args(['--calibration']), cfg)
    assert [each.type for each in cfg.test_evaluator] == kinds
    assert cfg.test_evaluator[-1].picture == 'w/reliability.png'
    assert cfg.test_evaluator[-1].get('bins') == (10 if len(kinds) == 2 and 'A' in kinds else None)
