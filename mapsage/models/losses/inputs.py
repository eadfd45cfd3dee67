"""Inputs of the losses that average over classes: argument checks, and labels as one-hot masks.

Shapes: N images, C classes, H x W pixels. A head with one output channel has two classes: it
predicts the logit of class 1, and class 0 gets the logit 0.
"""

from __future__ import annotations

from typing import List, Optional, Protocol, Sequence, Tuple

import torch


class ClassLoss(Protocol):
    """Settings of a loss that :func:`prepare_inputs` reads."""

    class_weight: Optional[List[float]]
    ignore_index: int


def check_class_weight(class_weight: Optional[Sequence[float]]) -> Optional[List[float]]:
    """Return the class weights as a list; None for equal weights.

    Raises:
        ValueError: If a weight is negative, or all are 0.
    """
    if class_weight is None:
        return None
    if min(class_weight) < 0 or max(class_weight) <= 0:
        raise ValueError(f'class_weight={class_weight}, expected numbers of 0 or more, not all 0')
    return list(class_weight)


def prepare_inputs(
    loss: ClassLoss,
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: Optional[torch.Tensor],
    ignore_index: int,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, one-hot labels, the mask of valid pixels, and class weights, in float32.

    Args:
        loss: Loss module that the inputs are for.
        logits: Float ``(N, C, H, W)``, or ``(N, 1, H, W)`` for two classes.
        labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
        weight: Pixel weights of a sampler; must be None.
        ignore_index: ``ignore_index`` of the decode head.

    Returns:
        Logits ``(N, C, H, W)``, one-hot labels ``(N, C, H, W)`` that are 0 at invalid pixels, valid
        pixels ``(N, 1, H, W)``, and class weights ``(C,)``.

    Raises:
        ValueError: If ``weight`` is not None, the values of ``ignore_index`` differ, or the numbers
            of class weights and classes differ.
    """
    name = type(loss).__name__
    if weight is not None:
        raise ValueError(f'{name} accepts no pixel weights; remove the sampler of the decode head')
    if ignore_index != loss.ignore_index:
        raise ValueError(
            f'{name} has ignore_index={loss.ignore_index} and the decode head '
            f'{ignore_index}; set them to the same value'
        )
    logits = logits.float()
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    classes = logits.shape[1]
    if len(loss.class_weight or logits[0]) != classes:
        raise ValueError(
            f'{name}: class_weight={loss.class_weight} for {classes} classes; '
            'expected one weight per class'
        )
    weights = logits.new_tensor(loss.class_weight or [1.0] * classes)
    valid = labels != loss.ignore_index
    truth = torch.nn.functional.one_hot(
        torch.where(valid, labels, torch.zeros_like(labels)).long(), classes
    )
    truth = truth.permute(0, 3, 1, 2).to(logits.dtype) * valid[:, None]
    return logits, truth, valid[:, None].to(logits.dtype), weights
