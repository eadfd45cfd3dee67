"""Strong views of features: running a segmentor on them, and complementary channel dropout.

Segmentors call their backbone inside ``loss`` and ``encode_decode``. Inside ``given_features`` the
backbone returns features that were computed before, so any segmentor can be reused unchanged.
Channel dropout makes two views of them: each view keeps the channels that the other view drops.
The factors are drawn on the CPU, so a run draws the same ones on any device.

Yang et al. 2024 (UniMatch V2), https://arxiv.org/abs/2410.10777.

Shapes: N images, C channels of a level, H x W cells of its feature map.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, Sequence, Tuple

import torch
from torch import nn

from mapsage.base.errors import UserError

Levels = Tuple[torch.Tensor, ...]

# Share of the images whose two views keep all channels.
_UNTOUCHED = 0.5


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
    if (
        isinstance(features, (tuple, list))
        and features
        and all(isinstance(level, torch.Tensor) and level.dim() == 4 for level in features)
    ):
        return tuple(features)
    raise FeatureLevelsError(
        f'{type(backbone).__name__} returns {type(features).__name__}, expected a tuple of tensors '
        "(N, C, H, W) with channels to drop. Use FixMatchHook with views='images' and "
        'channel_dropout=False.'
    )


def channel_factors(images: int, channels: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Draw the channel factors of both views from torch's CPU generator, float (N, C) on the CPU.

    A channel has the factor 0 in one view and 2 in the other, with equal probability. For half of
    the images, rounded down, all factors are 1.
    """
    first = torch.randint(0, 2, (images, channels)).float() * 2
    untouched = torch.randperm(images)[: int(images * _UNTOUCHED)]
    first[untouched] = 1.0
    return first, 2 - first


def drop_channels(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> Tuple[Levels, Levels]:
    """Drop complementary channels of two views.

    Levels with the same number of channels drop the same ones.

    Args:
        first: Features of the first view, one (N, C, H, W) per level.
        second: Features of the second view, of the same shapes.
    """
    # By number of channels: the factors of the first and of the second view.
    factors: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
    for level in first:
        if level.shape[1] not in factors:
            factors[level.shape[1]] = channel_factors(len(level), level.shape[1])
    views = []
    for index, view in enumerate((first, second)):
        views.append(
            tuple(
                level
                * factors[level.shape[1]][index].to(level.device, level.dtype)[..., None, None]
                for level in view
            )
        )
    return views[0], views[1]
