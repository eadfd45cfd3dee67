"""How much two right results of an operator may differ, and by how much a card's result does.

Two kernels add in different orders, so their results differ by rounding. The reference is the same
call in float64 on the CPU. The bound grows with the number of terms in a sum and with the CPU's
own error in the card's data type: that error is large where terms cancel, on a card as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch

# Rounding errors of a sum of n terms grow with sqrt(n) units, with a factor that is 4 for a
# probability of failure below 1e-3 (Higham and Mary 2019, A new approach to probabilistic rounding
# error analysis, theorem 2.4). The same factor allows a card to round less luckily than the CPU.
_FACTOR = 4.0


@dataclass(frozen=True)
class ResultError:
    """Error of one result of an operator call.

    Attributes:
        error: Largest absolute difference from the reference; infinite if shape, dtype or the
            positions of NaN and infinity differ.
        bound: Largest error of a right kernel.
        text: Kind of a wrong result for the report; empty if it is right.
    """

    error: float
    bound: float
    text: str = ''

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds its bound."""
        return bool(self.text)

    @property
    def excess(self) -> float:
        """Error as a multiple of its bound."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


def rounding_bound(dtype: torch.dtype, terms: float, scale: float, cpu_error: float) -> float:
    """Return the largest error of a right kernel: ``4 ((u + u32 sqrt(n)) scale + cpu_error) + m``.

    m is the smallest normal number of the type: a card may round smaller ones to zero.

    Args:
        dtype: Data type of the result, with unit roundoff u. Sums are taken to be accumulated in
            float32 (u32) or better.
        terms: Number n of terms of the sums behind an element of the result.
        scale: Largest absolute value of the reference.
        cpu_error: Largest error of the CPU's result in the same data type.
    """
    unit = torch.finfo(dtype).eps / 2
    accumulation = min(unit, torch.finfo(torch.float32).eps / 2) * math.sqrt(max(terms, 1.0))
    return _FACTOR * ((unit + accumulation) * scale + cpu_error) + torch.finfo(dtype).tiny


def compare_results(
    card: torch.Tensor,
    cpu: torch.Tensor,
    reference: Optional[torch.Tensor],
    terms: float = 1.0,
    float64_as_float32: bool = False,
    magnitude: Optional[torch.Tensor] = None,
) -> ResultError:
    """Return the error of a card's result.

    Args:
        card: Result of the card, copied to the CPU.
        cpu: Result of the CPU in the same data type.
        reference: Result in float64; None if it cannot be computed in float64.
        terms: Number of terms of the sums behind an element.
        float64_as_float32: Whether the card computes float64 in float32.
        magnitude: Sum of the absolute values of the terms, in the shape of the result, where terms
            may cancel: n terms of both signs have partial sums of about 1 / sqrt(n) of it.
    """
    if card.shape != cpu.shape or card.dtype != cpu.dtype:
        return ResultError(math.inf, 0.0, f'{_form(card)} instead of {_form(cpu)}')
    if not card.numel():
        return ResultError(0.0, 0.0)
    if card.is_complex():
        return compare_results(
            torch.view_as_real(card), torch.view_as_real(cpu), None, terms, float64_as_float32
        )
    if not card.is_floating_point():
        count = int((card != cpu).sum())
        if not count:
            return ResultError(0.0, 0.0)
        error = float((card.double() - cpu.double()).abs().max())
        return ResultError(error, 0.0, f'{count} of {card.numel()} values differ')
    if float64_as_float32 and card.dtype == torch.float64:
        dtype = torch.float32
    else:
        dtype = card.dtype
    partial_sum = 0.0 if magnitude is None else float(magnitude.abs().max()) / math.sqrt(terms)
    return _compare_floats(
        card, cpu, cpu if reference is None else reference, terms, dtype, partial_sum
    )


def _compare_floats(
    card: torch.Tensor,
    cpu: torch.Tensor,
    reference: torch.Tensor,
    terms: float,
    dtype: torch.dtype,
    partial_sum: float,
) -> ResultError:
    card, cpu, reference = card.double(), cpu.double(), reference.double()
    finite = torch.isfinite(cpu) & torch.isfinite(reference)
    # Where the CPU's result is NaN or infinite, the card's must be the same.
    same = (card == cpu) | (torch.isnan(card) & torch.isnan(cpu))
    unexpected = (finite & ~torch.isfinite(card)) | (~finite & ~same)
    if bool(unexpected.any()):
        values = card[unexpected]
        kind = (
            'NaN'
            if bool(torch.isnan(values).any())
            else 'infinite values'
            if bool(torch.isinf(values).any())
            else 'finite values'
        )
        return ResultError(
            math.inf, 0.0, f'{kind} in the wrong places, {int(unexpected.sum())} of {card.numel()}'
        )
    if not bool(finite.any()):
        return ResultError(0.0, 0.0)
    card, cpu, reference = card[finite], cpu[finite], reference[finite]
    error, cpu_error = (float((result - reference).abs().max()) for result in (card, cpu))
    scale = float(reference.abs().max())
    bound = rounding_bound(dtype, terms, max(scale, partial_sum), cpu_error)
    if error <= bound:
        return ResultError(error, bound)
    share = float(((card - reference).abs() > bound).double().mean())
    size = f'{error / scale:.1e} of the largest value' if scale else f'{error:.1e} from 0'
    return ResultError(
        error, bound, f'{share:.1%} of the values differ by more than rounding, at most by {size}'
    )


def _form(tensor: torch.Tensor) -> str:
    return f'{str(tensor.dtype).split(".")[-1]} {tuple(tensor.shape)}'
