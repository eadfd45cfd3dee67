"""The loss of mask queries: BCE and dice of matched masks, cross entropy of classes."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

import torch
from mmengine.registry import MODELS
from torch import nn
from torch.nn import functional

from .matching import fixed, hungarian, match_costs
from .targets import MaskTargets, mask_targets

_MATCHINGS = ('hungarian', 'fixed')
# Above so many classes, a query for each of them loses to queries that are free.
_MOST_FIXED = 20


class QueryPrediction(NamedTuple):
    """One output: mask logits, float (N, Q, h, w), and class logits, float (N, Q, C + 1)."""

    masks: torch.Tensor
    classes: torch.Tensor


@MODELS.register_module()
class MaskClassLoss(nn.Module):
    """Loss of queries that each predict a mask and a class, summed over several outputs.

    Every class that an image holds is one mask, matched to one query; all other queries are to
    predict 'no object'. Pixels without a label carry no weight, in the published code they are
    negatives of every mask; neither do images without any label. Means are over the masks and
    queries of all ranks, which follow from the labels alone (mapsage/wrappers/batch_counts.py).

    With fully labeled images, the terms are those of transformers' ``EomtDinov3Loss``, the mean
    taken over all cells of the masks in place of drawn points.

    Sources: Cheng et al. 2022, https://arxiv.org/abs/2112.01527; Kerssies et al. 2025 (EoMT),
    https://arxiv.org/abs/2503.19108.

    Args:
        matching: Way of matching: 'hungarian' by least cost; 'fixed' lets query c answer for class
            c, for as many queries as classes, at most 20.
        mask_weight: Weight of BCE, in loss and matching.
        dice_weight: Weight of dice, in loss and matching.
        class_weight: Weight of the cross entropy, in loss and matching.
        no_object_weight: Weight of queries without a class in the cross entropy.
        loss_name: Name that MMSegmentation's heads expect; the terms have names of their own.

    Raises:
        ValueError: If the matching is unknown, or a weight is negative.
    """

    def __init__(self, matching: str = 'hungarian', mask_weight: float = 5.0,
                 dice_weight: float = 5.0, class_weight: float = 2.0,
                 no_object_weight: float = 0.1, loss_name: str = 'loss_mask') -> None:
        super().__init__()
        if matching not in _MATCHINGS:
            raise ValueError(f'matching={matching!r}, expected one of {_MATCHINGS}')
        if min(mask_weight, dice_weight, class_weight, no_object_weight) < 0:
            raise ValueError(f'mask_weight={mask_weight}, dice_weight={dice_weight}, class_weight='
                             f'{class_weight}, no_object_weight={no_object_weight}: expected 0 or '
                             'more')
        self.matching, self.loss_name = matching, loss_name
        self.weights = (mask_weight, dice_weight, class_weight)
        self.no_object_weight = no_object_weight
        self.num_classes = self.num_queries = 0
        self.ignore_index = 255

    def bind(self, num_classes: int, num_queries: int, ignore_index: int = 255) -> None:
        """Set the numbers of the head, and the label of pixels that do not count.

        Raises:
            ValueError: If there are fewer than two classes, fewer queries than classes, or fixed
                matching has other numbers than it can.
        """
        if num_classes < 2:
            raise ValueError(f'num_classes={num_classes}: the scores of mask queries are compared '
                             'between classes. Set num_classes=2, and let 0 be everything else')
        if num_queries < num_classes:
            raise ValueError(f'num_queries={num_queries} for num_classes={num_classes}: an image '
                             'may hold all classes, and each needs a query. Set num_queries to at '
                             f'least {num_classes}')
        if self.matching == 'fixed' and (num_queries != num_classes or num_classes > _MOST_FIXED):
            raise ValueError(f"matching='fixed' with num_queries={num_queries}, num_classes="
                             f'{num_classes}: expected as many queries as classes, at most '
                             f"{_MOST_FIXED}. Set num_queries={num_classes}, or "
                             "matching='hungarian'")
        self.num_classes, self.num_queries = num_classes, num_queries
        self.ignore_index = ignore_index

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper puts its own function here."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return the number of masks of a rank, of images with a label, and 1, float64 (3,)."""
        held = [int(((labels >= 0) & (labels < self.num_classes)
                     & (labels != self.ignore_index)).sum()) for labels in
                (torch.unique(sample.gt_sem_seg.data) for sample in data_samples)]
        return torch.tensor([sum(held), sum(count > 0 for count in held), 1.], dtype=torch.float64)

    def forward(self, predictions: Sequence[QueryPrediction], labels: torch.Tensor,
                names: Sequence[str] = ()) -> Dict[str, torch.Tensor]:
        """Return the three terms, scalars, summed over the outputs.

        Args:
            predictions: Outputs, the last of which is the model's.
            labels: Class indices, integers (N, H, W); H and W are multiples of the masks' sides.
            names: Names of the images, for warnings.

        Raises:
            ValueError: If labels and masks do not fit each other.
        """
        rows, columns = predictions[0].masks.shape[-2:]
        targets = mask_targets(labels, self.num_classes, (rows, columns))
        outputs = [(each.masks.flatten(2).float(), each.classes.float()) for each in predictions]
        queries = self._match(outputs, targets, names)
        labeled = targets.present.any(1)
        count = torch.stack([targets.present.sum(), labeled.sum(), labeled.new_ones(()).long()])
        masks, images, ranks = self.sum_over_ranks(count.float())
        matched = ranks / masks.clamp(min=1)
        judged = masks + self.no_object_weight * (images * self.num_queries - masks)
        terms: List[List[torch.Tensor]] = [
            [*_mask_terms(mask_logits, query, targets),
             self._class_term(class_logits, query, targets.present)]
            for (mask_logits, class_logits), query in zip(outputs, queries)]
        bce, dice, classes = (sum(each) for each in zip(*terms))
        # Without any label the sums are 0 too.
        return {'loss_mask': self.weights[0] * bce * matched,
                'loss_dice': self.weights[1] * dice * matched,
                'loss_cls': self.weights[2] * classes * ranks / judged.clamp(min=1e-6)}

    def _match(self, outputs: Sequence[Any], targets: MaskTargets,
               names: Sequence[str]) -> torch.Tensor:
        """Return the query of each class, int64 (outputs, N, C)."""
        if self.matching == 'fixed':
            return fixed(len(outputs), targets.present)
        costs = torch.stack([match_costs(masks.detach(), classes.detach(), targets, self.weights)
                             for masks, classes in outputs])
        return hungarian(costs, targets.present, names)

    def _class_term(self, logits: torch.Tensor, queries: torch.Tensor,
                    present: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of cross entropies of (N, Q, C + 1)."""
        # By comparison instead of scatter, whose order would not be certain on every device.
        numbers = torch.arange(self.num_queries, device=logits.device)
        answers = (queries[:, None] == numbers[None, :, None]) & present[:, None]  # (N, Q, C)
        classes = torch.arange(self.num_classes, device=logits.device)
        target = torch.where(answers.any(2), (answers * classes).sum(2),
                             torch.full_like(numbers, self.num_classes))
        weights = torch.where(answers.any(2), logits.new_ones(()),
                              logits.new_tensor(self.no_object_weight))
        weights = weights * present.any(1, keepdim=True)
        entropy = functional.cross_entropy(logits.transpose(1, 2), target, reduction='none')
        return (entropy * weights).sum()


def _mask_terms(logits: torch.Tensor, queries: torch.Tensor, targets: MaskTargets
                ) -> List[torch.Tensor]:
    """Return the sums over matched masks of BCE and of dice, of logits (N, Q, P)."""
    chosen = logits.gather(1, queries[..., None].expand(-1, -1, logits.shape[2]))  # (N, C, P)
    area = targets.valid.sum(2)
    bce = (functional.softplus(chosen) * targets.valid - chosen * targets.masks).sum(2) \
        / area.clamp(min=1e-6)
    probability = chosen.sigmoid()
    hits = (probability * targets.masks).sum(2)
    size = (probability * targets.valid).sum(2) + targets.masks.sum(2)
    dice = 1 - (2 * hits + 1) / (size + 1)
    present = targets.present.to(logits.dtype)
    return [(bce * present).sum(), (dice * present).sum()]
