"""Which query answers for which class of an image."""
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

# In torch before 2.4 autocast knows CUDA and the CPU only.
_AUTOCAST_ANYWHERE = hasattr(torch, 'get_autocast_dtype')


@torch.no_grad()
def match_costs(mask_logits: torch.Tensor, class_logits: torch.Tensor, targets: MaskTargets,
                weights: Sequence[float]) -> torch.Tensor:
    """Return what it costs to let each query answer for each class.

    The costs of a pair are those of its losses: BCE as a mean over the labeled pixels, dice, and
    -p(class).

    Args:
        mask_logits: Float32 (N, Q, P).
        class_logits: Float32 (N, Q, C + 1).
        targets: Masks of the batch.
        weights: Weights of BCE, dice and class.

    Returns:
        Float32 (N, Q, C). Columns of absent classes mean nothing.
    """
    with _without_autocast(mask_logits.device.type):
        masks = targets.masks.transpose(1, 2)  # (N, P, C), zero where nothing is labeled
        area = targets.valid.sum(2, keepdim=True)  # (N, 1, 1)
        probability = mask_logits.sigmoid()
        # softplus(x) - x y is the BCE of a logit x and a target y.
        negative = (functional.softplus(mask_logits) * targets.valid).sum(2, keepdim=True)
        bce = (negative - mask_logits @ masks) / area.clamp(min=1e-6)
        size = (probability * targets.valid).sum(2, keepdim=True) + masks.sum(1, keepdim=True)
        dice = 1 - (2 * (probability @ masks) + 1) / (size + 1)
        classes = -class_logits.softmax(-1)[..., :-1]
    return weights[0] * bce + weights[1] * dice + weights[2] * classes


def hungarian(costs: torch.Tensor, present: torch.Tensor,
              names: Sequence[str] = ()) -> torch.Tensor:
    """Return the query of each class so that the sum of costs over the present ones is least.

    Costs and flags come to the host in one copy, and the queries go back in one. Absent classes get
    the queries that are left, in order, so that every class has one of its own.

    Args:
        costs: Float32 (L, N, Q, C) of L outputs.
        present: Classes that each image holds, bool (N, C).
        names: Names of the images, for the warning if a cost is not a number.

    Returns:
        Indices of queries, int64 (L, N, C), on the device of ``costs``.
    """
    flags = present.to(costs.dtype)[None, :, None].expand(len(costs), -1, -1, -1)
    host = torch.cat((costs, flags), dim=2).cpu().numpy()
    table, held = host[:, :, :-1], host[0, :, -1] > 0
    bad = [image for image in range(table.shape[1])
           if not np.isfinite(table[:, image][..., held[image]]).all()]
    if bad:
        listed = ', '.join(names[image] if image < len(names) and names[image]
                           else f'number {image} of the batch' for image in bad)
        print_log(f'The costs of matching queries to classes are not finite (NaN or infinite) for '
                  f'the image(s) {listed}, so that their matching and loss mean nothing. Look at '
                  'these images and their masks, or lower the learning rate', logger='current',
                  level=logging.WARNING)
        table = np.nan_to_num(table, nan=1e30, posinf=1e30, neginf=1e30)
    queries = np.stack([[_assign(output[image], held[image]) for image in range(len(held))]
                        for output in table])
    return torch.from_numpy(queries).to(costs.device)


def fixed(count: int, present: torch.Tensor) -> torch.Tensor:
    """Return the matching of query c with class c for ``count`` outputs, int64 (count, N, C)."""
    images, classes = present.shape
    return torch.arange(classes, device=present.device).expand(count, images, classes)


def _assign(costs: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return a query for each class, (C,), of costs (Q, C)."""
    classes = np.flatnonzero(held)
    result = np.full(len(held), -1, np.int64)
    rows, columns = linear_sum_assignment(costs[:, classes])
    result[classes[columns]] = rows
    left = np.setdiff1d(np.arange(len(costs)), rows)
    result[result < 0] = left[:len(held) - len(classes)]
    return result


def _without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which matrix products keep float32."""
    if device_type == 'cpu':  # torch 1.10 warns of its own default dtype
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=False)
    if _AUTOCAST_ANYWHERE or device_type == 'cuda':
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
