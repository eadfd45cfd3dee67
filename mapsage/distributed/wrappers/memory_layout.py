"""Weights with the channels last in memory, for ``env_cfg.channels_last``.

Only the strides of a weight change; shapes, values and checkpoints do not. Code that fills a weight
element by element must see the default strides, see :func:`drawn_in_order`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch
from torch import nn


def put_channels_last(module: nn.Module) -> nn.Module:
    """Store the weights of convolutions with their channels last, in place; return the module.

    All parameters with four dimensions count as weights of convolutions. A convolution returns its
    result in the memory format of its weight. Copies of the module, such as an average of its
    weights, keep the format. So does a checkpoint, and a model in another format can load it.
    """
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


@contextmanager
def drawn_in_order(module: nn.Module) -> Iterator[None]:
    """Give the parameters torch's default layout within a block that draws them at random.

    Random numbers fill the memory in its order, so the weights at the start of a run would depend
    on the layout. In addition, no backend broadcasts a tensor that is not contiguous.
    """
    strides = {
        parameter: parameter.stride()
        for parameter in module.parameters()
        if not parameter.is_contiguous()
    }
    for parameter in strides:
        parameter.data = parameter.data.contiguous()
    try:
        yield
    finally:
        for parameter, stride in strides.items():
            strided = torch.empty_strided(
                parameter.shape, stride, dtype=parameter.dtype, device=parameter.device
            )
            parameter.data = strided.copy_(parameter.data)
