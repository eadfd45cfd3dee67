"""Runs a segmentor on features that were computed before.

Segmentors call their backbone inside ``loss`` and ``encode_decode``. While the context manager is
open, the backbone returns the given features instead, so any segmentor can be reused unchanged.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Tuple

import torch
from torch import nn

from mapsage.errors import UserError

Levels = Tuple[torch.Tensor, ...]


class FeatureLevelsError(UserError, ValueError):
    """A backbone's output is not the feature maps that channel dropout and mixing need."""


@contextmanager
def given_features(backbone: nn.Module, features: Levels) -> Iterator[None]:
    """Make a backbone return ``features`` for any input, while the context is open."""
    # An attribute of the instance, such as a compiled or checkpointed forward.
    instance_forward = backbone.__dict__.get('forward')

    def return_features(*_: Any, **__: Any) -> Levels:
        return features

    backbone.forward = return_features  # type: ignore[method-assign]
    try:
        yield
    finally:
        if instance_forward is None:
            del backbone.__dict__['forward']
        else:
            backbone.forward = instance_forward  # type: ignore[method-assign]


def as_levels(features: Any, backbone: nn.Module) -> Levels:
    """Return the output of a backbone as a tuple of levels.

    Raises:
        FeatureLevelsError: If it is not a tuple or list of tensors (N, C, H, W).
    """
    if isinstance(features, (tuple, list)) and features and all(
            isinstance(level, torch.Tensor) and level.dim() == 4 for level in features):
        return tuple(features)
    raise FeatureLevelsError(
        f'{type(backbone).__name__} returns {type(features).__name__}, expected a tuple of tensors '
        "(N, C, H, W) with channels to drop. Use FixMatchHook with views='images' and "
        'channel_dropout=False.')
