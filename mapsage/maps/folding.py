"""Batch normalization folded into the convolutions before it, for prediction on a CPU.

In evaluation a batch normalization multiplies and shifts each channel by constants, so the weights
of the convolution before it can do the same (as `mmcv.cnn.fuse_conv_bn` and ONNX Runtime do). The
modules of a model do not say in which order they run, so the pairs are a guess: neighbors with
equal channels. A trial window decides whether the guess is right.
"""
from __future__ import annotations

import copy
from typing import Callable, Iterator, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

# Largest difference of the model's output, as a share of its largest value. Rounding causes 1e-6.
_TOLERANCE = 1e-3


class _Pair(NamedTuple):
    """A convolution and its neighbor, with their names in the module that holds them."""

    parent: nn.Module
    conv_name: str
    conv: nn.Conv2d
    norm_name: str
    norm: _BatchNorm


def fold_batch_norms(model: nn.Module, compute: Callable[[], torch.Tensor]) -> bool:
    """Fold batch normalizations into convolutions, whose weights then have their channels last.

    The output differs by rounding. The model stays as it was if it has no such pair, or if its
    output would differ by more than that: if a layer is between the two, for example.

    Args:
        model: Model in evaluation mode; its modules are replaced.
        compute: Function that returns the model's output for a trial window.

    Returns:
        Whether the model was changed.
    """
    pairs = list(_pairs(model))
    if not pairs:
        return False
    expected = compute()
    for pair in pairs:
        pair.parent._modules[pair.conv_name] = _folded(pair.conv, pair.norm)
        pair.parent._modules[pair.norm_name] = nn.Identity()
    # Not "greater", so that an output with NaN counts as different.
    if not (compute() - expected).abs().max() <= _TOLERANCE * expected.abs().max():
        for pair in pairs:
            pair.parent._modules[pair.conv_name] = pair.conv
            pair.parent._modules[pair.norm_name] = pair.norm
        return False
    return True


def _pairs(model: nn.Module) -> Iterator[_Pair]:
    for parent in model.modules():
        children = list(parent.named_children())
        for (conv_name, conv), (norm_name, norm) in zip(children, children[1:]):
            if (isinstance(conv, nn.Conv2d) and isinstance(norm, _BatchNorm)
                    and norm.running_mean is not None and norm.running_var is not None
                    and conv.out_channels == norm.num_features
                    and isinstance(conv._parameters.get('weight'), nn.Parameter)):
                yield _Pair(parent, conv_name, conv, norm_name, norm)


def _folded(conv: nn.Conv2d, norm: _BatchNorm) -> nn.Conv2d:
    # A copy, because another module may hold the same convolution without a normalization.
    folded = copy.copy(conv)
    assert norm.running_mean is not None and norm.running_var is not None
    with torch.no_grad():
        weight, bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight,
            norm.bias)
    # A convolution returns its result in the memory format of its weight.
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    folded._parameters = dict(conv._parameters, weight=weight, bias=bias)
    return folded
