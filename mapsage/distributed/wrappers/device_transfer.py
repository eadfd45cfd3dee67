"""Makes the methods of a module move tensors between devices when they are called.

A method is replaced by one that moves its arguments or its result. Forward hooks would miss
``loss`` and ``predict``, which are how MMSegmentation enters a head. `model_parallel.py` decides
which methods of which modules are replaced.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn

from mapsage.distributed.nested_tensors import MovesItself, move, tensors_in

_Call = Callable[..., object]


class TransferredFeatures(tuple, MovesItself):
    """Feature maps of a backbone; a map is moved to ``device`` when it is read.

    A head receives all maps but reads only the maps in its ``in_index``; the others are not moved.

    Attributes:
        device: Device that the maps are moved to.
    """

    device: torch.device

    @classmethod
    def on(cls, features: Iterable[object], device: torch.device) -> TransferredFeatures:
        """Return a sequence of features whose items are moved to ``device`` when they are read."""
        # tuple.__iter__ skips this class's, which would move the items to the earlier device.
        items = tuple.__iter__(features) if isinstance(features, TransferredFeatures) else features
        self = cls(items)
        self.device = device
        return self

    def __getitem__(self, index: Any) -> Any:
        return move(super().__getitem__(index), self.device)

    def __iter__(self) -> Iterator[Any]:
        return (move(item, self.device) for item in super().__iter__())


def bring_inputs(
    module: nn.Module, method: str, device: torch.device, lazily: bool = False
) -> None:
    """Make ``module.method`` move its arguments to ``device``.

    Args:
        module: Module to change; the change also applies to a deep copy of it.
        method: Name of the method.
        device: Device of the module.
        lazily: Whether to move the items of the first argument, if it is a sequence, only when
            they are read.
    """

    def enter(call: _Call, *args: Any, **kwargs: Any) -> object:
        if lazily and args and isinstance(args[0], (list, tuple)):
            args = (TransferredFeatures.on(args[0], device), *args[1:])
        return call(*move(args, device), **move(kwargs, device))

    _override(module, method, enter)


def bring_together(module: nn.Module, method: str) -> None:
    """Make ``module.method`` move its arguments to the device of the first tensor among them."""

    def enter(call: _Call, *args: Any, **kwargs: Any) -> object:
        first = next(tensors_in([args, kwargs]), None)
        return (
            call(*args, **kwargs)
            if first is None
            else call(*move(args, first.device), **move(kwargs, first.device))
        )

    _override(module, method, enter)


def bring_outputs(module: nn.Module, method: str, device: torch.device) -> None:
    """Make ``module.method`` move its result to ``device``."""

    def enter(call: _Call, *args: Any, **kwargs: Any) -> object:
        return move(call(*args, **kwargs), device)

    _override(module, method, enter)


def _override(module: nn.Module, method: str, enter: Callable[..., object]) -> None:
    """Replace a method by ``enter(method, *args, **kwargs)``."""
    function = getattr(module, method).__func__
    # If the module was split before, the original method instead of the earlier override.
    inner = vars(function).get('_mapsage_inner', function)

    @functools.wraps(inner)
    def crossing(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        return enter(functools.partial(inner, self), *args, **kwargs)

    crossing._mapsage_inner = inner  # type: ignore[attr-defined]
    # A bound method, because copy.deepcopy, which EMA uses, binds it to the copy of the module. A
    # closure over the module would still call the original module.
    setattr(module, method, MethodType(crossing, module))
