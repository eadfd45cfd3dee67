"""One training step of FixMatch: the loss of a batch with labeled and unlabeled images."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from mapsage.datasets.semi_supervised.transforms import OUTSIDE, UNKNOWN
from mapsage.errors import UserError

from .channel_dropout import drop_channels
from .cut_mix import draw_boxes, paste
from .given_features import Levels, as_levels, given_features
from .strong_view import StrongView
from .teacher import Teacher
from .unlabeled_loss import UnlabeledLoss, is_unlabeled, stacked_hidden

VIEWS = ('images', 'features')


class BatchError(UserError, ValueError):
    """A batch does not hold labeled images first and unlabeled ones behind them."""


class FixMatchStep:
    """Takes the place of a segmentor's ``loss``: half the loss of labels, half that of the teacher.

    ``(L(x) + mean over views sum CE(s, argmax t) [max t >= threshold] / #valid) / 2``, where L is
    the segmentor's own loss of the labeled images with all its terms.

    - ``views='images'``: the weak view is the image of the loader; in the strong one colors change,
      images are blurred, and boxes are mixed. With ``channel_dropout`` there are two strong views,
      and of the backbone's features each lacks the channels that the other keeps.
    - ``views='features'``: the backbone, which is frozen, runs once on the image of the loader, or
      not at all where its features come from elsewhere. These are the weak view; in both strong
      ones channels are dropped and boxes are mixed.

    Args:
        student: Segmentor that is trained, with ``encode_decode``.
        teacher: Its average.
        loss: Loss of unlabeled images.
        views: What strong views are made of, 'images' or 'features'.
        channel_dropout: Whether images too have two strong views with complementary channels.
        cut_mix: Probability that an image has a box of another one.
        strong: Colors and blur of strong images.

    Attributes:
        seen: Counts of each call since it was emptied: how many pixels of unlabeled images the
            teacher gives to each class, how many of these pass the threshold, for how many of those
            the truth is known and how many are right: float (4, C), on the device.
    """

    def __init__(self, student: Any, teacher: Teacher, loss: UnlabeledLoss, views: str,
                 channel_dropout: bool, cut_mix: float, strong: StrongView) -> None:
        self.student, self.teacher, self.unlabeled_loss = student, teacher, loss
        self.views, self.channel_dropout = views, channel_dropout
        self.cut_mix, self.strong = cut_mix, strong
        self.seen: List[torch.Tensor] = []
        self._plain: Callable[..., Dict[str, Any]] = student.loss

    def __call__(self, inputs: torch.Tensor, data_samples: Sequence[Any]) -> Dict[str, Any]:
        """Return the losses of a batch, by name; ``unlabeled.passed`` is the share of sure pixels.

        Args:
            inputs: Normalized images, float (N, C, H, W), labeled ones first.
            data_samples: Their data samples.

        Raises:
            BatchError: If the batch lacks a kind, or they are in another order.
        """
        labeled = _count_labeled(data_samples)
        samples = list(data_samples[labeled:])
        size = (int(inputs.shape[2]), int(inputs.shape[3]))
        hidden = stacked_hidden(samples, size)
        of_features = self.views == 'features'
        features = self._levels(self.student.backbone(inputs)) if of_features else None
        classes, sure = self._taught(inputs[labeled:], _part(features, labeled, None))
        sure = sure & (hidden != OUTSIDE)
        self.seen.append(_counted(classes, sure, hidden, int(self.student.num_classes)))
        if features is None:
            losses = self._plain(inputs[:labeled], list(data_samples[:labeled]))
        else:
            with given_features(self.student.backbone, _part(features, None, labeled)):
                losses = self._plain(inputs[:labeled], list(data_samples[:labeled]))
        logits, mixed = self._strong_logits(inputs[labeled:], _part(features, labeled, None),
                                            torch.stack([classes, sure.long()], 1))
        # As count_batch, but without a wait for the device.
        valid = (hidden != OUTSIDE).sum().float()
        count = torch.stack([valid, torch.ones_like(valid)])
        losses['unlabeled.loss_ce'] = self.unlabeled_loss(
            logits, mixed[:, 0], mixed[:, 1] > 0, count, len(mixed) // len(samples))
        halved = {name: _half(value) if 'loss' in name else value
                  for name, value in losses.items()}
        halved['unlabeled.passed'] = sure.sum() / valid.clamp(min=1)
        return halved

    @torch.no_grad()
    def _taught(self, images: torch.Tensor, features: Optional[Levels]
                ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's classes, int64 (N, H, W), and where it is sure of them, bool."""
        teacher = self.teacher.module
        if features is None:
            logits = _logits(teacher, images)
        else:
            with given_features(teacher.backbone, features):
                logits = _logits(teacher, images)
        confidence, classes = logits.float().softmax(1).max(1)
        return classes, confidence >= self.unlabeled_loss.threshold

    def _strong_logits(self, images: torch.Tensor, features: Optional[Levels],
                       answers: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the student's logits of the strong views, and the answers, cut alike.

        Args:
            images: Weak views, (N, C, H, W).
            features: Their features, if strong views are made of these.
            answers: Classes and sure pixels, int64 (N, 2, H, W).

        Returns:
            Logits (V N, C, H, W) and answers (V N, 2, H, W), view by view.
        """
        backbone = getattr(self.student, 'backbone', None)
        twice = self.channel_dropout or features is not None
        grid = images.shape[2:] if features is None else min(
            (level.shape[2:] for level in features), key=lambda each: each[0])
        boxes = [draw_boxes(len(images), self.cut_mix, (int(grid[0]), int(grid[1]))).to(
            images.device) for _ in range(1 + twice)]
        mixed = torch.cat([paste(answers, each) for each in boxes])
        several = torch.cat([images] * len(boxes))
        if features is None:
            several = torch.cat([paste(self._strong_images(images), each) for each in boxes])
            if not twice:
                return _logits(self.student, several), mixed
            levels = self._levels(backbone(several))  # type: ignore[misc]
            first, second = (_part(levels, *ends) for ends in ((None, len(images)),
                                                               (len(images), None)))
            first, second = drop_channels(first or (), second or ())
        else:
            # Dropped before they are mixed: each part of a view keeps the channels of its image.
            first, second = drop_channels(features, features)
            first, second = (tuple(paste(level, each) for level in view)
                             for view, each in zip((first, second), boxes))
        both = tuple(torch.cat(pair) for pair in zip(first, second))
        with given_features(backbone, both):  # type: ignore[arg-type]
            return _logits(self.student, several), mixed

    def _strong_images(self, images: torch.Tensor) -> torch.Tensor:
        preprocessor = getattr(self.student, 'data_preprocessor', None)
        mean, std = (getattr(preprocessor, name, None) for name in ('mean', 'std'))
        return self.strong(images, mean, std)

    def _levels(self, features: Any) -> Levels:
        return as_levels(features, self.student.backbone)


def _count_labeled(samples: Sequence[Any]) -> int:
    """Return how many labeled samples a batch begins with."""
    marks = [is_unlabeled(sample) for sample in samples]
    labeled = len(marks) - sum(marks)
    if not 0 < labeled < len(marks) or marks != sorted(marks):
        raise BatchError(
            f'a batch with the kinds {"".join("U" if each else "L" for each in marks)} (L labeled, '
            'U unlabeled), expected some labeled images and then some unlabeled ones: set '
            "train_dataloader.sampler=dict(type='LabeledUnlabeledSampler', labeled=..., "
            'unlabeled=...), whose numbers add up to batch_size.')
    return labeled


def _part(levels: Optional[Levels], start: Optional[int], stop: Optional[int]) -> Any:
    """Return some of the images of features; None where there are none."""
    return None if levels is None else tuple(level[start:stop] for level in levels)


def _logits(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return a segmentor's logits at the size of the images, float (N, C, H, W)."""
    size = images.shape[2:]
    metas = [dict(img_shape=size, ori_shape=size, pad_shape=size, padding_size=[0] * 4)
             for _ in range(len(images))]
    logits = model.encode_decode(images, metas)
    if logits.shape[1] == 1:  # of class 1 against class 0
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    return logits


def _half(value: Any) -> Any:
    return [each / 2 for each in value] if isinstance(value, (list, tuple)) else value / 2


def _counted(classes: torch.Tensor, sure: torch.Tensor, hidden: torch.Tensor, count: int
             ) -> torch.Tensor:
    """Return pixels of each class: all, sure, with known truth and right ones, float (4, C).

    By comparison instead of scatter, whose order is not certain on every device.
    """
    inside = hidden != OUTSIDE
    known = sure & (hidden < UNKNOWN)
    kinds = torch.stack([inside, sure, known, known & (classes == hidden)])
    return torch.stack([(kinds & (classes == each)).flatten(1).sum(1) for each in range(count)],
                       1).float()
