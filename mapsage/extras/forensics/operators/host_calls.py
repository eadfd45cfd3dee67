"""Runs one operator call on the CPU, with copies of the card's tensors.

`HostCall` copies the arguments before the card's kernel may change them. `run_on_host` also puts
the results back on the card, so that any part of a step can be computed by the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch.utils._pytree import tree_map

from .attention import attention_results, has_formula
from .dispatch import is_view, operator_name

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload

# Arguments (by position) that an operator writes although its schema does not say so.
_UNDECLARED_WRITES: Mapping[str, Tuple[int, ...]] = {'native_batch_norm': (3, 4)}
_UNINITIALIZED = ('empty', 'new_empty', 'resize_', 'set_')


class HostCall:
    """A call of an operator with copies of its arguments on the CPU.

    Args:
        func: Operator, a ``torch._ops.OpOverload``.
        args: Positional arguments; tensors may be on any device.
        kwargs: Keyword arguments.

    Attributes:
        args, kwargs: Arguments on the CPU, as they were when this object was made.
    """

    def __init__(self, func: OpOverload, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func

        def to_host(value: object) -> object:
            if isinstance(value, torch.device):
                return torch.device('cpu')
            return _copy(value) if isinstance(value, torch.Tensor) else value

        self.args: Tuple[Any, ...] = tree_map(to_host, args)
        self.kwargs: Dict[str, Any] = tree_map(to_host, dict(kwargs))
        self.kwargs.pop('pin_memory', None)

    def run(
        self, dtype: Optional[torch.dtype] = None, absolute: bool = False
    ) -> Tuple[Any, List[Any]]:
        """Run the operator on copies of the arguments.

        Args:
            dtype: Floating-point type in which to compute; None for the types of the arguments.
            absolute: Whether to take the absolute values of floating-point tensors.

        Returns:
            What the operator returns, and the arguments that it wrote. Of attention, which has
            other operators on the CPU, the results that its formula determines.

        Raises:
            NotImplementedError: If the CPU cannot compute the operator.
        """

        def prepare(value: object) -> object:
            if isinstance(value, torch.dtype) and dtype is not None and value.is_floating_point:
                return dtype
            if not isinstance(value, torch.Tensor):
                return value
            if not value.is_floating_point():
                return _copy(value)
            copied = value.to(dtype or value.dtype, copy=True)
            return copied.abs_() if absolute else copied

        args, kwargs = tree_map(prepare, self.args), tree_map(prepare, self.kwargs)
        try:
            return self.func(*args, **kwargs), written_arguments(self.func, args, kwargs)
        except NotImplementedError:
            results = attention_results(self.func, args, kwargs) if has_formula(self.func) else None
            if results is None:
                raise
            return results, []


def written_positions(func: OpOverload) -> List[int]:
    """Return the positions of the arguments that an operator writes."""
    declared = [
        number
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [*declared, *_UNDECLARED_WRITES.get(operator_name(func), ())]


def written_arguments(
    func: OpOverload, args: Tuple[Any, ...], kwargs: Mapping[str, Any]
) -> List[Any]:
    """Return the arguments that a call writes, tensors or lists of them."""
    arguments = func._schema.arguments
    values = [
        args[position] if position < len(args) else kwargs.get(arguments[position].name)
        for position in written_positions(func)
    ]
    return [value for value in values if value is not None]


def is_random(func: OpOverload) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_uninitialized(func: OpOverload) -> bool:
    """Return whether the contents of an operator's result are not determined."""
    name = operator_name(func).split('.')[0]
    return name.startswith(_UNINITIALIZED) or name.endswith(('empty_like', 'empty_strided'))


def run_on_host(func: OpOverload, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator call on the CPU and return its results on the card.

    Views and uninitialized tensors are made on the card, since they hold no computed numbers. So
    is what the CPU cannot compute.
    """
    if is_view(func) or is_uninitialized(func) or has_formula(func):
        return func(*args, **kwargs)
    device = target_device(args, kwargs)
    try:
        result, host_written = HostCall(func, args, kwargs).run()
    except NotImplementedError:
        return func(*args, **kwargs)
    written = written_arguments(func, args, kwargs)
    for target, source in zip(written, host_written):
        _copy_back(target, source)
    returns = func._schema.returns
    if any(item.alias_info is not None for item in returns):
        # It returns the arguments that it wrote.
        return written[0] if len(returns) == 1 else tuple(written)

    def to_card(value: object) -> object:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return tree_map(to_card, result)


def target_device(args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device of a call's result."""
    if isinstance(kwargs.get('device'), torch.device):
        return kwargs['device']
    tensors: List[torch.Tensor] = []
    tree_map(
        lambda value: tensors.append(value) if isinstance(value, torch.Tensor) else None,
        (args, dict(kwargs)),
    )
    return next(
        (tensor.device for tensor in tensors if tensor.device.type != 'cpu'), torch.device('cpu')
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU with the strides of ``tensor``, where they do not overlap."""
    return tensor.detach().cpu() if tensor.device.type != 'cpu' else tensor.detach().clone()


def _copy_back(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        if target.shape != source.shape:
            target.resize_(source.shape)
        target.copy_(source)
    elif isinstance(target, (list, tuple)):
        for inner_target, inner_source in zip(target, source):
            _copy_back(inner_target, inner_source)
