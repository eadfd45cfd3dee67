"""Measurements of windows, compared with a direct computation on the whole image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from color_model import PixelModel
from torch import nn

from mapsage.extras.labels.known_labels import UNKNOWN
from mapsage.extras.labels.window_facts import FileWindow, WindowJudge
from mapsage.maps.predictor import WindowPredictor

SIDE = 16
BOXES = [FileWindow('a.tif', 0, 0, SIDE, SIDE), FileWindow('a.tif', SIDE, 0, SIDE, SIDE)]


class WithBackbone(PixelModel):
    """A model with a receptive field, so that mirror images differ, and with a feature map."""

    def __init__(self, classes: int = 4, gives_scores: bool = False) -> None:
        torch.manual_seed(3)
        super().__init__(3)
        self.num_classes, self.out_channels = max(2, classes), classes
        self.convolution = nn.Conv2d(3, classes, 3, padding=1)
        nn.init.normal_(self.convolution.weight, std=0.01)
        self.backbone = nn.AvgPool2d(4)
        self.decode_head = nn.Module()
        self.decode_head.gives_scores = gives_scores
        self.decode_head.threshold = 0.3 if classes == 1 else None

    def encode_decode(self, inputs: torch.Tensor, metas: list) -> torch.Tensor:
        self.backbone(inputs)
        scores = self.convolution(inputs)
        return scores.abs() if self.decode_head.gives_scores else scores


def predictor(model: nn.Module, tta: bool) -> WindowPredictor:
    return WindowPredictor(model, torch.device('cpu'), (SIDE, SIDE), 0, 4, tta)


def windows() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 255, (2, 3, SIDE, SIDE)).astype(np.uint8)


def shares(model: WithBackbone, images: np.ndarray) -> np.ndarray:
    """Return probabilities with the argmax that equals the model's class."""
    with torch.no_grad():
        logits = model.encode_decode(torch.from_numpy(images).float(), [])
    if model.out_channels == 1:
        score = logits.sigmoid().numpy()[:, 0]
        second = np.where(score < 0.3, score / 0.6, 0.5 + (score - 0.3) / 1.4)
        return np.stack([1 - second, second], 1)
    if model.decode_head.gives_scores:
        return (logits / logits.sum(1, keepdim=True)).numpy()
    return logits.softmax(1).numpy()


@pytest.mark.parametrize('tta', [False, True])
@pytest.mark.parametrize(
    'classes, gives', [(4, False), (1, False), (4, True)], ids=['logits', 'binary', 'scores']
)
def test_doubt_and_disagreement(classes: int, gives: bool, tta: bool) -> None:
    model, images = WithBackbone(classes, gives), windows()
    count = max(2, classes)
    flips = [(), (3,), (2,), (2, 3)] if tta else [()]
    views = [np.flip(shares(model, np.flip(images, flip).copy()), flip) for flip in flips]
    mean = np.mean(views, 0)
    top = np.sort(mean, 1)
    margin = 1 - (top[:, -1] - top[:, -2])
    winner, second = mean.argmax(1), np.argsort(mean, 1)[:, -2]
    disagreement = np.mean([view.argmax(1) != winner for view in views], 0)
    valid = np.ones((SIDE, SIDE), bool)
    valid[:5] = False
    judge = WindowJudge(model, predictor(model, tta), count)
    doubt = (margin + disagreement) / 2 if tta else margin
    for number, facts in enumerate(judge.measure(images, [valid, valid], BOXES)):
        rows = np.s_[number, 5:]
        expected = [doubt[rows][winner[rows] == label].sum() / SIDE**2 for label in range(count)]
        assert np.allclose(facts.doubt, expected, atol=1e-5)
        assert facts.pixels.tolist() == np.bincount(winner[rows].ravel(), minlength=count).tolist()
        assert np.isclose(facts.margin, margin[rows].mean(), atol=1e-5)
        assert np.isclose(facts.disagreement, disagreement[rows].mean(), atol=1e-6)
        assert (facts.disagreement > 0.01) == tta
        pairs = {
            (a, b): doubt[rows][(winner[rows] == a) & (second[rows] == b)].sum()
            for a in range(count)
            for b in range(count)
        }
        assert facts.rivals == max(pairs, key=pairs.__getitem__)
        assert np.allclose(facts.feature, images[number].mean((1, 2)), atol=1e-3)
        assert facts.place is BOXES[number]


def test_only_a_confident_model_contradicts_a_label() -> None:
    # PixelModel's class is the brightest band, or the fourth class where all bands are dark: here
    # it is sure of class 0 on the left, and unsure between 0 and 1 on the right.
    model = PixelModel()
    colors = np.zeros((1, 3, SIDE, SIDE), np.uint8)
    colors[0, 0] = 255
    colors[0, 0, :, 8:] = 130
    colors[0, 1, :, 8:] = 128
    labels = np.full((SIDE, SIDE), UNKNOWN, np.uint8)
    labels[:4], labels[4:6] = 1, 0
    valid = np.ones((SIDE, SIDE), bool)
    valid[0] = False
    (facts,) = WindowJudge(model, predictor(model, False), 4, 0.9).measure(
        colors, [valid], BOXES[:1], [labels]
    )
    assert (facts.labeled, facts.contradicted, facts.mistaken) == (5 * 16, 3 * 8, (1, 0))
