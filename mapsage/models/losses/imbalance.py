"""Dice, Tversky, Lovász and focal loss, with means over the whole batch of all ranks.

They consist of plain operations with static shapes, so that every accelerator has them. MMSeg's own
do not serve: ``DiceLoss`` counts ignored pixels, ``FocalLoss`` needs a compiled operator,
``LovaszLoss`` and ``TverskyLoss`` average over what each rank happens to have.
"""
from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from mmengine.registry import MODELS
from torch import nn

from .inputs import checked_weights, prepare


class _ImbalanceLoss(nn.Module):
    """Common part: a weighted mean whose sum of weights is that of all ranks.

    The sum of weights follows from the labels alone, and the wrapper sums it over the ranks before
    the forward pass (see mapsage/wrappers/batch_counts.py). The gradient of several ranks, which is
    the mean of theirs, is then that of one process with the whole batch, also if some ranks have
    fewer labels.

    Args:
        class_weight: Weight of each class, ``(C,)``; None for equal ones.
        loss_weight: Factor of the loss.
        ignore_index: Label of pixels that do not count; the same as that of the decode head.
        loss_name: Name in the log; it is part of the loss if it begins with ``loss_``.

    Raises:
        ValueError: If a weight is negative, or all are 0.
    """

    def __init__(self, class_weight: Optional[Sequence[float]] = None, loss_weight: float = 1.0,
                 ignore_index: int = 255, loss_name: str = 'loss') -> None:
        super().__init__()
        self.class_weight = checked_weights(class_weight)
        self.loss_weight, self.ignore_index = loss_weight, ignore_index
        self.loss_name = loss_name

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper puts its own function here."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return the sum of weights of the labels of a rank, and 1, float64 ``(2,)``."""
        total = 0.
        for sample in data_samples:
            labels = sample.gt_sem_seg.data.reshape(-1)
            pixels = torch.bincount(labels[labels != self.ignore_index].long())
            total += self._weight_of(pixels.double())
        return torch.tensor([total, 1.], dtype=torch.float64)

    def _weight_of(self, pixels: torch.Tensor) -> float:
        """Return the sum of weights of an image with these pixels a class, ``(<= C,)``."""
        raise NotImplementedError

    def forward(self, logits: torch.Tensor, labels: torch.Tensor,
                weight: Optional[torch.Tensor] = None, ignore_index: int = 255,
                **_: Any) -> torch.Tensor:
        """Return the loss, a scalar.

        Args:
            logits: Float ``(N, C, H, W)``; of one channel, those of class 1 against class 0.
            labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
            weight: None; weights of pixels, as from a sampler, are refused.
            ignore_index: That of the decode head.

        Raises:
            ValueError: If there is a ``weight``, the values of ``ignore_index`` differ, or there
                are not as many class weights as classes.
        """
        logits, truth, valid, weights = prepare(self, logits, labels, weight, ignore_index)
        losses, count = self._sums(logits, truth, valid, weights)
        total, ranks = self.sum_over_ranks(torch.stack([count, torch.ones_like(count)]))
        # Without any label the losses are 0 too.
        return self.loss_weight * losses * ranks / torch.where(
            total > 0, total, torch.ones_like(total))

    def _sums(self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor,
              weights: torch.Tensor) -> Any:
        """Return the weighted sum of losses and the sum of weights of this rank, scalars."""
        raise NotImplementedError


class _RegionLoss(_ImbalanceLoss):
    """A loss of each class of each image; the mean is over the classes that an image holds."""

    def _weight_of(self, pixels: torch.Tensor) -> float:
        present = pixels > 0
        if self.class_weight is None:
            return float(present.sum())
        return float((present * pixels.new_tensor(self.class_weight)[:len(present)]).sum())

    def _sums(self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor,
              weights: torch.Tensor) -> Any:
        present = (truth.flatten(2).sum(2) > 0).to(logits.dtype) * weights
        values = self._of_classes(logits.softmax(1).flatten(2), truth.flatten(2),
                                  valid.flatten(2))
        return (values * present).sum(), present.sum()

    def _of_classes(self, probabilities: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor
                    ) -> torch.Tensor:
        """Return the loss of each class, ``(N, C)``, of ``(N, C, P)`` and ``valid (N, 1, P)``."""
        raise NotImplementedError


