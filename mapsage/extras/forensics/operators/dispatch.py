"""What this room needs of PyTorch's dispatcher: the mode that sees every operator, and its names.

`DispatchMode` is torch's ``TorchDispatchMode``. Older versions of torch can import this module, and
`require_dispatch_mode` tells the user what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Tuple

import torch

from mapsage.base.errors import UserError

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload

try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
    from torch.utils._pytree import tree_flatten

    HAS_DISPATCH_MODE = True
# torch before 2.0, for which `require_dispatch_mode` raises an error
except ImportError:
    HAS_DISPATCH_MODE = False
    DispatchMode = object  # type: ignore[assignment,misc]


class OperatorError(UserError, RuntimeError):
    """The operators of a step cannot be recorded or compared here."""


def require_dispatch_mode() -> None:
    """Raise an OperatorError if this version of torch cannot show the operators of a step."""
    if not HAS_DISPATCH_MODE:
        raise OperatorError(
            f'the operators of a step need torch>=2.0, which shows them to Python, this is torch '
            f'{torch.__version__}. Run this command in an environment with a newer torch; it needs '
            f'no card.'
        )


def operator_name(operator: OpOverload) -> str:
    """Return the name of an ``OpOverload``, such as ``'add.Tensor'``, ``'mm'`` or ``'mmcv::nms'``.

    The namespace ``aten`` and the overload ``default`` are left out, as in PyTorch's own lists.
    """
    name = str(operator._schema.name)
    name = name[len('aten::') :] if name.startswith('aten::') else name
    overload = operator._schema.overload_name
    return f'{name}.{overload}' if overload else name


def is_view(operator: OpOverload) -> bool:
    """Return whether all results of an operator share an argument's memory without writing it."""
    results = operator._schema.returns
    return bool(results) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in results
    )


def tensors_in(*values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    leaves: Tuple[Any, ...] = tuple(tree_flatten(values)[0])
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
