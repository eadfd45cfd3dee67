"""Batch normalization folded into the convolutions before it, for prediction on a CPU.

In evaluation a batch normalization multiplies and shifts each channel by constants, so the weights
of the convolution before it can do the same (as `mmcv.cnn.fuse_conv_bn` and ONNX Runtime do). The
modules of a model do not say in which order they run, so neighbors with equal channels are only
candidates. A trial window proves each of them: `choose_folds` watches the tensors that pass between
the modules, and `fold_batch_norms` replaces the modules. Rank 0 chooses for all ranks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

# Largest root mean square difference of a folded convolution's output, as a share of the output's
# standard deviation. Rounding of one layer causes up to 2e-6, and 2e-5 at single pixels of
# layers with 2,048 input channels (ResNet, HRNet, MobileNet, U-Net with trained statistics).
_TOLERANCE = 1e-5
# The same for the whole model, as a share of its largest value. Rounding adds up over 100 layers
# to 5e-4 (ResNet-101), so this bound is no proof of the order of layers. It shows models that read
# the weights of a replaced layer.
_MODEL_TOLERANCE = 1e-3


class Folding(NamedTuple):
    """Which normalizations of a model are folded. The names are the names of its modules.

    Attributes:
        folded: Normalizations that were proven to follow their convolution.
        refused: Normalizations that ran in the trial and were not proven to do so.
    """

    folded: List[str]
    refused: List[str]


class _Pair(NamedTuple):
    """A convolution and its neighbor, with their names in the module that holds them."""

    parent: nn.Module
    conv_name: str
    conv: nn.Conv2d
    norm_name: str
    norm: _BatchNorm

    def put(self, conv: nn.Module, norm: nn.Module) -> None:
        """Replace both modules."""
        self.parent._modules[self.conv_name] = conv
        self.parent._modules[self.norm_name] = norm


class _Order:
    """Watches a pair during the trial: whether every output of the convolution is normalized.

    Attributes:
        ran: Whether one of the modules was called.
        proven: Whether the normalization received nothing but unchanged outputs of the convolution,
            each once, and the folded convolution computes the same within rounding.
    """

    def __init__(self, pair: _Pair) -> None:
        self.ran, self.proven = False, _is_plain(pair)
        self._folded = _folded(pair.conv, pair.norm)
        # Input, output and the output's version, which a change in place increases.
        self._pending: Optional[Tuple[torch.Tensor, torch.Tensor, int]] = None
        conv, norm = _watched(pair.conv), _watched(pair.norm)
        conv.register_forward_hook(self._leave_conv)
        norm.register_forward_hook(self._leave_norm)
        pair.put(conv, norm)

    def close(self) -> None:
        """End the trial."""
        if not self.ran or self._pending is not None:
            self.proven = False

    def _leave_conv(
        self, conv: nn.Module, inputs: Tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        self.ran = True
        if self._pending is not None:
            self.proven = False
        self._pending = inputs[0], output, output._version

    def _leave_norm(
        self, norm: nn.Module, inputs: Tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        self.ran = True
        pending, self._pending = self._pending, None
        if pending is None or inputs[0] is not pending[1] or inputs[0]._version != pending[2]:
            self.proven = False
        elif self.proven:
            difference = (self._folded(pending[0]) - output).pow(2).mean().sqrt()
            # Not "greater", so that an output with NaN counts as different.
            self.proven = bool(difference <= _TOLERANCE * output.std(unbiased=False))


def choose_folds(model: nn.Module, compute: Callable[[], torch.Tensor]) -> Folding:
    """Return which normalizations can be folded; the model stays as it is.

    A normalization is folded if the trial shows that it receives the convolution's output itself,
    unchanged, and that no other layer or function uses this output.

    Args:
        model: Model in evaluation mode.
        compute: Function that returns the model's output for a trial window.
    """
    pairs = _pairs(model)
    if not pairs:
        return Folding([], [])
    orders: Dict[str, _Order] = {}
    try:
        for name, pair in pairs.items():
            orders[name] = _Order(pair)
        expected = compute()
        for order in orders.values():
            order.close()
        proven = [name for name, order in orders.items() if order.proven]
        for name, pair in pairs.items():
            if name in proven:
                _put_folded(pair, hide_output=True)
            else:
                pair.put(pair.conv, pair.norm)
        # Not "greater", because who else uses a hidden output receives NaN.
        if proven and not (
            (compute() - expected).abs().max() <= _MODEL_TOLERANCE * expected.abs().max()
        ):
            proven = []
    finally:
        for pair in pairs.values():
            pair.put(pair.conv, pair.norm)
    return Folding(
        proven, [name for name, order in orders.items() if order.ran and name not in proven]
    )


def fold_batch_norms(model: nn.Module, names: Collection[str]) -> None:
    """Fold normalizations into convolutions, whose weights then have their channels last.

    Args:
        model: Model in evaluation mode; its modules are replaced.
        names: Names of the normalizations, from :func:`choose_folds`.
    """
    for name, pair in _pairs(model).items():
        if name in names:
            _put_folded(pair)


def _pairs(model: nn.Module) -> Dict[str, _Pair]:
    """Return neighbors with equal channels, by the name of the normalization."""
    pairs: Dict[str, _Pair] = {}
    for prefix, parent in model.named_modules():
        children = list(parent.named_children())
        for (conv_name, conv), (norm_name, norm) in zip(children, children[1:]):
            if (
                isinstance(conv, nn.Conv2d)
                and isinstance(norm, _BatchNorm)
                and norm.running_mean is not None
                and norm.running_var is not None
                and conv.out_channels == norm.num_features
                and isinstance(conv._parameters.get('weight'), nn.Parameter)
            ):
                pairs[f'{prefix}.{norm_name}'.lstrip('.')] = _Pair(
                    parent, conv_name, conv, norm_name, norm
                )
    return pairs


def _is_plain(pair: _Pair) -> bool:
    """Return whether the modules evaluate, and nothing is attached to what is between them."""
    return not any(
        (
            pair.conv.training,
            pair.norm.training,
            'forward' in pair.conv.__dict__,
            'forward' in pair.norm.__dict__,
            pair.conv._forward_hooks,
            pair.norm._forward_hooks,
            pair.norm._forward_pre_hooks,
        )
    )


def _watched(module: nn.Module) -> nn.Module:
    """Return a copy with the same weights, whose hooks are independent of the module's.

    A copy, because another module may hold the same module elsewhere in the model.
    """
    watched = copy.copy(module)
    watched._forward_hooks = OrderedDict(module._forward_hooks)
    watched._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)
    return watched


def _put_folded(pair: _Pair, hide_output: bool = False) -> None:
    """Replace a pair by the folded convolution.

    Args:
        pair: The pair.
        hide_output: Whether only the place of the normalization sees the convolution's output, and
            everything else sees NaN.
    """
    conv, norm = _watched(_folded(pair.conv, pair.norm)), nn.Identity()
    if hide_output:
        outputs: List[torch.Tensor] = []

        def hide(conv: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            outputs.append(output)
            return torch.full_like(output, float('nan'))

        conv.register_forward_hook(hide)
        norm.register_forward_pre_hook(lambda norm, inputs: (outputs.pop(),))
    pair.put(conv, norm)


def _folded(conv: nn.Conv2d, norm: _BatchNorm) -> nn.Conv2d:
    folded = copy.copy(conv)
    assert norm.running_mean is not None and norm.running_var is not None
    with torch.no_grad():
        weight, bias = fuse_conv_bn_weights(
            conv.weight,
            conv.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
    # A convolution returns its result in the memory format of its weight.
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    folded._parameters = dict(conv._parameters, weight=weight, bias=bias)
    return folded
