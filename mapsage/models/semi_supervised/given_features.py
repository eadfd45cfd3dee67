"""Lets a model compute with features that are there already."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Tuple

import torch
from torch import nn

from mapsage.errors import UserError

Levels = Tuple[torch.Tensor, ...]


class FeatureLevelsError(UserError, ValueError):
    """A backbone does not return what channel dropout and mixing of features need."""


@contextmanager
def given_features(backbone: nn.Module, features: Levels) -> Iterator[None]:
    """Make a backbone return ``features``, whatever its images, while the context is open."""
    held = backbone.__dict__.get('forward')

    def answer(*_: Any, **__: Any) -> Levels:
        return features

    backbone.forward = answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        if held is None:
            del backbone.__dict__['forward']
        else:
            backbone.forward = held  # type: ignore[method-assign]


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
        "(N, C, H, W), whose channels can be dropped. Use FixMatchHook with views='images' and "
        'channel_dropout=False.')
