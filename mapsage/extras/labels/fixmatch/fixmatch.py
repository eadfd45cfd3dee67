"""One training step of FixMatch: the loss of a batch with labeled and unlabeled images.

The teacher's classes on the weak view are the pseudo-labels of the strong views; pixels where the
teacher is not confident are ignored. Random numbers of the views are drawn on the CPU, so every
device draws the same ones.

Shapes: N images of the batch, U unlabeled ones among them, V strong views of each, C classes,
H x W pixels.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple

import torch

from mapsage.base.errors import UserError
from mapsage.extras.labels.unlabeled.transforms import OUTSIDE, UNKNOWN

from .cut_mix import draw_boxes, paste
from .feature_views import Levels, as_levels, drop_channels, given_features
from .strong_view import StrongView
from .teacher import Teacher
from .unlabeled_loss import UnlabeledLoss, is_unlabeled, stack_hidden_masks

VIEWS = ('images', 'features')


class BatchError(UserError, ValueError):
    """A batch does not consist of labeled images followed by unlabeled images."""


class FixMatchStep:
    """Replaces a segmentor's ``loss`` by the mean of its supervised loss and the unlabeled loss.

    ``(L(x) + mean over views sum CE(s, argmax t) [max t >= threshold] / #valid) / 2``, where L is
    the segmentor's loss of the labeled images with all its terms.

    - ``views='images'``: The weak view is the image from the loader. In the strong view, colors
      change, the image is blurred, and boxes are mixed. With ``channel_dropout`` there are two
      strong views, and each drops the backbone channels that the other keeps.
    - ``views='features'``: The frozen backbone runs once on the image from the loader, or not at
      all if its features come from a cache or from encoder ranks. These features are the weak view.
      In both strong views, channels are dropped and boxes are mixed.

    Args:
        student: Segmentor that is trained, with ``encode_decode``.
        teacher: Moving average of the student.
        loss: Loss of unlabeled images.
        views: Input of the strong views, 'images' or 'features'.
        channel_dropout: Whether ``views='images'`` has two strong views, with complementary
            channels.
        cut_mix: Probability that an image gets a box of another image.
        strong: Color changes and blur of the strong images.

    Attributes:
        seen: One float (4, C) on the device for each call since the list was last cleared. Its rows
            count the pixels of unlabeled images by the teacher's class: all pixels, confident
            pixels, confident pixels with a known label, and correct ones among these.
    """

    def __init__(
        self,
        student: Any,
        teacher: Teacher,
        loss: UnlabeledLoss,
        views: str,
        channel_dropout: bool,
        cut_mix: float,
        strong: StrongView,
    ) -> None:
        self.student, self.teacher, self.unlabeled_loss = student, teacher, loss
        self.views, self.channel_dropout = views, channel_dropout
        self.cut_mix, self.strong = cut_mix, strong
        self.seen: List[torch.Tensor] = []
        self._supervised_loss: Callable[..., Dict[str, Any]] = student.loss

    def __call__(self, inputs: torch.Tensor, data_samples: Sequence[Any]) -> Dict[str, Any]:
        """Return the losses of a batch by name, and the share of confident pixels.

        The share has the name ``unlabeled.passed``.

        Args:
            inputs: Normalized images, float (N, bands, H, W), labeled images first.
            data_samples: Data samples of the images.

        Raises:
            BatchError: If the batch has no labeled or no unlabeled image, or another order.
        """
        labeled = _count_labeled(data_samples)
        labeled_features: Optional[Levels] = None
        unlabeled_features: Optional[Levels] = None
        if self.views == 'features':
            features = self._run_backbone(inputs)
            labeled_features = _slice_images(features, None, labeled)
            unlabeled_features = _slice_images(features, labeled, None)
        samples = list(data_samples[labeled:])
        hidden = stack_hidden_masks(samples, (int(inputs.shape[2]), int(inputs.shape[3])))
        classes, confident = self._predict_pseudo_labels(inputs[labeled:], unlabeled_features)
        confident = confident & (hidden != OUTSIDE)
        self.seen.append(_count_pixels(classes, confident, hidden, int(self.student.num_classes)))
        with _use_features(self.student, labeled_features):
            losses = self._supervised_loss(inputs[:labeled], list(data_samples[:labeled]))
        logits, mixed = self._strong_logits(
            inputs[labeled:], unlabeled_features, torch.stack([classes, confident.long()], 1)
        )
        # The same count as UnlabeledLoss.count_batch(), but without waiting for the device.
        valid = (hidden != OUTSIDE).sum().float()
        count = torch.stack([valid, torch.ones_like(valid)])
        losses['unlabeled.loss_ce'] = self.unlabeled_loss(
            logits, mixed[:, 0], mixed[:, 1] > 0, count, len(mixed) // len(samples)
        )
        halved = {
            name: _halve(value) if 'loss' in name else value for name, value in losses.items()
        }
        halved['unlabeled.passed'] = confident.sum() / valid.clamp(min=1)
        return halved

    @torch.no_grad()
    def _predict_pseudo_labels(
        self, images: torch.Tensor, features: Optional[Levels]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's classes, int64 (U, H, W), and where it is confident, bool."""
        teacher = self.teacher.module
        with _use_features(teacher, features):
            logits = _compute_logits(teacher, images)
        confidence, classes = logits.float().softmax(1).max(1)
        return classes, confidence >= self.unlabeled_loss.threshold

    def _strong_logits(
        self, images: torch.Tensor, features: Optional[Levels], pseudo_labels: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the student's logits of the strong views, and their pseudo-labels.

        Boxes are mixed in both at the same positions.

        Args:
            images: Weak views, (U, bands, H, W).
            features: Features of the weak views with ``views='features'``, otherwise None.
            pseudo_labels: Classes and confident pixels, int64 (U, 2, H, W).

        Returns:
            Logits (V * U, C, H, W) and pseudo-labels (V * U, 2, H, W), view by view.
        """
        has_two_views = self.channel_dropout or features is not None
        grid = (
            images.shape[2:]
            if features is None
            else min((level.shape[2:] for level in features), key=lambda size: size[0])
        )
        # The boxes of each view.
        boxes = [
            draw_boxes(len(images), self.cut_mix, (int(grid[0]), int(grid[1]))).to(images.device)
            for _ in range(1 + has_two_views)
        ]
        mixed = torch.cat([paste(pseudo_labels, view_boxes) for view_boxes in boxes])
        if features is None:
            inputs = torch.cat(
                [paste(self._strengthen(images), view_boxes) for view_boxes in boxes]
            )
            if not has_two_views:
                return _compute_logits(self.student, inputs), mixed
            levels = self._run_backbone(inputs)
            first, second = drop_channels(
                _slice_images(levels, None, len(images)), _slice_images(levels, len(images), None)
            )
        else:
            # The backbone is skipped, so only the size of these images matters.
            inputs = torch.cat([images] * len(boxes))
            # Channels are dropped before boxes are mixed: a pasted box keeps the channels of the
            # image that it comes from.
            first, second = drop_channels(features, features)
            first, second = (
                tuple(paste(level, view_boxes) for level in view)
                for view, view_boxes in zip((first, second), boxes)
            )
        both = tuple(torch.cat(pair) for pair in zip(first, second))
        with given_features(self.student.backbone, both):
            return _compute_logits(self.student, inputs), mixed

    def _strengthen(self, images: torch.Tensor) -> torch.Tensor:
        # A preprocessor that does not normalize has no mean and std.
        preprocessor = self.student.data_preprocessor
        mean, std = (getattr(preprocessor, name, None) for name in ('mean', 'std'))
        return self.strong(images, mean, std)

    def _run_backbone(self, images: torch.Tensor) -> Levels:
        return as_levels(self.student.backbone(images), self.student.backbone)


def _count_labeled(samples: Sequence[Any]) -> int:
    """Return the number of labeled samples, which must come before the unlabeled ones."""
    unlabeled = [is_unlabeled(sample) for sample in samples]
    labeled = len(unlabeled) - sum(unlabeled)
    if not 0 < labeled < len(unlabeled) or unlabeled != sorted(unlabeled):
        kinds = ''.join('U' if is_marked else 'L' for is_marked in unlabeled)
        raise BatchError(
            f'a batch with the kinds {kinds} (L labeled, '
            'U unlabeled), expected some labeled images and then some unlabeled ones: set '
            "train_dataloader.sampler=dict(type='LabeledUnlabeledSampler', labeled=..., "
            'unlabeled=...), with numbers that add up to batch_size.'
        )
    return labeled


def _slice_images(levels: Levels, start: Optional[int], stop: Optional[int]) -> Levels:
    return tuple(level[start:stop] for level in levels)


def _use_features(model: Any, features: Optional[Levels]) -> ContextManager[None]:
    """Return a context in which a segmentor's backbone returns ``features``, unless they are None."""
    return nullcontext() if features is None else given_features(model.backbone, features)


def _compute_logits(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return a segmentor's logits at the size of the images, float (images, C, H, W)."""
    size = images.shape[2:]
    metas = [
        dict(img_shape=size, ori_shape=size, pad_shape=size, padding_size=[0] * 4)
        for _ in range(len(images))
    ]
    logits = model.encode_decode(images, metas)
    # A head with one output channel predicts class 1 against class 0.
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    return logits


def _halve(value: Any) -> Any:
    return [item / 2 for item in value] if isinstance(value, (list, tuple)) else value / 2


def _count_pixels(
    classes: torch.Tensor, confident: torch.Tensor, hidden: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """Return the rows of :attr:`FixMatchStep.seen`, float (4, C)."""
    inside = hidden != OUTSIDE
    known = confident & (hidden < UNKNOWN)
    rows = torch.stack([inside, confident, known, known & (classes == hidden)])
    # A comparison instead of scatter, whose order is undefined on some devices.
    return torch.stack(
        [(rows & (classes == index)).flatten(1).sum(1) for index in range(num_classes)], 1
    ).float()
