"""Metrics of a loop, which may be a user's and have neither an evaluator nor a matrix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List

import numpy as np
from mmengine.evaluator import BaseMetric, Evaluator

from mapsage.host.runner import confusion_matrix, metrics_of


class Counts(BaseMetric):
    """A user's metric with a confusion matrix."""

    matrix = np.eye(2)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Count nothing."""

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        return {}


class Plain(Counts):
    """A metric without a matrix."""

    matrix = None


def test_the_metrics_of_a_loop_and_their_matrices() -> None:
    loop = SimpleNamespace(evaluator=Evaluator([Counts(), Plain()]))
    counts, plain = metrics_of(loop)
    assert confusion_matrix(counts) is Counts.matrix
    assert confusion_matrix(plain) is None


def test_a_loop_without_an_evaluator_has_no_metrics() -> None:
    for loop in (SimpleNamespace(), dict(type='ValLoop'), None):
        assert metrics_of(loop) == []
    assert confusion_matrix(object()) is None
