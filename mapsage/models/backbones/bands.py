"""First convolutions of pretrained RGB models for images with other bands."""
from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import nn

RGB = (0, 1, 2)
Places = Tuple[Optional[int], ...]


def parse_bands(in_channels: int, bands: Optional[Dict[str, Any]]) -> Places:
    """Return the channels that are red, green and blue; None for one that is not there.

    Args:
        in_channels: Number of bands of the image.
        bands: ``dict(rgb=...)`` with the channels counted from 0; None takes 0, 1, 2 if there are
            three channels or more, and no channel if there are fewer.

    Raises:
        ValueError: If there is no channel, or ``bands`` has another form or a channel that is not
            there.
    """
    if in_channels < 1:
        raise ValueError(f'in_channels={in_channels}, expected the number of bands, at least 1')
    if bands is None:
        return RGB if in_channels >= len(RGB) else (None, ) * len(RGB)
    if set(bands) != {'rgb'}:
        raise ValueError(f'bands={dict(bands)}, expected dict(rgb=(RED, GREEN, BLUE))')
    places = tuple(bands['rgb'])
    named = [place for place in places if place is not None]
    if len(places) != len(RGB) or len(set(named)) != len(named) \
            or not set(named) <= set(range(in_channels)):
        raise ValueError(f'bands: rgb={places}, expected three different channels of 0 to '
                         f'{in_channels - 1} (counted from 0), None for one that is not there')
    return places


def adapt_bands(weight: torch.Tensor, in_channels: int, rgb: Sequence[Optional[int]]
                ) -> torch.Tensor:
    """Return the weight of an RGB convolution for images of other bands.

    The kernels of red, green and blue go to their channels, and every other channel starts from
    their mean. All are scaled by 3 / ``in_channels``, so that an image with equal bands keeps its
    activations, as in timm's ``adapt_input_conv``.

    Args:
        weight: Weight for red, green, blue, float ``(O, 3, K, K)``.
        in_channels: Number of bands of the image, C.
        rgb: Channels of :func:`parse_bands`.

    Returns:
        Weight ``(O, C, K, K)``; ``weight`` itself for an RGB image.
    """
    if in_channels == len(RGB) and tuple(rgb) == RGB:
        return weight
    adapted = weight.mean(1, keepdim=True).repeat(1, in_channels, 1, 1)
    for color, place in enumerate(rgb):
        if place is not None:
            adapted[:, place] = weight[:, color]
    return adapted * (len(RGB) / in_channels)


def widen_checkpoints(convolution: nn.Module, in_channels: int, rgb: Places) -> None:
    """Let a convolution load weights of three channels too, by :func:`adapt_bands`.

    Those with as many channels as the convolution are loaded as they are.
    """
    convolution._register_load_state_dict_pre_hook(
        functools.partial(_widen, in_channels=in_channels, rgb=rgb))


def _widen(state: Dict[str, torch.Tensor], prefix: str, *_: Any, in_channels: int,
           rgb: Places) -> None:
    weight = state.get(f'{prefix}weight')
    if weight is not None and weight.shape[1] == len(RGB) != in_channels:
        state[f'{prefix}weight'] = adapt_bands(weight, in_channels, rgb)
