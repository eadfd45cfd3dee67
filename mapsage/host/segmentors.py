"""What scores read from a segmentor of MMSegmentation, or from a user's with the same methods.

Segmentors are recognized by their methods and not by their class, since other packages have theirs.
Some heads of MapSage return scores that sum to 1 and no logits, and a head of two classes may
return one channel; :func:`class_logits` brings all outputs to one form.

Shapes: N images, C classes, H x W pixels.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from torch import nn

# Scores below this count as this, so that their logarithm is finite.
_LEAST = 1e-8


def is_segmentor(model: nn.Module) -> bool:
    """Return whether a model has ``encode_decode``, as MMSegmentation's segmentors do."""
    return hasattr(model, 'encode_decode')


def gives_scores(head: nn.Module) -> bool:
    """Return whether a decode head returns scores, whose sum over the classes is 1 or less."""
    return bool(getattr(head, 'gives_scores', False))


def child_module(model: nn.Module, name: str) -> Optional[nn.Module]:
    """Return a part of a model, such as its ``backbone``, or None if the model has no such part."""
    # Not read from the model's children, because a user's model may have a property for it.
    child = getattr(model, name, None)
    return child if isinstance(child, nn.Module) else None


def padded_size(model: nn.Module) -> Optional[Tuple[int, int]]:
    """Return the size to which a model's preprocessor pads all images; None without one."""
    # Only MMSegmentation's preprocessors have a size.
    return getattr(child_module(model, 'data_preprocessor'), 'size', None)


def channel_means(preprocessor: nn.Module) -> Optional[torch.Tensor]:
    """Return the means that a preprocessor subtracts from the channels; None without any."""
    # MMEngine's BaseDataPreprocessor and preprocessors without normalization have none.
    mean = getattr(preprocessor, 'mean', None)
    return mean if isinstance(mean, torch.Tensor) else None


def batch_augments(model: Any) -> Optional[List[Any]]:
    """Return the augmentations of batches that a model's preprocessor applies; None without any."""
    return getattr(model.data_preprocessor, 'batch_augments', None)


def class_logits(head: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return the output of a decode head as logits of two or more classes, (N, C, H, W).

    Args:
        head: Decode head.
        output: Output of ``encode_decode`` of its segmentor, (N, C, H, W) or (N, 1, H, W).
    """
    if gives_scores(head):
        # The softmax of these logarithms is the scores, normalized.
        output = output.clamp(min=_LEAST).log()
    if output.shape[1] == 1:
        # A single channel is the logit of the second of two classes.
        output = torch.cat([torch.zeros_like(output), output], 1)
    return output
