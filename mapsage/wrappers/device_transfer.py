"""Move what crosses from one device to another, when a module is entered."""
from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Callable, Iterator

import torch
from torch import nn

from mapsage.distributed.nested_tensors import move, tensors_in


class TransferredFeatures(tuple):
    """A backbone's feature maps, each moved to ``device`` when it is read.

    A head is given all of them and reads those of its ``in_index``; the others stay where they are.
    """

    device: torch.device
    moves_itself = True

    @classmethod
    def on(cls, features: Any, device: torch.device) -> TransferredFeatures:
        """Return ``features``, a sequence, to be read on ``device``."""
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
        module: Any module; a deep copy of it does the same.
        method: Name of a method. Not only ``forward`` is called from outside: heads are entered
            by ``loss`` and ``predict``, where a forward hook would see nothing.
        device: The module's.
        lazily: Move the first argument, if a sequence, item by item as it is read.
    """
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if lazily and args and isinstance(args[0], (list, tuple)):
            args = (TransferredFeatures.on(args[0], device), *args[1:])
        return call(*move(args, device), **move(kwargs, device))

    _override(module, method, enter)


def bring_together(module: nn.Module, method: str) -> None:
    """Make ``module.method`` move its arguments to where the first tensor among them is."""
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = next(tensors_in([args, kwargs]), None)
        return call(*args, **kwargs) if first is None else \
            call(*move(args, first.device), **move(kwargs, first.device))

    _override(module, method, enter)


def bring_outputs(module: nn.Module, method: str, device: torch.device) -> None:
    """Make ``module.method`` move what it returns to ``device``."""
    def enter(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return move(call(*args, **kwargs), device)

    _override(module, method, enter)


def _override(module: nn.Module, method: str, enter: Callable[..., Any]) -> None:
    function = getattr(module, method).__func__
    inner = getattr(function, '_mapsage_inner', function)  # of a module that is split again

    @functools.wraps(inner)
    def crossing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return enter(functools.partial(inner, self), *args, **kwargs)

    crossing._mapsage_inner = inner  # type: ignore[attr-defined]
    # A method, not a closure over the module: copy.deepcopy binds it to the copy, as EMA needs.
    setattr(module, method, MethodType(crossing, module))
