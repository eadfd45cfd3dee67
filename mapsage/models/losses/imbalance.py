"""Dice and focal loss, averaged over the global batch.

They use plain operations with static shapes, which every accelerator supports. MMSeg's ``DiceLoss``
counts ignored pixels, and its ``FocalLoss`` needs a compiled operator.

Shapes: N images, C classes, H x W pixels, P = H * W.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from mmengine.registry import MODELS
from torch import nn

from .inputs import check_class_weight, prepare_inputs


class _ImbalanceLoss(nn.Module):
    """Base class: a weighted mean whose divisor is summed over all ranks.

    The divisor, the sum of weights, depends on the labels only, so the wrapper can sum it over the
    ranks before the forward pass (mapsage/distributed/wrappers/batch_counts.py). The averaged gradient of
    several ranks then equals the gradient of one process with the whole batch, even if some ranks
    have fewer labels.

    Args:
        class_weight: Weight of each class, ``(C,)``; None for equal weights.
        loss_weight: Factor of the loss.
        ignore_index: Label of ignored pixels; must equal the decode head's ``ignore_index``.
        loss_name: Name in the log; the value is added to the total loss if it begins with
            ``loss_``.

    Raises:
        ValueError: If a weight is negative, or all are 0.
    """

    def __init__(
        self,
        class_weight: Optional[Sequence[float]] = None,
        loss_weight: float = 1.0,
        ignore_index: int = 255,
        loss_name: str = 'loss',
    ) -> None:
        super().__init__()
        self.class_weight = check_class_weight(class_weight)
        self.loss_weight, self.ignore_index = loss_weight, ignore_index
        self.loss_name = loss_name

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper replaces this function."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return the sum of weights of a rank's labels, and 1 to count ranks, float64 ``(2,)``."""
        total = 0.0
        for sample in data_samples:
            labels = sample.gt_sem_seg.data.reshape(-1)
            pixels = torch.bincount(labels[labels != self.ignore_index].long())
            total += self._sum_weights(pixels.double())
        return torch.tensor([total, 1.0], dtype=torch.float64)

    def _sum_weights(self, pixels: torch.Tensor) -> float:
        """Return an image's sum of weights, from its number of pixels per class, ``(<= C,)``."""
        raise NotImplementedError

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        ignore_index: int = 255,
        **_: Any,
    ) -> torch.Tensor:
        """Return the loss, a scalar.

        Args:
            logits: Float ``(N, C, H, W)``, or ``(N, 1, H, W)`` for two classes.
            labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
            weight: Pixel weights of a sampler; must be None.
            ignore_index: ``ignore_index`` of the decode head.

        Raises:
            ValueError: If ``weight`` is not None, the values of ``ignore_index`` differ, or the
                numbers of class weights and classes differ.
        """
        logits, truth, valid, weights = prepare_inputs(self, logits, labels, weight, ignore_index)
        losses, count = self._sum_losses(logits, truth, valid, weights)
        total, ranks = self.sum_over_ranks(torch.stack([count, torch.ones_like(count)]))
        # If no rank has a label, total and losses are 0, and so is the result.
        return (
            self.loss_weight
            * losses
            * ranks
            / torch.where(total > 0, total, torch.ones_like(total))
        )

    def _sum_losses(
        self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's weighted sum of losses and its sum of weights, scalars."""
        raise NotImplementedError


@MODELS.register_module()
class SegDiceLoss(_ImbalanceLoss):
    """Dice loss: 1 - 2 TP / (2 TP + FP + FN), with probabilities in place of counts.

    Milletari, Navab, Ahmadi 2016, https://arxiv.org/abs/1606.04797, without their squares. TP, FP
    and FN are sums over the valid pixels of an image. The loss is averaged over the classes present
    in each image, weighted by ``class_weight``, and over the images of all ranks.

    Args:
        **kwargs: ``class_weight``, ``loss_weight``, ``ignore_index``, ``loss_name``.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('loss_name', 'loss_dice')
        super().__init__(**kwargs)

    def _sum_weights(self, pixels: torch.Tensor) -> float:
        present = pixels > 0
        if self.class_weight is None:
            return float(present.sum())
        return float((present * pixels.new_tensor(self.class_weight)[: len(present)]).sum())

    def _sum_losses(
        self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        # One-hot labels and softmax (N, C, P), valid pixels (N, 1, P).
        truth, valid = truth.flatten(2), valid.flatten(2)
        probabilities = logits.softmax(1).flatten(2)
        present = (truth.sum(2) > 0).to(logits.dtype) * weights
        true_positives = (probabilities * truth).sum(2)
        false_positives = (probabilities * (valid - truth)).sum(2)
        false_negatives = truth.sum(2) - true_positives
        union = true_positives + 0.5 * false_positives + 0.5 * false_negatives
        # The union is 0 for absent classes only, whose loss gets the weight 0.
        losses = 1 - true_positives / torch.where(union > 0, union, torch.ones_like(union))
        return (losses * present).sum(), present.sum()


@MODELS.register_module()
class SegFocalLoss(_ImbalanceLoss):
    """Focal loss: -(1 - p)^gamma log p, where p is the softmax probability of the true class.

    Lin et al. 2017, https://arxiv.org/abs/1708.02002, with a softmax instead of one sigmoid per
    class, because classes are exclusive and predictions are an argmax. ``class_weight`` is the
    paper's alpha. The loss is averaged over the valid pixels of all ranks, weighted by
    ``class_weight``; with gamma 0 it equals PyTorch's ``cross_entropy`` of the global batch.

    Args:
        gamma: Exponent that lowers the weight of easy pixels, at least 0.
        **kwargs: ``class_weight``, ``loss_weight``, ``ignore_index``, ``loss_name``.

    Raises:
        ValueError: If ``gamma`` is negative.
    """

    def __init__(self, gamma: float = 2.0, **kwargs: Any) -> None:
        kwargs.setdefault('loss_name', 'loss_focal')
        super().__init__(**kwargs)
        if gamma < 0:
            raise ValueError(f'gamma={gamma}, expected 0 or more')
        self.gamma = gamma

    def _sum_weights(self, pixels: torch.Tensor) -> float:
        if self.class_weight is None:
            return float(pixels.sum())
        return float((pixels * pixels.new_tensor(self.class_weight)[: len(pixels)]).sum())

    def _sum_losses(
        self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        log_probability = (logits.log_softmax(1) * truth).sum(1)
        weight = (truth * weights[:, None, None]).sum(1)
        # The gradient of 0**gamma is infinite for gamma below 1, hence the clamp.
        focus = (1 - log_probability.exp()).clamp(min=1e-12) ** self.gamma if self.gamma else 1.0
        return -(weight * focus * log_probability).sum(), weight.sum()
