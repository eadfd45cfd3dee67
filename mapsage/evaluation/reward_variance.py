"""The variance of a tile's IoU over label maps sampled from a model, computed without sampling.

Dynamic sampling uses it as a score: a tile without variance gives group rewards nothing to learn
from (`mapsage/extras/labels/rewards/`).

Shapes:
    probabilities  (C, P)     of the P labeled pixels
    truth          (P,)       class indices
    changes        (C, C, C)  change of the reward if one pixel of truth g goes from label a to b,
                              as [a, g, b]
"""

from __future__ import annotations

import torch


def reward_variance(
    probabilities: torch.Tensor, labels: torch.Tensor, ignore_index: int = 255
) -> torch.Tensor:
    """Return the variance of a tile's mean IoU if the pixels' labels are sampled independently.

    Var R = sum over pixels of Var_b D[y, g, b], where R is the mean IoU over the classes in the
    labels, and D is the change of R when one pixel of truth g goes from its most likely label y to
    a sampled label b. Sums over all pixels stay close to their expectations, so R is linear in a
    single pixel, one table D of C x C x C numbers holds for the whole tile, and the variances of
    independent pixels add up. The result needs a single forward pass; a group of sampled label maps
    would only estimate it.

    Args:
        probabilities: Probabilities of the classes, ``(C, H, W)``.
        labels: Class indices or ``ignore_index``, integers ``(H, W)``.
        ignore_index: Label of pixels that do not count.

    Returns:
        Scalar of float64 on the host; 0 without a labeled pixel.
    """
    labeled = labels != ignore_index
    probabilities = probabilities.detach().cpu().double()[:, labeled.cpu()]
    truth = labels.cpu()[labeled.cpu()].long()
    classes = len(probabilities)
    true_pixels = torch.bincount(truth, minlength=classes).double()
    if not len(truth):
        return torch.zeros((), dtype=torch.float64)
    # Expected intersection and predicted pixels by class.
    of_truth = probabilities.gather(0, truth[None])[0]
    intersection = torch.zeros(classes, dtype=torch.float64).index_add_(0, truth, of_truth)
    changes = _changes(intersection, probabilities.sum(1), true_pixels)
    # (C, P): change of the reward for every label that may be sampled.
    differences = changes[probabilities.argmax(0), truth].T
    mean = (probabilities * differences).sum(0)
    return (probabilities * (differences - mean) ** 2).sum()


def _changes(
    intersection: torch.Tensor, predicted: torch.Tensor, true_pixels: torch.Tensor
) -> torch.Tensor:
    """Return the table D[a, g, b], ``(C, C, C)``: one pixel of truth g goes from label a to b.

    Args:
        intersection, predicted, true_pixels: Expected pixels by class, ``(C,)``.
    """
    classes = len(true_pixels)
    # [label, truth]: a pixel is in the intersection if its label is its truth.
    hits = torch.eye(classes, dtype=torch.float64)

    def iou(intersection: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        union = predicted + true_pixels[:, None] - intersection
        return torch.where(
            true_pixels[:, None] > 0, intersection / union.clamp(min=1e-12), torch.zeros_like(union)
        )

    intersection, predicted = intersection[:, None], predicted[:, None]
    now = iou(intersection, predicted)
    removed = iou((intersection - hits).clamp(min=0), (predicted - 1).clamp(min=0)) - now
    added = iou(intersection + hits, predicted + 1) - now
    # [a, g, 1] + [1, g, b]
    table = removed[:, :, None] + added.T[None]
    same = torch.eye(classes, dtype=torch.bool)[:, None, :].expand_as(table)
    return table.masked_fill(same, 0) / (true_pixels > 0).sum()
