"""What losses that count classes share: checks of their arguments, and labels as masks."""
from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch


def checked_weights(class_weight: Optional[Sequence[float]]) -> Optional[List[float]]:
    """Return the weights of the classes as a list; None for equal ones.

    Raises:
        ValueError: If one is negative, or all are 0.
    """
    if class_weight is None:
        return None
    if min(class_weight) < 0 or max(class_weight) <= 0:
        raise ValueError(f'class_weight={class_weight}, expected numbers of 0 or more, not all 0')
    return list(class_weight)


def prepare(loss: Any, logits: torch.Tensor, labels: torch.Tensor, weight: Optional[torch.Tensor],
            ignore_index: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, truth, valid pixels and class weights in float32.

    Args:
        loss: Module with ``class_weight`` and ``ignore_index``.
        logits: Float ``(N, C, H, W)``; of one channel, those of class 1 against class 0.
        labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
        weight: None; weights of pixels, as from a sampler, are refused.
        ignore_index: That of the decode head.

    Returns:
        Logits ``(N, C, H, W)``, 1 where a valid pixel has the class ``(N, C, H, W)``, 1 where a
        pixel is valid ``(N, 1, H, W)``, and weights ``(C,)``.

    Raises:
        ValueError: If there is a ``weight``, the values of ``ignore_index`` differ, or there are
            not as many class weights as classes.
    """
    name = type(loss).__name__
    if weight is not None:
        raise ValueError(f'{name} takes no weights of pixels; leave the sampler of the decode '
                         'head out')
    if ignore_index != loss.ignore_index:
        raise ValueError(f'{name} has ignore_index={loss.ignore_index} and the decode head '
                         f'{ignore_index}; set them to the same')
    logits = logits.float()
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    classes = logits.shape[1]
    if len(loss.class_weight or logits[0]) != classes:
        raise ValueError(f'{name}: class_weight={loss.class_weight} for {classes} classes; '
                         'expected one for each')
    weights = logits.new_tensor(loss.class_weight or [1.] * classes)
    valid = labels != loss.ignore_index
    truth = torch.nn.functional.one_hot(
        torch.where(valid, labels, torch.zeros_like(labels)).long(), classes)
    truth = truth.permute(0, 3, 1, 2).to(logits.dtype) * valid[:, None]
    return logits, truth, valid[:, None].to(logits.dtype), weights
