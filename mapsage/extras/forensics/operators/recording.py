"""Lists the operators that a step calls, in seconds also for a large model.

The step runs on the CPU, and every operator passes through `OperatorRecorder`. With
``skip_products`` the products, which take nearly all the time, return zeros of the right shape:
which operators a step calls depends on shapes, and hardly ever on values. Everything else is
computed, so a loss that counts pixels or matches masks works as in a training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from .dispatch import DispatchMode, is_view, operator_name, tensors_in
from .flops import product_flops

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload

# Random draws of an initialization, and what torch makes of them for a truncated normal.
_DRAWS = ('normal_', 'uniform_', 'trunc_normal_', 'random_', 'erfinv_')


@dataclass
class OperatorUse:
    """How a step uses one operator.

    Attributes:
        calls: Number of calls.
        flops: Floating-point operations of the products in these calls.
        moved_bytes: Bytes of the tensors that the calls read and write; 0 if they compute nothing.
        computes: Whether the operator computes; False if it views memory or reads a number.
    """

    calls: int = 0
    flops: int = 0
    moved_bytes: int = 0
    computes: bool = True


@dataclass
class Recording:
    """Operators of a step, by name.

    Attributes:
        uses: Name of an operator -> its use.
    """

    uses: Dict[str, OperatorUse] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls of all operators."""
        return sum(use.calls for use in self.uses.values())

    @property
    def flops(self) -> int:
        """Floating-point operations of all products."""
        return sum(use.flops for use in self.uses.values())


class OperatorRecorder(DispatchMode):
    """A context that records the operators called in it, below autograd and autocast.

    Args:
        skip_products: Whether products return zeros and are not computed.

    Attributes:
        recording: What was recorded so far.
    """

    def __init__(self, skip_products: bool = True) -> None:
        super().__init__()
        self.recording = Recording()
        self._skip_products = skip_products

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Mapping[str, Any]] = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = operator_name(func)
        flops = product_flops(name, args)
        if flops and self._skip_products and not func._schema.is_mutable:
            result = _zeros_of_right_shape(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        tensors = list(tensors_in(args, kwargs, result))
        # The profiler's marks are operators, too.
        if tensors:
            use = self.recording.uses.setdefault(
                name, OperatorUse(computes=not is_view(func) and name != '_local_scalar_dense')
            )
            use.calls += 1
            use.flops += flops
            use.moved_bytes += sum(
                tensor.numel() * tensor.element_size() for tensor in tensors if use.computes
            )
        return result


class WithoutDraws(DispatchMode):
    """A context in which no random numbers are drawn: tensors to be initialized become zero.

    Drawing the weights of a large model takes longer than recording its step.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Mapping[str, Any]] = None,
    ) -> Any:
        if operator_name(func).split('.')[0] in _DRAWS:
            return args[0].zero_()
        return func(*args, **dict(kwargs or {}))


def record(step: Callable[[], object]) -> Recording:
    """Return the operators that ``step`` calls. Its products return zeros."""
    recorder = OperatorRecorder()
    with recorder:
        step()
    return recorder.recording


def _zeros_of_right_shape(
    func: OpOverload, args: Tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what a product returns, filled with zeros: PyTorch's meta kernels know the shapes."""
    # Some of the meta kernels are written in Python and registered by this import.
    import torch._meta_registrations  # noqa: F401
    from torch.utils._pytree import tree_map

    def on_meta(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')

    def with_zeros(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()

    meta_args, meta_kwargs = tree_map(on_meta, args), tree_map(on_meta, dict(kwargs))
    return tree_map(with_zeros, func(*meta_args, **meta_kwargs))
