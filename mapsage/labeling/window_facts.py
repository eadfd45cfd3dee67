"""What a model thinks of the windows of scenes: where it doubts, and what kind each is."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np
import torch

from mapsage.inference.predictor import WindowPredictor


class Place(NamedTuple):
    """A window of a file, in its pixels."""

    path: str
    column: int
    row: int
    width: int
    height: int


@dataclass(frozen=True)
class WindowFacts:
    """What a model thinks of a window.

    Doubt of a pixel is 1 less the margin between the probabilities of the two most likely classes;
    with mirror images, the mean of that and of the share of images that are of another class.

    Attributes:
        place: The window.
        doubt: Doubt by predicted class, as a part of the whole window, ``(classes,)`` float64.
        pixels: Pixels by predicted class, ``(classes,)`` int64.
        margin: Mean of 1 less the margin over pixels with data.
        disagreement: Mean share of mirror images of another class; 0 without them.
        rivals: The two classes between which most of the doubt is.
        feature: Mean of the backbone's last feature map, ``(channels,)`` float32.
        size: Number of pixels of the window in the size that the model sees it in, also of those
            without data.
        labeled: Number of pixels with a label.
        contradicted: Those among them where the model is sure of another class.
        mistaken: Label and prediction that most of them have.
    """

    place: Place
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
        model: The segmentor that the predictor has.
        predictor: It, for windows of one size.
        classes: Number of classes.
        sure: Probability from which on the model is sure of a class that a label contradicts.
    """

    def __init__(self, model: Any, predictor: WindowPredictor, classes: int,
                 sure: float = 0.9) -> None:
        self._predictor, self._classes, self._sure = predictor, classes, np.float32(sure)
        self._seen: Optional[torch.Tensor] = None
        backbone = getattr(model, 'backbone', None)
        if backbone is not None:
            backbone.register_forward_hook(self._keep)

    def measure(self, windows: np.ndarray, valid: List[np.ndarray], places: List[Place],
                labels: Optional[List[np.ndarray]] = None) -> List[WindowFacts]:
        """Return the facts of a batch of windows.

        Args:
            windows: ``(batch, bands, height, width)`` as the model gets them.
            valid: Pixels of each that hold data, bool ``(h, w)``, not larger than a window.
            places: The windows in pixels of their files.
            labels: Labels of each, uint8 ``(h, w)``, ``UNKNOWN`` where there is none.
        """
        mean, others, features = self._look(windows)
        found = []
        for number, (here, place) in enumerate(zip(valid, places)):
            height, width = here.shape
            found.append(self._facts(
                place, mean[number, :, :height, :width], others[number, :height, :width], here,
                features[number] if features is not None else None,
                None if labels is None else labels[number]))
        return found

    def predict(self, window: np.ndarray) -> np.ndarray:
        """Return the classes of a window ``(bands, height, width)``, uint8 ``(height, width)``."""
        return self._look(np.ascontiguousarray(window)[None])[0][0].argmax(0).astype(np.uint8)

    def _look(self, windows: np.ndarray
              ) -> Tuple[np.ndarray, np.ndarray, Optional[np.ndarray]]:
        """Return mean probabilities, share of views of another class, and features."""
        views: List[np.ndarray] = []
        total: Optional[np.ndarray] = None
        features: Optional[np.ndarray] = None
        for scores in self._predictor.views(torch.from_numpy(windows)):
            if total is None and self._seen is not None:
                features = self._seen.float().cpu().numpy()
            shares = _probabilities(scores, self._predictor.threshold)
            views.append(shares.argmax(1).astype(np.uint8))
            total = shares if total is None else total + shares
        assert total is not None  # there is a view at least
        total /= len(views)
        winner = total.argmax(1).astype(np.uint8)
        others = np.stack([view != winner for view in views]).mean(0, dtype=np.float32)
        return total, np.asarray(others), features

    def _facts(self, place: Place, shares: np.ndarray, others: np.ndarray, valid: np.ndarray,
               feature: Optional[np.ndarray], labels: Optional[np.ndarray]) -> WindowFacts:
        winner = shares.argmax(0)
        best = np.take_along_axis(shares, winner[None], 0)[0]
        rest = shares.copy()
        np.put_along_axis(rest, winner[None], -1, 0)
        second = rest.argmax(0)
        margin = np.where(valid, 1 - (best - rest.max(0)), 0)
        doubt = (margin + others * valid) / 2 if self._predictor.has_views else margin
        count, side = self._classes, valid.size
        by_pair = np.bincount((winner * count + second)[valid], doubt[valid], count * count)
        pixels = np.bincount(winner[valid], minlength=count)
        if feature is None:
            feature = (pixels / max(1, pixels.sum())).astype(np.float32)
        facts = WindowFacts(
            place, by_pair.reshape(count, count).sum(1) / side, pixels,
            float(margin.sum() / max(1, valid.sum())),
            float((others * valid).sum() / max(1, valid.sum())),
            _pair(int(by_pair.argmax()), count), feature, side)
        if labels is None:
            return facts
        known = (labels < count) & valid
        wrong = known & (labels != winner) & (best >= self._sure)
        mistakes = np.bincount((labels.astype(np.int64) * count + winner)[wrong],
                               minlength=count * count)
        return WindowFacts(**{**facts.__dict__, **dict(
            labeled=int(known.sum()), contradicted=int(wrong.sum()),
            mistaken=_pair(int(mistakes.argmax()), count))})

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        """Keep the mean of the deepest feature map, ``(batch, channels)``."""
        maps = [each for each in _tensors(output) if each.dim() == 4]
        self._seen = maps[-1].detach().mean((2, 3)) if maps else None


def _probabilities(scores: np.ndarray, threshold: float) -> np.ndarray:
    """Return probabilities of all classes, which sum to 1.

    The single score of a binary model is bent so that its threshold is at 0.5, where its class
    changes; scores of mask queries are divided by their sum.
    """
    if scores.shape[1] == 1:
        second = np.interp(scores[:, 0], (0, threshold, 1), (0, 0.5, 1)).astype(np.float32)
        return np.stack([1 - second, second], 1)
    return scores / np.maximum(scores.sum(1, keepdims=True), 1e-12)


def _tensors(value: Any) -> List[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _tensors(part)] if isinstance(
        value, (list, tuple)) else []


def _pair(number: int, count: int) -> Tuple[int, int]:
    return number // count, number % count
