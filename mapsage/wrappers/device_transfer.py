"""Moves of tensors from one device to another when a module is entered."""
from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Callable, Iterator

import torch
from torch import nn

from mapsage.distributed.nested_tensors import move, tensors_in


class TransferredFeatures(tuple):
    """Feature maps of a backbone, each of which is moved to ``device`` when it is read.

    A head receives all maps and reads those of its ``in_index``; the others are not moved.
    """

    device: torch.device
    moves_itself = True

    @classmethod
    def on(cls, features: Any, device: torch.device) -> TransferredFeatures:
        """Return a sequence of features whose items are moved to ``device`` when they are read."""
        again = isinstance(features, TransferredFeatures)
        self = cls(tuple.__iter__(features) if again else features)
        self.device = device
        return self

    def __getitem__(self, index: Any) -> Any:
        return move(super().__getitem__(index), self.device)

    def __iter__(self) -> Iterator[Any]:
        return (move(item, self.device) for item in super().__iter__())


def bring_inputs(module: nn.Module, method: str, device: torch.device,
                 lazily: bool = False) -> None:
    """Make ``module.method`` move its arguments to ``device``.

    Args:
        module: Module to change; the change also applies to a deep copy of it.
        method: Name of the method. A forward hook would not be enough, because heads are entered
            by ``loss`` and ``predict``, not only by ``forward``.
        device: Device of the module.
        lazily: Whether to move the items of the first argument, if it is a sequence, only when
            they are read.
    """
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if lazily and args and isinstance(args[0], (list, tuple)):
            args = (TransferredFeatures.on(args[0], device), *args[1:])
        return call(*move(args, device), **move(kwargs, device))

    _override(module, method, enter)


def bring_together(module: nn.Module, method: str) -> None:
    """Make ``module.method`` move its arguments to the device of the first tensor among them."""
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = next(tensors_in([args, kwargs]), None)
        return call(*args, **kwargs) if first is None else \
            call(*move(args, first.device), **move(kwargs, first.device))

    _override(module, method, enter)


def bring_outputs(module: nn.Module, method: str, device: torch.device) -> None:
    """Make ``module.method`` move its result to ``device``."""
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return move(call(*args, **kwargs), device)

    _override(module, method, enter)


def _override(module: nn.Module, method: str, enter: Callable[..., Any]) -> None:
    function = getattr(module, method).__func__
    inner = getattr(function, '_mapsage_inner', function)  # if a module is split again

    @functools.wraps(inner)
    def crossing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return enter(functools.partial(inner, self), *args, **kwargs)

    crossing._mapsage_inner = inner  # type: ignore[attr-defined]
    # copy.deepcopy, which EMA uses, binds a method to the copy; it could not rebind a closure.
    setattr(module, method, MethodType(crossing, module))
