"""Wrong kernels for simulated cards: Python kernels that replace the simulator's.

A planted kernel lets the CPU compute the right result and then makes the mistake that its kind
names. `wrong_kernels.py` plants fifty of them; the tests plant a few.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from mapsage.extras.forensics.operators.dispatch import tensors_in
from mapsage.extras.forensics.operators.host_calls import run_on_host, written_positions

# Elements above which a kernel of the kind 'above a size' is wrong.
_SIZE = 1000


def off_by_one(result: torch.Tensor) -> torch.Tensor:
    """Each value is at its neighbor's position."""
    return result.flatten().roll(1).reshape(result.shape)


def wrong_stride(result: torch.Tensor) -> torch.Tensor:
    """The last two axes are read with each other's strides."""
    return result.transpose(-1, -2).reshape(result.shape) if result.dim() > 1 else result.flip(0)


def one_nan(result: torch.Tensor) -> torch.Tensor:
    """One value is NaN."""
    broken = result.clone(memory_format=torch.contiguous_format)
    broken.view(-1)[broken.numel() // 2] = float('nan')
    return broken


def wrong_dtype(result: torch.Tensor) -> torch.Tensor:
    """The result was computed in bfloat16."""
    return result.bfloat16().to(result.dtype)


def wrong_above_size(result: torch.Tensor) -> torch.Tensor:
    """The values behind the first 1,000 are at their neighbors' positions."""
    if result.numel() <= _SIZE:
        return result
    broken = result.flatten().clone()
    broken[_SIZE:] = broken[_SIZE:].roll(1)
    return broken.reshape(result.shape)


class StaleBuffer:
    """The result is the one of the previous call with this shape."""

    __name__ = 'stale_buffer'

    def __init__(self) -> None:
        self._previous: Dict[Tuple[int, ...], torch.Tensor] = {}

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        """Return the previous result; zeros at first."""
        stale = self._previous.get(tuple(result.shape), torch.zeros_like(result))
        self._previous[tuple(result.shape)] = result.clone()
        return stale


def other_rounding(result: torch.Tensor) -> torch.Tensor:
    """A right kernel that rounds otherwise: a third of the values differ by one unit."""
    generator = torch.Generator().manual_seed(result.numel())
    steps = torch.randint(-1, 2, result.shape, generator=generator)
    up = torch.nextafter(result, torch.full_like(result, float('inf')))
    down = torch.nextafter(result, torch.full_like(result, -float('inf')))
    # The neighbor of infinity is a number.
    steps[~torch.isfinite(result)] = 0
    return torch.where(steps > 0, up, torch.where(steps < 0, down, result))


KINDS: Dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    'off by one': lambda: off_by_one,
    'wrong stride': lambda: wrong_stride,
    'NaN': lambda: one_nan,
    'stale buffer': StaleBuffer,
    'wrong dtype': lambda: wrong_dtype,
    'above a size': lambda: wrong_above_size,
}


@contextmanager
def planted(operator: str, mistake: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the simulated cards' kernel of an operator, such as ``'add.Tensor'``.

    Args:
        operator: Name of the operator.
        mistake: Returns what the kernel makes of the right result, both on the CPU. It is applied
            to the first floating-point result, or to each of the tensors in a list.
    """

    def change(func: Any, args: Tuple[Any, ...], result: Any) -> None:
        for target in _targets(func, args, result):
            target.copy_(mistake(target.cpu()))

    with _kernels({operator: change}):
        yield


@contextmanager
def stray_write(operator: str) -> Iterator[None]:
    """Let an operator overwrite the result of its previous call. Its results are right."""
    previous: List[torch.Tensor] = []

    def change(func: Any, args: Tuple[Any, ...], result: Any) -> None:
        target = _targets(func, args, result)[0]
        current = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
        for tensor in previous:
            if tensor.untyped_storage().data_ptr() not in current:
                tensor.mul_(-2)
        previous[:] = [target.detach()]

    with _kernels({operator: change}):
        yield


@contextmanager
def late_result(operator: str) -> Iterator[None]:
    """Let an operator's result be zero until the card is synchronized."""
    pending: List[Tuple[torch.Tensor, torch.Tensor]] = []
    device_module: Any = torch.gcu  # type: ignore[attr-defined]
    synchronize = device_module.synchronize

    def finish(*args: Any) -> None:
        while pending:
            target, value = pending.pop()
            target.copy_(value)
        synchronize(*args)

    def change(func: Any, args: Tuple[Any, ...], result: Any) -> None:
        target = _targets(func, args, result)[0].detach()
        pending.append((target, target.cpu()))
        target.zero_()

    device_module.synchronize = finish
    try:
        with _kernels({operator: change}):
            yield
    finally:
        device_module.synchronize = synchronize


@contextmanager
def wrong_after(operator: str, earlier: str) -> Iterator[None]:
    """Let an operator be wrong if the card was not synchronized since another operator."""
    state = dict(dirty=False)
    device_module: Any = torch.gcu  # type: ignore[attr-defined]
    synchronize = device_module.synchronize

    def finish(*args: Any) -> None:
        state['dirty'] = False
        synchronize(*args)

    def change_earlier(func: Any, args: Tuple[Any, ...], result: Any) -> None:
        state['dirty'] = True

    def change(func: Any, args: Tuple[Any, ...], result: Any) -> None:
        target = _targets(func, args, result)[0]
        if state['dirty']:
            target.copy_(off_by_one(target.cpu()))

    device_module.synchronize = finish
    try:
        with _kernels({operator: change, earlier: change_earlier}):
            yield
    finally:
        device_module.synchronize = synchronize


@contextmanager
def _kernels(changes: Dict[str, Callable[[Any, Tuple[Any, ...], Any], None]]) -> Iterator[None]:
    """Replace kernels: the CPU computes the result, and a function changes it on the card."""
    library = torch.library.Library('aten', 'IMPL', 'PrivateUse1')
    for operator, change in changes.items():
        packet, _, overload = operator.partition('.')
        func = getattr(getattr(torch.ops.aten, packet), overload or 'default')

        def kernel(*args: Any, func: Any = func, change: Any = change, **kwargs: Any) -> Any:
            result = run_on_host(func, args, kwargs)
            change(func, args, result)
            return result

        library.impl(operator, kernel)
    try:
        yield
    finally:
        library._destroy()


def _targets(func: Any, args: Tuple[Any, ...], result: Any) -> List[torch.Tensor]:
    """Return the floating-point results of a call: the first, or the list that it wrote."""
    lists = [
        args[position]
        for position in written_positions(func)
        if isinstance(args[position], (list, tuple))
    ]
    if lists:
        return list(lists[0])
    return [
        tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.numel()
    ][:1]
