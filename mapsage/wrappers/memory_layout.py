"""Weights with the channels last in memory, which ``env_cfg.channels_last`` asks for."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch
from torch import nn


def put_channels_last(module: nn.Module) -> nn.Module:
    """Store the weights of convolutions with their channels last, in place; return the module.

    These are all parameters of four dimensions. Their shapes and values stay, and a convolution
    gives out its result in the order of its weight. Copies of the module, such as an average of its
    weights, keep the order, and so does a checkpoint, from which any other model loads the values.
    """
    for each in module.parameters():
        if each.dim() == 4:
            each.data = each.data.contiguous(memory_format=torch.channels_last)
    return module


@contextmanager
def drawn_in_order(module: nn.Module) -> Iterator[None]:
    """Lay the parameters out as torch does by default, for a block that draws them at random.

    Random numbers fill the memory in its order: the weights at the start of a run would depend on
    the layout. Besides, no backend broadcasts a tensor of another layout.
    """
    strides = {each: each.stride() for each in module.parameters() if not each.is_contiguous()}
    for each in strides:
        each.data = each.data.contiguous()
    try:
        yield
    finally:
        for each, stride in strides.items():
            laid_out = torch.empty_strided(each.shape, stride, dtype=each.dtype,
                                           device=each.device)
            each.data = laid_out.copy_(each.data)
