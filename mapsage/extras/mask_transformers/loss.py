"""The loss of mask queries: BCE and dice of matched masks, and cross-entropy of classes.

It differs from the published loss in two ways: pixels without a label are ignored instead of being
negatives, and every cell of the masks is used instead of sampled points. Which query is compared
with which class is decided in ``matching.py``.

Shapes: L outputs (one before each masked block, and the last), N images, Q queries, C classes,
h x w or P cells of a mask.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from mmengine.registry import MODELS
from torch import nn
from torch.nn import functional

from .matching import match_by_index, match_costs, match_hungarian
from .targets import MaskTargets, build_mask_targets

_MATCHINGS = ('hungarian', 'fixed')
# With more classes than this, fixed queries score lower than freely matched ones.
_MAX_FIXED_CLASSES = 20


class QueryPrediction(NamedTuple):
    """Mask logits, float (N, Q, h, w), and class logits with 'no object' last, (N, Q, C + 1)."""

    masks: torch.Tensor
    classes: torch.Tensor


@MODELS.register_module()
class MaskClassLoss(nn.Module):
    """Loss of queries that each predict a mask and a class, summed over several outputs.

    Every class in an image is one mask, matched to one query; all other queries should predict 'no
    object'. Pixels and images without a label are ignored; in the published code, such pixels are
    negatives of every mask. The terms are averaged over the masks and queries of all ranks, whose
    numbers depend on the labels only (mapsage/distributed/wrappers/batch_counts.py).

    For fully labeled images, the terms equal those in transformers' ``EomtDinov3Loss``, except that
    they cover all cells of the masks instead of sampled points.

    Sources: Cheng et al. 2022, https://arxiv.org/abs/2112.01527; Kerssies et al. 2025 (EoMT),
    https://arxiv.org/abs/2503.19108.

    Args:
        matching: Matching of queries to classes: 'hungarian' minimizes the cost; 'fixed' assigns
            query c to class c and needs as many queries as classes, at most 20.
        mask_weight: Weight of BCE, in loss and matching.
        dice_weight: Weight of dice, in loss and matching.
        class_weight: Weight of the cross-entropy, in loss and matching.
        no_object_weight: Weight of queries without a class in the cross-entropy.
        loss_name: Name that MMSegmentation's heads expect; the log has ``loss_mask``, ``loss_dice``
            and ``loss_cls``.

    Raises:
        ValueError: If the matching is unknown, or a weight is negative.
    """

    def __init__(
        self,
        matching: str = 'hungarian',
        mask_weight: float = 5.0,
        dice_weight: float = 5.0,
        class_weight: float = 2.0,
        no_object_weight: float = 0.1,
        loss_name: str = 'loss_mask',
    ) -> None:
        super().__init__()
        if matching not in _MATCHINGS:
            raise ValueError(f'matching={matching!r}, expected one of {_MATCHINGS}')
        if min(mask_weight, dice_weight, class_weight, no_object_weight) < 0:
            raise ValueError(
                f'mask_weight={mask_weight}, dice_weight={dice_weight}, class_weight='
                f'{class_weight}, no_object_weight={no_object_weight}: expected 0 or '
                'more'
            )
        self.matching, self.loss_name = matching, loss_name
        self.weights = (mask_weight, dice_weight, class_weight)
        self.no_object_weight = no_object_weight
        self.num_classes = self.num_queries = 0
        self.ignore_index = 255

    def bind(self, num_classes: int, num_queries: int, ignore_index: int = 255) -> None:
        """Set the head's numbers of classes and queries, and its ``ignore_index``.

        Raises:
            ValueError: If there are fewer than two classes or fewer queries than classes, or if the
                numbers do not suit fixed matching.
        """
        if num_classes < 2:
            raise ValueError(
                f'num_classes={num_classes}: the scores of mask queries are compared '
                'between classes. Set num_classes=2, with 0 for everything else'
            )
        if num_queries < num_classes:
            raise ValueError(
                f'num_queries={num_queries} for num_classes={num_classes}: an image '
                'may contain all classes, and every class needs a query. Set '
                f'num_queries to at least {num_classes}'
            )
        if self.matching == 'fixed' and (
            num_queries != num_classes or num_classes > _MAX_FIXED_CLASSES
        ):
            raise ValueError(
                f"matching='fixed' with num_queries={num_queries}, num_classes="
                f'{num_classes}: expected as many queries as classes, at most '
                f'{_MAX_FIXED_CLASSES}. Set num_queries={num_classes}, or '
                "matching='hungarian'"
            )
        self.num_classes, self.num_queries = num_classes, num_queries
        self.ignore_index = ignore_index

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper replaces this function."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return a rank's numbers of masks and of labeled images, and 1, float64 (3,)."""
        masks = [
            int(((labels >= 0) & (labels < self.num_classes) & (labels != self.ignore_index)).sum())
            for labels in (torch.unique(sample.gt_sem_seg.data) for sample in data_samples)
        ]
        labeled_images = sum(count > 0 for count in masks)
        return torch.tensor([sum(masks), labeled_images, 1.0], dtype=torch.float64)

    def forward(
        self,
        predictions: Sequence[QueryPrediction],
        labels: torch.Tensor,
        names: Sequence[str] = (),
    ) -> Dict[str, torch.Tensor]:
        """Return the three terms, scalars, summed over the outputs.

        Args:
            predictions: Outputs, as from :meth:`QueryHead.decode`; the last one is the model's.
            labels: Class indices, integers (N, H, W); H and W are multiples of the masks' sides.
            names: Names of the images, for warnings.

        Raises:
            ValueError: If the sizes of labels and masks do not fit each other.
        """
        rows, columns = predictions[0].masks.shape[-2:]
        targets = build_mask_targets(labels, self.num_classes, (rows, columns))
        outputs = [
            (prediction.masks.flatten(2).float(), prediction.classes.float())
            for prediction in predictions
        ]
        queries = self._match(outputs, targets, names)
        labeled = targets.present.any(1)
        count = torch.stack([targets.present.sum(), labeled.sum(), labeled.new_ones(()).long()])
        masks, images, ranks = self.sum_over_ranks(count.float())
        # DDP averages the ranks' gradients, so the factor ``ranks`` turns local sums divided by a
        # global count into the global mean.
        mask_factor = ranks / masks.clamp(min=1)
        query_weights = masks + self.no_object_weight * (images * self.num_queries - masks)
        terms: List[List[torch.Tensor]] = [
            [
                *_mask_terms(mask_logits, query, targets),
                self._class_term(class_logits, query, targets.present),
            ]
            for (mask_logits, class_logits), query in zip(outputs, queries)
        ]
        bce, dice, classes = (sum(term) for term in zip(*terms))
        # If no rank has a label, the sums are 0, and so are the losses.
        return {
            'loss_mask': self.weights[0] * bce * mask_factor,
            'loss_dice': self.weights[1] * dice * mask_factor,
            'loss_cls': self.weights[2] * classes * ranks / query_weights.clamp(min=1e-6),
        }

    def _match(
        self,
        outputs: Sequence[Tuple[torch.Tensor, torch.Tensor]],
        targets: MaskTargets,
        names: Sequence[str],
    ) -> torch.Tensor:
        """Return the query of each class, int64 (L, N, C)."""
        if self.matching == 'fixed':
            return match_by_index(len(outputs), targets.present)
        costs = torch.stack(
            [
                match_costs(masks.detach(), classes.detach(), targets, self.weights)
                for masks, classes in outputs
            ]
        )
        return match_hungarian(costs, targets.present, names)

    def _class_term(
        self, logits: torch.Tensor, queries: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of cross-entropies, a scalar.

        Args:
            logits: Class logits, (N, Q, C + 1).
            queries: Query of each class, int64 (N, C).
            present: Whether an image contains a class, bool (N, C).
        """
        # (N, Q, C): whether a query is matched to a class. A comparison instead of scatter, whose
        # order is undefined on some devices.
        query_indices = torch.arange(self.num_queries, device=logits.device)
        matched = (queries[:, None] == query_indices[None, :, None]) & present[:, None]
        classes = torch.arange(self.num_classes, device=logits.device)
        target = torch.where(
            matched.any(2),
            (matched * classes).sum(2),
            torch.full_like(query_indices, self.num_classes),
        )
        weights = torch.where(
            matched.any(2), logits.new_ones(()), logits.new_tensor(self.no_object_weight)
        )
        weights = weights * present.any(1, keepdim=True)
        entropy = functional.cross_entropy(logits.transpose(1, 2), target, reduction='none')
        return (entropy * weights).sum()


def _mask_terms(
    logits: torch.Tensor, queries: torch.Tensor, targets: MaskTargets
) -> List[torch.Tensor]:
    """Return BCE and dice, summed over the matched masks.

    Args:
        logits: Mask logits, (N, Q, P).
        queries: Query of each class, int64 (N, C).
        targets: Target masks of the batch.
    """
    # (N, C, P): the mask logits of each class's query.
    chosen = logits.gather(1, queries[..., None].expand(-1, -1, logits.shape[2]))
    area = targets.valid.sum(2)
    bce = (functional.softplus(chosen) * targets.valid - chosen * targets.masks).sum(
        2
    ) / area.clamp(min=1e-6)
    probability = chosen.sigmoid()
    hits = (probability * targets.masks).sum(2)
    size = (probability * targets.valid).sum(2) + targets.masks.sum(2)
    dice = 1 - (2 * hits + 1) / (size + 1)
    present = targets.present.to(logits.dtype)
    return [(bce * present).sum(), (dice * present).sum()]
