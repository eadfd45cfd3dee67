"""Compares every operator call of a step on a card with the same call on the CPU.

Each call gets the card's own arguments, so an error does not spread: only the operator that makes
it is named. Between two calls the card waits and tensors are copied. A kernel that writes into
other tensors, or a result that is not complete when the next kernel reads it, is not found here;
`bisection.py` finds it in an undisturbed step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from .dispatch import DispatchMode, is_view, operator_name, tensors_in
from .error_bounds import ResultError, compare_results
from .flops import product_flops
from .host_calls import HostCall, is_random, is_uninitialized, written_arguments, written_positions
from .undetermined import indices_mistake, random_mistake, returns_indices

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload

# Operators that add products of their arguments, besides matrix products and convolutions.
_SUMS = (
    'sum',
    'mean',
    'add',
    'sub',
    'rsub',
    'cumsum',
    'addcmul',
    'index_add',
    'scatter_add',
    'embedding_dense_backward',
    'upsample_bilinear2d',
    'upsample_bilinear2d_backward',
    'upsample_nearest2d_backward',
    'avg_pool2d',
    '_adaptive_avg_pool2d',
)


@dataclass
class ComparedOperator:
    """Calls of one operator, and the worst of their errors.

    Attributes:
        calls: Number of calls that were compared.
        wrong_calls: Number of calls with a wrong result.
        worst: Error of the result that exceeds its bound by the largest factor.
        first_wrong: Number (from 1) of the first wrong call among the operator's calls; 0 for none.
        shapes: Shapes of the tensors among that call's arguments.
    """

    calls: int = 0
    wrong_calls: int = 0
    worst: ResultError = ResultError(0.0, 0.0)
    first_wrong: int = 0
    shapes: List[Tuple[int, ...]] = field(default_factory=list)

    def add(self, errors: Sequence[ResultError], shapes: List[Tuple[int, ...]]) -> None:
        """Add the errors of the results of one call."""
        self.calls += 1
        wrong = [error for error in errors if error.is_wrong]
        if wrong and not self.wrong_calls:
            self.first_wrong, self.shapes = self.calls, shapes
        self.wrong_calls += bool(wrong)
        for error in errors:
            if (error.is_wrong, error.excess) > (self.worst.is_wrong, self.worst.excess):
                self.worst = error


class OperatorComparison(DispatchMode):
    """A context in which every call of an operator on a card is compared with the CPU's.

    Args:
        device_type: Type of the card's devices.
        synchronize: Waits until the card has finished its work.
        float64_as_float32: Whether the card computes float64 in float32.

    Attributes:
        operators: Name of an operator -> its compared calls, in the order of the first calls.
        not_compared: Names of operators that the CPU cannot compute.
    """

    def __init__(
        self, device_type: str, synchronize: Callable[[], None], float64_as_float32: bool = False
    ) -> None:
        super().__init__()
        self.operators: Dict[str, ComparedOperator] = {}
        self.not_compared: Set[str] = set()
        self._device_type = device_type
        self._synchronize = synchronize
        self._float64_as_float32 = float64_as_float32

    @property
    def wrong(self) -> Dict[str, ComparedOperator]:
        """Operators with at least one wrong result, by name."""
        return {name: operator for name, operator in self.operators.items() if operator.wrong_calls}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Mapping[str, Any]] = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_view(func) or is_uninitialized(func):
            return func(*args, **kwargs)
        host = HostCall(func, args, kwargs)
        result = func(*args, **kwargs)
        if not any(
            tensor.device.type == self._device_type for tensor in tensors_in(args, kwargs, result)
        ):
            return result
        self._synchronize()
        errors, name = self._errors(host, args, kwargs, result), operator_name(func)
        if errors is None:
            self.not_compared.add(name)
        else:
            self.operators.setdefault(name, ComparedOperator()).add(
                errors, [tuple(tensor.shape) for tensor in tensors_in(args)]
            )
        return result

    def _errors(
        self, host: HostCall, args: Tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Optional[List[ResultError]]:
        """Return the errors of a call's results and of the arguments that it wrote.

        None if the CPU has no kernel for the operator.

        Args:
            host: The same call with copies of the arguments.
            args, kwargs: Arguments on the card, after the call.
            result: What the card returned.
        """
        name = operator_name(host.func)
        try:
            cpu_result, cpu_written = host.run()
        except NotImplementedError:
            return None
        card = self._results(result, written_arguments(host.func, args, kwargs))
        cpu = self._results(cpu_result, cpu_written)
        if is_random(host.func):
            return [_as_error(random_mistake(name, host.args, card, cpu))]
        reference = self._reference(host) or [None] * len(cpu)
        terms = _terms(name, host.args, cpu)
        errors = [
            compare_results(
                card_tensor, cpu_tensor, reference_tensor, terms, self._float64_as_float32
            )
            for card_tensor, cpu_tensor, reference_tensor in zip(card, cpu, reference)
        ]
        if any(error.is_wrong for error in errors) and _adds_terms(name, host):
            # Terms that cancel, so that the result is smaller than the rounding of its terms.
            errors = [
                compare_results(
                    card_tensor,
                    cpu_tensor,
                    reference_tensor,
                    terms,
                    self._float64_as_float32,
                    magnitude,
                )
                for card_tensor, cpu_tensor, reference_tensor, magnitude in zip(
                    card, cpu, reference, self._reference(host, absolute=True) or [None] * len(cpu)
                )
            ]
        if returns_indices(name):
            errors[-1] = _as_error(indices_mistake(name, host.args, card, cpu))
        return errors + self._overwritten(host, args)

    @staticmethod
    def _results(result: Any, written: Sequence[Any]) -> List[torch.Tensor]:
        """Return the results of a call on the CPU; an argument that is returned counts once."""
        seen = {id(tensor) for tensor in tensors_in(written)}
        returned = [tensor for tensor in tensors_in(result) if id(tensor) not in seen]
        return [tensor.detach().cpu() for tensor in (*tensors_in(written), *returned)]

    def _reference(
        self, host: HostCall, absolute: bool = False
    ) -> Sequence[Optional[torch.Tensor]]:
        """Return the results in float64, or nothing if the operator refuses float64.

        Args:
            host: Call of the operator.
            absolute: Whether to compute with the absolute values of the arguments.
        """
        try:
            result, written = host.run(torch.float64, absolute)
        # The CPU's kernel does not take float64 with these arguments.
        except (RuntimeError, TypeError, NotImplementedError):
            return []
        return self._results(result, written)

    @staticmethod
    def _overwritten(host: HostCall, args: Tuple[Any, ...]) -> List[ResultError]:
        """Return an error for each argument that the card changed and must not change."""
        errors, written = [], written_positions(host.func)
        for position, (argument, before) in enumerate(zip(args, host.args)):
            if position in written or not isinstance(argument, torch.Tensor):
                continue
            after = argument.detach().cpu()
            if after.shape == before.shape and not torch.equal(
                after.contiguous().view(-1).view(torch.uint8),
                before.contiguous().view(-1).view(torch.uint8),
            ):
                errors.append(
                    _as_error(
                        f'it overwrites its argument {host.func._schema.arguments[position].name}'
                    )
                )
        return errors


def _as_error(mistake: Optional[str]) -> ResultError:
    return ResultError(0.0, 0.0) if mistake is None else ResultError(float('inf'), 0.0, mistake)


def _adds_terms(name: str, host: HostCall) -> bool:
    """Return whether an operator's result is a sum of products of its arguments."""
    base = name.split('.')[0].rstrip('_').replace('_foreach_', '')
    return base in _SUMS or product_flops(name, host.args) > 0


def _terms(name: str, args: Tuple[Any, ...], results: Sequence[torch.Tensor]) -> float:
    """Return the number of terms of the sums behind an element of the smallest result."""
    sizes = [tensor.numel() for tensor in results if tensor.is_floating_point() and tensor.numel()]
    if not sizes:
        return 1.0
    inputs = max((tensor.numel() for tensor in tensors_in(args)), default=1)
    return max(product_flops(name, args) / 2, inputs) / min(sizes)
