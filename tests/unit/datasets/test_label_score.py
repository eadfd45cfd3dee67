"""What a tile's labels alone say about it, and views of one tile."""

from __future__ import annotations

import math
from typing import Any, List

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.registry import TRANSFORMS
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from mapsage.datasets import LabelScore


def packed(labels: Any) -> dict:
    sample = SegDataSample()
    sample.gt_sem_seg = PixelData(data=torch.tensor(labels, dtype=torch.int64)[None])
    return dict(data_samples=sample)


HALVES = packed([[0, 0, 3, 3], [0, 0, 3, 3]])
ONE_CLASS = packed([[2, 2], [2, 255]])
NO_LABEL = packed([[255, 255]])


@pytest.mark.parametrize(
    'score, sample, expected',
    [
        (LabelScore(), HALVES, math.log(2)),
        (LabelScore(), ONE_CLASS, 0.0),
        (LabelScore(), NO_LABEL, 0.0),
        (LabelScore('valid_pixels'), ONE_CLASS, 0.75),
        (LabelScore('valid_pixels'), NO_LABEL, 0.0),
        (LabelScore('rare_classes', classes=[3, 9]), HALVES, 0.5),
        (LabelScore('rare_classes', classes=[2]), ONE_CLASS, 1.0),
        (LabelScore('rare_classes', classes=[2]), NO_LABEL, 0.0),
    ],
)
def test_scores(score: LabelScore, sample: dict, expected: float) -> None:
    assert score.score(sample) == pytest.approx(expected)


@given(st.lists(st.integers(0, 4) | st.just(255), min_size=1, max_size=30))
def test_entropy_is_that_of_the_shares(labels: List[int]) -> None:
    known = [label for label in labels if label != 255]
    shares = [known.count(c) / len(known) for c in set(known)]
    score = LabelScore().score(packed([labels]))
    assert score == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-12)
    assert 0 <= score <= math.log(5)


def test_as_a_transform_it_leaves_its_score_in_the_metainfo() -> None:
    sample = TRANSFORMS.build(dict(type='LabelScore', metric='valid_pixels'))(packed([[1, 255]]))
    assert sample['data_samples'].metainfo['label_score'] == 0.5


@pytest.mark.parametrize(
    'arguments, words',
    [
        (dict(metric='entropy'), "metric='entropy', expected one of class_entropy, rare_classes"),
        (dict(metric='rare_classes'), 'needs class indices'),
        (dict(classes=[1]), "metric='class_entropy' with classes=\\[1\\]"),
    ],
)
def test_bad_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LabelScore(**arguments)


def test_a_sample_without_labels() -> None:
    with pytest.raises(ValueError, match='a sample has no gt_sem_seg'):
        LabelScore().score(dict(data_samples=SegDataSample()))
