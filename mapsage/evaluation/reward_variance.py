"""How far the IoU of a tile would spread over label maps drawn from a model, without a draw."""
from __future__ import annotations

import torch


def reward_variance(probabilities: torch.Tensor, labels: torch.Tensor,
                    ignore_index: int = 255) -> torch.Tensor:
    """Return the variance of a tile's mean IoU if each pixel's label is drawn on its own.

    Var R = sum over pixels of Var_b D[y, g, b]: D is the change of R when one pixel of truth g
    goes from its most likely label y to a drawn label b. Counts that all pixels add up concentrate
    at their expectations, so that R is linear in single pixels, D is one table of C x C x C numbers
    for the whole tile, and independent pixels add up their variances. A single forward pass gives
    what a group of drawn label maps would only estimate.

    R is the mean IoU over the classes in the labels.

    Args:
        probabilities: Probabilities of the classes, ``(C, H, W)``.
        labels: Class indices or ``ignore_index``, integers ``(H, W)``.
        ignore_index: Label of pixels that do not count.

    Returns:
        Scalar of float64 on the host; 0 without a labeled pixel.
    """
    known = labels != ignore_index
    chances = probabilities.detach().cpu().double()[:, known.cpu()]  # (C, P)
    truth = labels.cpu()[known.cpu()].long()
    classes = len(chances)
    held = torch.bincount(truth, minlength=classes).double()
    if not len(truth):
        return torch.zeros((), dtype=torch.float64)
    own = chances.gather(0, truth[None])[0]
    both = torch.zeros(classes, dtype=torch.float64).index_add_(0, truth, own)
    change = _changes(both, chances.sum(1), held)
    differences = change[chances.argmax(0), truth].T  # (C, P): of each label that may be drawn
    mean = (chances * differences).sum(0)
    return (chances * (differences - mean) ** 2).sum()


def _changes(both: torch.Tensor, predicted: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return the table D[a, g, b], ``(C, C, C)``: one pixel of truth g goes from a to b."""
    classes = len(held)
    hits = torch.eye(classes, dtype=torch.float64)  # [label, truth]

    def index(both: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        union = predicted + held[:, None] - both
        return torch.where(held[:, None] > 0, both / union.clamp(min=1e-12),
                           torch.zeros_like(union))

    both, predicted = both[:, None], predicted[:, None]
    now = index(both, predicted)
    less = index((both - hits).clamp(min=0), (predicted - 1).clamp(min=0)) - now
    more = index(both + hits, predicted + 1) - now
    table = less[:, :, None] + more.T[None]  # [a, g, 1] + [1, g, b]
    same = torch.eye(classes, dtype=torch.bool)[:, None, :].expand_as(table)
    return table.masked_fill(same, 0) / (held > 0).sum()
