"""Measurements of windows with a model: doubt, disagreement of mirror images, contradicted labels.

The results (`WindowFacts`) are small; the full probabilities of a batch are dropped after it.
`ranking.py` compares the windows by them.

Shapes:
    windows        (batch, bands, height, width)  as the model gets them
    probabilities  (batch, classes, height, width)
    valid, labels  (h, w)  the extent of a window inside its scene: h <= height, w <= width
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, NamedTuple, Optional, Tuple, cast

import numpy as np
import torch
from torch import nn

from mapsage.maps.predictor import WindowPredictor
from mapsage.models.backbones.stack_backbone import StackBackbone


class FileWindow(NamedTuple):
    """A window of a file, in its pixels."""

    path: str
    column: int
    row: int
    width: int
    height: int


@dataclass(frozen=True)
class WindowFacts:
    """Measurements of a window.

    The doubt of a pixel is ``1 - (p1 - p2)``, with the probabilities ``p1`` and ``p2`` of the two
    most likely classes. With mirror images it is the mean of this number and the share of mirror
    images with another predicted class.

    Attributes:
        place: The window.
        doubt: Sum of the pixels' doubt by predicted class, divided by ``size``, ``(classes,)``
            float64.
        pixels: Pixels by predicted class, ``(classes,)`` int64.
        margin: Mean of ``1 - (p1 - p2)`` over the pixels with data.
        disagreement: Mean share of mirror images with another predicted class; 0 without mirror
            images.
        rivals: Pair of classes with the largest sum of doubt between them.
        feature: Mean of the backbone's last feature map, ``(channels,)`` float32.
        size: Pixels of the window in the size that the model sees, including pixels without data.
        labeled: Pixels with a label.
        contradicted: Labeled pixels where the model is sure of another class.
        mistaken: Most frequent pair of label and prediction among the contradicted pixels.
    """

    place: FileWindow
    doubt: np.ndarray
    pixels: np.ndarray
    margin: float
    disagreement: float
    rivals: Tuple[int, int]
    feature: np.ndarray
    size: int
    labeled: int = 0
    contradicted: int = 0
    mistaken: Tuple[int, int] = (0, 0)


class WindowJudge:
    """Measures windows with a model.

    Args:
        model: The predictor's segmentor.
        predictor: Predictor for windows of one size.
        classes: Number of classes.
        sure: Probability from which the model counts as sure, so that it contradicts a label.
    """

    def __init__(
        self, model: nn.Module, predictor: WindowPredictor, classes: int, sure: float = 0.9
    ) -> None:
        self._predictor, self._classes, self._sure = predictor, classes, np.float32(sure)
        self._pooled_features: Optional[torch.Tensor] = None
        backbone = getattr(model, 'backbone', None)
        if isinstance(backbone, StackBackbone) and backbone.returns_facts:
            # The last map of the backbone has dates, and no features.
            backbone = cast(Any, model).neck
        if backbone is not None:
            backbone.register_forward_hook(self._pool_features)

    def measure(
        self,
        windows: np.ndarray,
        valid: List[np.ndarray],
        boxes: List[FileWindow],
        labels: Optional[List[np.ndarray]] = None,
    ) -> List[WindowFacts]:
        """Return the measurements of a batch of windows.

        Args:
            windows: ``(batch, bands, height, width)`` as the model gets them.
            valid: Pixels with data of each window, bool ``(h, w)``, not larger than a window.
            boxes: The windows in pixels of their files.
            labels: Labels of each window, uint8 ``(h, w)``; ``UNKNOWN`` without a label.
        """
        probabilities, disagreement, features = self._predict_views(windows)
        facts = []
        for number, (valid_pixels, box) in enumerate(zip(valid, boxes)):
            height, width = valid_pixels.shape
            facts.append(
                self._measure_window(
                    box,
                    probabilities[number, :, :height, :width],
                    disagreement[number, :height, :width],
                    valid_pixels,
                    features[number] if features is not None else None,
                    None if labels is None else labels[number],
                )
            )
        return facts

    def predict(self, window: np.ndarray) -> np.ndarray:
        """Return the classes of a window ``(bands, height, width)``, uint8 ``(height, width)``."""
        probabilities, _, _ = self._predict_views(np.ascontiguousarray(window)[None])
        return probabilities[0].argmax(0).astype(np.uint8)

    def _predict_views(
        self, windows: np.ndarray
    ) -> Tuple[np.ndarray, np.ndarray, Optional[np.ndarray]]:
        """Return the mean over the mirror images of the probabilities, and two more arrays.

        Returns:
            Probabilities ``(batch, classes, height, width)``; the share of mirror images with
            another predicted class ``(batch, height, width)``; and the features of the image that
            is not mirrored ``(batch, channels)``, None if the backbone returned no feature map.
        """
        view_classes: List[np.ndarray] = []
        total: Optional[np.ndarray] = None
        features: Optional[np.ndarray] = None
        for scores in self._predictor.views(torch.from_numpy(windows)):
            if total is None and self._pooled_features is not None:
                features = self._pooled_features.float().cpu().numpy()
            probabilities = _probabilities(scores, self._predictor.threshold)
            view_classes.append(probabilities.argmax(1).astype(np.uint8))
            total = probabilities if total is None else total + probabilities
        # The predictor yields at least the image itself.
        assert total is not None
        total /= len(view_classes)
        winner = total.argmax(1).astype(np.uint8)
        disagreement = np.stack([classes != winner for classes in view_classes]).mean(
            0, dtype=np.float32
        )
        return total, np.asarray(disagreement), features

    def _measure_window(
        self,
        box: FileWindow,
        probabilities: np.ndarray,
        disagreement: np.ndarray,
        valid: np.ndarray,
        feature: Optional[np.ndarray],
        labels: Optional[np.ndarray],
    ) -> WindowFacts:
        winner = probabilities.argmax(0)
        best = np.take_along_axis(probabilities, winner[None], 0)[0]
        without_winner = probabilities.copy()
        np.put_along_axis(without_winner, winner[None], -1, 0)
        second = without_winner.argmax(0)
        margin = np.where(valid, 1 - (best - without_winner.max(0)), 0)
        doubt = (margin + disagreement * valid) / 2 if self._predictor.has_views else margin
        count, size = self._classes, valid.size
        # Doubt by (predicted class, second class), as a flat array.
        by_pair = np.bincount((winner * count + second)[valid], doubt[valid], count * count)
        pixels = np.bincount(winner[valid], minlength=count)
        if feature is None:
            feature = (pixels / max(1, pixels.sum())).astype(np.float32)
        facts = WindowFacts(
            box,
            by_pair.reshape(count, count).sum(1) / size,
            pixels,
            float(margin.sum() / max(1, valid.sum())),
            float((disagreement * valid).sum() / max(1, valid.sum())),
            divmod(int(by_pair.argmax()), count),
            feature,
            size,
        )
        if labels is None:
            return facts
        labeled = (labels < count) & valid
        contradicted = labeled & (labels != winner) & (best >= self._sure)
        mistakes = np.bincount(
            (labels.astype(np.int64) * count + winner)[contradicted], minlength=count * count
        )
        return replace(
            facts,
            labeled=int(labeled.sum()),
            contradicted=int(contradicted.sum()),
            mistaken=divmod(int(mistakes.argmax()), count),
        )

    def _pool_features(self, module: nn.Module, inputs: Tuple[Any, ...], output: object) -> None:
        """Forward hook: store the mean of the deepest feature map, ``(batch, channels)``."""
        maps = [tensor for tensor in _tensors(output) if tensor.dim() == 4]
        self._pooled_features = maps[-1].detach().mean((2, 3)) if maps else None


def _probabilities(scores: np.ndarray, threshold: float) -> np.ndarray:
    """Return the probabilities of all classes, which sum to 1 per pixel.

    A binary model has a single score. It is mapped piecewise linearly, so that the model's
    threshold becomes 0.5 and the argmax changes where the model's class changes. Scores of mask
    queries are divided by their sum.
    """
    if scores.shape[1] == 1:
        second = np.interp(scores[:, 0], (0, threshold, 1), (0, 0.5, 1)).astype(np.float32)
        return np.stack([1 - second, second], 1)
    return scores / np.maximum(scores.sum(1, keepdims=True), 1e-12)


def _tensors(value: object) -> List[torch.Tensor]:
    """Return the tensors in nested dicts, lists and tuples, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
