"""Finds the operator that makes a step wrong, where every operator compared by itself is right.

The comparison of single calls waits for the card and copies tensors after every operator, which
hides three kinds of faults: a kernel that writes into other tensors, a result that is not complete
when the next kernel reads it, and a kernel that is wrong only after another one. Here the card
computes the first k operators of the step without interruption and the CPU the others; the smallest
k with a wrong result is found by bisection, and its last operator is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from .dispatch import DispatchMode, is_view, operator_name, tensors_in
from .host_calls import is_random, run_on_host, written_arguments

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload

# Half of the digits: a stable computation loses no more unless its condition number exceeds
# 1 / sqrt(eps) (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 1.6).
_TOLERANCE = math.sqrt(torch.finfo(torch.float32).eps)

# Name of a result of a step, such as a parameter -> the loss or the gradient, on any device.
StepResults = Mapping[str, torch.Tensor]


class FirstOnCard(DispatchMode):
    """A context in which the card computes the first ``count`` operators, and the CPU the others.

    Random operators are always computed by the CPU, so that all runs draw the same numbers.

    Args:
        count: Number of operators for the card.
        synchronize: Waits until the card has finished; called once, before the CPU begins.

    Attributes:
        names: Names of all operators of the step, in order.
        sources: Numbers of the operators whose results operator ``count`` (the last on the card)
            reads, as indices into ``names``.
    """

    def __init__(self, count: int, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.names: List[str] = []
        self.sources: List[int] = []
        self._count = count
        self._synchronize = synchronize
        self._writers: Dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Mapping[str, Any]] = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        number = len(self.names)
        self.names.append(operator_name(func))
        if number == self._count:
            self._synchronize()
        if number == self._count - 1:
            self.sources = sorted(
                {
                    self._writers[_memory(tensor)]
                    for tensor in tensors_in(args, kwargs)
                    if _memory(tensor) in self._writers
                }
            )
        on_card = number < self._count and not is_random(func)
        result = func(*args, **kwargs) if on_card else run_on_host(func, args, kwargs)
        if not is_view(func):
            for tensor in tensors_in(result, written_arguments(func, args, kwargs)):
                self._writers[_memory(tensor)] = number
        return result


@dataclass(frozen=True)
class Culprit:
    """The operator with which a step becomes wrong.

    Attributes:
        name: Name of the operator.
        number: Its number in the step, from 1.
        sources: Names of the operators whose results it reads; one of them may be late.
        runs: Number of steps that the search took.
        results: Names of results of the step that are wrong with it.
    """

    name: str
    number: int
    sources: Tuple[str, ...]
    runs: int
    results: Tuple[str, ...]


class Bisection:
    """Searches a step for the operator that makes its results wrong.

    Args:
        step: Carries out the step from the same state every time, and returns its results.
        synchronize: Waits until the card has finished.
    """

    def __init__(self, step: Callable[[], StepResults], synchronize: Callable[[], None]) -> None:
        self._step, self._synchronize = step, synchronize
        self.runs = 0
        self._expected, mode = self._run(0)
        self.operators = len(mode.names)

    def whole_step(self) -> List[str]:
        """Return the names of the wrong results of the step that the card computes as a whole."""
        return wrong_results(self._run(self.operators + 1)[0], self._expected)

    def find(self) -> Culprit:
        """Return the operator with which the results become wrong.

        A count of operators that seems right is tried a second time, since a fault of timing does
        not show in every run: at most ``2 log2(operators)`` runs, rounded up.
        """
        self.runs = 0
        right, wrong = 0, self.operators
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if self._is_wrong(middle) or self._is_wrong(middle):
                wrong = middle
            else:
                right = middle
        runs = self.runs
        results, mode = self._run(wrong)
        sources = tuple(mode.names[number] for number in mode.sources)
        return Culprit(
            mode.names[wrong - 1],
            wrong,
            sources,
            runs,
            tuple(wrong_results(results, self._expected)),
        )

    def _is_wrong(self, count: int) -> bool:
        return bool(wrong_results(self._run(count)[0], self._expected))

    def _run(self, count: int) -> Tuple[Dict[str, torch.Tensor], FirstOnCard]:
        self.runs += 1
        mode = FirstOnCard(count, self._synchronize)
        with mode:
            results = self._step()
        self._synchronize()
        return {name: tensor.detach().cpu() for name, tensor in results.items()}, mode


def wrong_results(results: StepResults, expected: StepResults) -> List[str]:
    """Return the names of results that differ from the expected ones by more than rounding.

    A difference is rounding if its norm is below 3.5e-4 (half of float32's digits) times the larger
    of two norms: of the expected gradient, and of an average gradient with as many values. The
    second one matters for gradients that are zero but for rounding, such as of a bias before
    BatchNorm.
    """
    gradients = {name: tensor.double() for name, tensor in expected.items() if name != 'loss'}
    count = max(sum(tensor.numel() for tensor in gradients.values()), 1)
    squares = sum(float(tensor.square().sum()) for tensor in gradients.values())
    wrong = []
    for name, tensor in expected.items():
        actual = results.get(name)
        average = 0.0 if name == 'loss' else math.sqrt(squares * tensor.numel() / count)
        scale = max(float(tensor.double().norm()), average)
        difference = (
            math.inf
            if actual is None or actual.shape != tensor.shape
            else float((actual.double() - tensor.double()).norm())
        )
        # A difference that is NaN is not rounding, unless the CPU's result is NaN as well.
        if not difference <= _TOLERANCE * scale and not math.isnan(scale):
            wrong.append(name)
    return wrong


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type != 'meta' else 0
