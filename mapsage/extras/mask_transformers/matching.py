"""Matching of mask queries to the classes of an image.

Costs are computed on the device for all pairs, then the assignment is solved on the host. Every
class gets a query, also the absent ones, so that shapes do not depend on the labels; the loss
ignores queries of absent classes.

Shapes: L outputs (one before each masked block, and the last), N images, Q queries, C classes,
P cells of a mask.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Sequence

import numpy as np
import torch
from mmengine.logging import print_log
from scipy.optimize import linear_sum_assignment
from torch.nn import functional

from .targets import MaskTargets

# Before torch 2.4, autocast supports CUDA and the CPU only.
_AUTOCAST_ANYWHERE = hasattr(torch, 'get_autocast_dtype')


@torch.no_grad()
def match_costs(
    mask_logits: torch.Tensor,
    class_logits: torch.Tensor,
    targets: MaskTargets,
    weights: Sequence[float],
) -> torch.Tensor:
    """Return the cost of assigning each query to each class.

    The cost of a pair is its weighted loss: BCE averaged over the labeled pixels, dice, and
    -p(class).

    Args:
        mask_logits: Float32 (N, Q, P).
        class_logits: Float32 (N, Q, C + 1).
        targets: Target masks of the batch.
        weights: Weights of BCE, dice and class.

    Returns:
        Float32 (N, Q, C). The columns of absent classes have no meaning.
    """
    with _disable_autocast(mask_logits.device.type):
        # (N, P, C), zero where no pixel has a label.
        masks = targets.masks.transpose(1, 2)
        area = targets.valid.sum(2, keepdim=True)
        probability = mask_logits.sigmoid()
        # The BCE of a logit x and a target y is softplus(x) - x y. Its first term does not depend
        # on the class, so the pairs need only one matrix product.
        negative = (functional.softplus(mask_logits) * targets.valid).sum(2, keepdim=True)
        bce = (negative - mask_logits @ masks) / area.clamp(min=1e-6)
        size = (probability * targets.valid).sum(2, keepdim=True) + masks.sum(1, keepdim=True)
        dice = 1 - (2 * (probability @ masks) + 1) / (size + 1)
        classes = -class_logits.softmax(-1)[..., :-1]
    return weights[0] * bce + weights[1] * dice + weights[2] * classes


def match_hungarian(
    costs: torch.Tensor, present: torch.Tensor, names: Sequence[str] = ()
) -> torch.Tensor:
    """Assign a query to each class, with the least total cost over the present classes.

    Absent classes get the remaining queries in order, so every class has a different query. Costs
    and flags are copied to the host together, and the queries back, so there are two transfers.

    Args:
        costs: Float32 (L, N, Q, C).
        present: Whether each image contains a class, bool (N, C).
        names: Names of the images, for the warning about costs that are not finite.

    Returns:
        Indices of queries, int64 (L, N, C), on the device of ``costs``.
    """
    flags = present.to(costs.dtype)[None, :, None].expand(len(costs), -1, -1, -1)
    host = torch.cat((costs, flags), dim=2).cpu().numpy()
    table, is_present = host[:, :, :-1], host[0, :, -1] > 0
    not_finite = [
        image
        for image in range(table.shape[1])
        if not np.isfinite(table[:, image][..., is_present[image]]).all()
    ]
    if not_finite:
        images = ', '.join(
            names[image] if image < len(names) and names[image] else f'number {image} of the batch'
            for image in not_finite
        )
        print_log(
            f'The costs of matching queries to classes are not finite (NaN or infinite) for '
            f'the image(s) {images}, so their matching and loss are meaningless. Check '
            'these images and their masks, or lower the learning rate',
            logger='current',
            level=logging.WARNING,
        )
        table = np.nan_to_num(table, nan=1e30, posinf=1e30, neginf=1e30)
    queries = np.stack(
        [
            [_assign_queries(output[image], is_present[image]) for image in range(len(is_present))]
            for output in table
        ]
    )
    return torch.from_numpy(queries).to(costs.device)


def match_by_index(outputs: int, present: torch.Tensor) -> torch.Tensor:
    """Assign query c to class c in every output, int64 (L, N, C)."""
    images, classes = present.shape
    return torch.arange(classes, device=present.device).expand(outputs, images, classes)


def _assign_queries(costs: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the query of each class, (C,), for costs (Q, C) and flags (C,)."""
    classes = np.flatnonzero(present)
    queries = np.full(len(present), -1, np.int64)
    rows, columns = linear_sum_assignment(costs[:, classes])
    queries[classes[columns]] = rows
    unassigned = np.setdiff1d(np.arange(len(costs)), rows)
    queries[queries < 0] = unassigned[: len(present) - len(classes)]
    return queries


def _disable_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which matrix products stay in float32."""
    # Without a dtype, torch 1.10 warns about its default dtype for the CPU.
    if device_type == 'cpu':
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=False)
    if _AUTOCAST_ANYWHERE or device_type == 'cuda':
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
