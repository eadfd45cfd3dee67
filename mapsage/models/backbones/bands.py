"""Pretrained RGB stems for images with other bands.

``bands=dict(rgb=(2, 1, 0))`` in a config names the channels of the image that are red, green and
blue. The pretrained kernels go to these channels, and every other channel starts from their mean.
Weights are adapted when a three-channel checkpoint is loaded; checkpoints that already have the
model's number of bands are loaded unchanged.

Shapes: O output channels, C bands of the image, K kernel size.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import nn

RGB = (0, 1, 2)
# Channels of red, green and blue; None for a color that the image lacks.
RGBChannels = Tuple[Optional[int], ...]


def parse_bands(in_channels: int, bands: Optional[Dict[str, Any]]) -> RGBChannels:
    """Return the channels of red, green and blue; None for a color that the image lacks.

    Args:
        in_channels: Number of bands of the image.
        bands: ``dict(rgb=...)`` with channels counted from 0. By default (None) the colors are
            channels 0, 1, 2 if there are at least three channels, and missing otherwise.

    Raises:
        ValueError: If ``in_channels`` is below 1, ``bands`` has another form, or a channel is out
            of range or named twice.
    """
    if in_channels < 1:
        raise ValueError(f'in_channels={in_channels}, expected the number of bands, at least 1')
    if bands is None:
        return RGB if in_channels >= len(RGB) else (None,) * len(RGB)
    if set(bands) != {'rgb'}:
        raise ValueError(f'bands={dict(bands)}, expected dict(rgb=(RED, GREEN, BLUE))')
    channels = tuple(bands['rgb'])
    present = [channel for channel in channels if channel is not None]
    if (
        len(channels) != len(RGB)
        or len(set(present)) != len(present)
        or not set(present) <= set(range(in_channels))
    ):
        raise ValueError(
            f'bands: rgb={channels}, expected three different channels in 0 to '
            f'{in_channels - 1} (counted from 0), None for a missing color'
        )
    return channels


def adapt_bands(
    weight: torch.Tensor, in_channels: int, rgb: Sequence[Optional[int]]
) -> torch.Tensor:
    """Return the weight of an RGB convolution, adapted to images with other bands.

    The kernels of red, green and blue go to their channels, and every other channel starts from
    their mean. All kernels are scaled by 3 / ``in_channels``, so an image with equal bands keeps
    its activations, as in timm's ``adapt_input_conv``.

    Args:
        weight: Weight for red, green, blue, float ``(O, 3, K, K)``.
        in_channels: Number of bands of the image, C.
        rgb: Channels of red, green and blue, from :func:`parse_bands`.

    Returns:
        Weight ``(O, C, K, K)``; ``weight`` itself for an RGB image.
    """
    if in_channels == len(RGB) and tuple(rgb) == RGB:
        return weight
    adapted = weight.mean(1, keepdim=True).repeat(1, in_channels, 1, 1)
    for color, channel in enumerate(rgb):
        if channel is not None:
            adapted[:, channel] = weight[:, color]
    return adapted * (len(RGB) / in_channels)


def widen_checkpoints(convolution: nn.Module, in_channels: int, rgb: RGBChannels) -> None:
    """Make a convolution accept three-channel weights, adapted by :func:`adapt_bands`.

    Weights with as many channels as the convolution are loaded unchanged.
    """
    convolution._register_load_state_dict_pre_hook(
        functools.partial(_widen_stem, in_channels=in_channels, rgb=rgb)
    )


def _widen_stem(
    state: Dict[str, torch.Tensor], prefix: str, *_: Any, in_channels: int, rgb: RGBChannels
) -> None:
    weight = state.get(f'{prefix}weight')
    if weight is not None and weight.shape[1] == len(RGB) != in_channels:
        state[f'{prefix}weight'] = adapt_bands(weight, in_channels, rgb)