@MODELS.register_module()
class SegTverskyLoss(_RegionLoss):
    """1 - TP / (TP + alpha FP + beta FN), of the probabilities of an image's valid pixels.

    Salehi, Erdogmus, Gholipour 2017, https://arxiv.org/abs/1706.05721. The mean is over the classes
    that each image holds, weighted by ``class_weight``, and over the images of all ranks.

    Args:
        alpha: Weight of false positives, 0 or more.
        beta: Weight of false negatives, above 0; more than ``alpha`` favors recall.
        **kwargs: ``class_weight``, ``loss_weight``, ``ignore_index``, ``loss_name``.

    Raises:
        ValueError: If a weight is out of its range.
    """

    def __init__(self, alpha: float = 0.3, beta: float = 0.7, **kwargs: Any) -> None:
        kwargs.setdefault('loss_name', 'loss_tversky')
        super().__init__(**kwargs)
        if alpha < 0 or beta <= 0:
            raise ValueError(f'alpha={alpha} and beta={beta}, expected alpha of 0 or more and beta '
                             'above 0')
        self.alpha, self.beta = alpha, beta

    def _of_classes(self, probabilities: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor
                    ) -> torch.Tensor:
        hits = (probabilities * truth).sum(2)
        false = (probabilities * (valid - truth)).sum(2)
        missed = truth.sum(2) - hits
        union = hits + self.alpha * false + self.beta * missed
        # Of a class that the image does not hold, the value does not count.
        return 1 - hits / torch.where(union > 0, union, torch.ones_like(union))


@MODELS.register_module()
class SegDiceLoss(SegTverskyLoss):
    """1 - 2 TP / (2 TP + FP + FN), of the probabilities of an image's valid pixels.

    Milletari, Navab, Ahmadi 2016, https://arxiv.org/abs/1606.04797, without their squares. The mean
    is that of :class:`SegTverskyLoss`, of which this is the case alpha = beta = 0.5.

    Args:
        **kwargs: ``class_weight``, ``loss_weight``, ``ignore_index``, ``loss_name``.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('loss_name', 'loss_dice')
        super().__init__(alpha=.5, beta=.5, **kwargs)


@MODELS.register_module()
class SegLovaszLoss(_RegionLoss):
    """Lovász-Softmax: the convex extension of 1 - IoU of a class in an image.

    Berman, Triki, Blaschko 2018, https://arxiv.org/abs/1705.08790, algorithm 1. The mean is over
    the classes that each image holds, weighted by ``class_weight``, and over the images of all
    ranks.

    Args:
        **kwargs: ``class_weight``, ``loss_weight``, ``ignore_index``, ``loss_name``.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('loss_name', 'loss_lovasz')
        super().__init__(**kwargs)

    def _of_classes(self, probabilities: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor
                    ) -> torch.Tensor:
        # Ignored pixels have no error. They come last and change nothing.
        errors = (truth - probabilities).abs() * valid
        errors, order = errors.sort(dim=2, descending=True)
        truth = truth.gather(2, order)
        total = truth.sum(2, keepdim=True)
        union = total + (1 - truth).cumsum(2)
        jaccard = 1 - (total - truth.cumsum(2)) / union
        steps = torch.cat([jaccard[..., :1], jaccard[..., 1:] - jaccard[..., :-1]], 2)
        return (errors * steps).sum(2)


@MODELS.register_module()
class SegFocalLoss(_ImbalanceLoss):
    """-(1 - p)^gamma log p, with p the probability of a pixel's class among all classes.

    Lin et al. 2017, https://arxiv.org/abs/1708.02002, with softmax in place of one sigmoid a class,
    as classes exclude each other and predictions are an argmax. ``class_weight`` is their alpha.
    The mean is over the valid pixels of all ranks, weighted by ``class_weight``; with gamma 0 it is
    PyTorch's ``cross_entropy`` of the whole batch.

    Args:
        gamma: How much easy pixels lose weight, 0 or more.
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

    def _weight_of(self, pixels: torch.Tensor) -> float:
        if self.class_weight is None:
            return float(pixels.sum())
        return float((pixels * pixels.new_tensor(self.class_weight)[:len(pixels)]).sum())

    def _sums(self, logits: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor,
              weights: torch.Tensor) -> Any:
        logarithm = (logits.log_softmax(1) * truth).sum(1)
        weight = (truth * weights[:, None, None]).sum(1)
        # The gradient of a power of 0 is not finite where the exponent is below 1.
        easy = (1 - logarithm.exp()).clamp(min=1e-12)**self.gamma if self.gamma else 1.
        return -(weight * easy * logarithm).sum(), weight.sum()
