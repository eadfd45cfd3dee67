"""Prints of gradients that two ranks can compare, and the verdict of three ranks on a difference.

A print has a few numbers for each parameter, so that it travels in one message. Where a step has
the same bits on every rank, the numbers are digests, and any difference counts. Elsewhere they are
sums, whose differences are measured against the size of the whole gradient. Everything here but
:class:`PrintReader` is pure; ``cross_check_hook.py`` enters the collectives.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from mapsage.distributed.weights import tensor_digest

# Numbers by name of the parameter; a parameter without a gradient is missing.
GradientPrint = Dict[str, List[float]]
# Number of sums that represent a gradient.
_SUMS = 8
# Bound of a difference between two computations of one gradient, as a multiple of what two
# computations on one card differ by. The difference is measured on few batches, and may be several
# times as large for a later batch.
_MARGIN = 10.0
# Smallest bound, relative to the whole gradient: a float32 is rounded by 6e-8 of its value, and the
# roundings of a sum of a million terms add up to about a thousand times as much.
SMALLEST_BOUND = 1e-5
# Largest difference that rounding explains, in 16 bits too, whose roundings are 4e-3 of a value.
LARGEST_BOUND = 1e-2


class PrintReader:
    """Reads gradients while a backward pass computes them.

    Args:
        exact: Whether to take digests; else sums.

    Attributes:
        print: Print of the gradients that were read so far.
        enabled: Whether gradients are read now.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.print: GradientPrint = {}
        self.enabled = True
        self._handles: List[Any] = []

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read the gradients of the parameters that are trained, by name, before they are added up."""
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._make_hook(name)))

    def detach(self) -> None:
        """Stop reading."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            if self.enabled:
                dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                # Reentrant activation checkpointing may compute a gradient in parts.
                self.print.setdefault(name, []).extend(
                    [tensor_digest(dense)] if self._exact else _sums(dense)
                )

        return read


def _sums(gradient: torch.Tensor) -> List[float]:
    """Return the Euclidean norm of a gradient, and the sums of up to eight parts of it."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    host = numbers.cpu().double().reshape(-1)
    return [float(host.norm()), *(float(part.sum()) for part in host.chunk(_SUMS))]


def largest_difference(
    first: GradientPrint, second: GradientPrint, exact: bool
) -> Tuple[str, float]:
    """Return the parameter by which two prints differ most, and the difference.

    With ``exact`` the difference is infinite for any other digest. Else it is relative to the norm
    of the first gradient over all parameters; NaN and infinity are only equal to themselves.
    """
    total = (
        1.0
        if exact
        else math.sqrt(
            sum(numbers[0] ** 2 for numbers in first.values() if math.isfinite(numbers[0]))
        )
    )
    worst = ('', 0.0)
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name, []), second.get(name, [])
        if one == other or repr(one) == repr(other):
            continue
        drift = math.inf
        if not exact and len(one) == len(other):
            drift = max(_distance(a, b) for a, b in zip(one, other)) / (total or 1e-300)
        if drift > worst[1]:
            worst = name, drift
    return worst


def _distance(one: float, other: float) -> float:
    if one == other or repr(one) == repr(other):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


def bound_of(drifts: Sequence[float]) -> float:
    """Return the bound of differences, from what each card differs by if it computes twice.

    It follows the lower median, so that a faulty card does not widen the bound for itself.
    """
    return max(SMALLEST_BOUND, _MARGIN * statistics.median_low(drifts))


@dataclass(frozen=True)
class Pairing:
    """Which rank checks which, in one check.

    Over ``(world - 1) * block`` checks in a row, each rank checks each virtual rank of every other
    rank once.

    Attributes:
        number: Number of the check.
        world: Number of processes.
    """

    number: int
    world: int

    @property
    def _shift(self) -> int:
        return 1 + self.number % (self.world - 1) if self.world > 1 else 0

    def checker(self, owner: int) -> int:
        """Return the rank that recomputes a gradient of ``owner``; itself in a single process."""
        return (owner - self._shift) % self.world

    def owner(self, checker: int) -> int:
        """Return the rank of which ``checker`` recomputes a gradient."""
        return (checker + self._shift) % self.world

    def virtual_rank(self, block: range) -> int:
        """Return the virtual rank of a process that is checked.

        Args:
            block: Virtual ranks of the process.
        """
        return block[self.number // max(self.world - 1, 1) % len(block)]


@dataclass
class Dispute:
    """A gradient that two ranks have computed differently.

    Attributes:
        owner: Rank that computed it in the step.
        checker: Rank that computed it again; the same rank in a run of one process.
        parameter: Parameter by which they differ most.
        difference: Difference there, see :func:`largest_difference`.
        voter: Rank that computes it a third time; None with fewer than three ranks.
        suspects: Ranks that may be at fault.
    """

    owner: int
    checker: int
    parameter: str
    difference: float
    voter: Optional[int] = None
    suspects: Sequence[int] = ()

    def settle(self, owner_agrees: bool, checker_agrees: bool) -> None:
        """Set the suspects, once the voter agrees with one of the two, with both or with neither."""
        pair = sorted({self.owner, self.checker})
        if self.voter is None:
            self.suspects = pair
        elif owner_agrees != checker_agrees:
            self.suspects = [self.checker if owner_agrees else self.owner]
        else:
            self.suspects = pair if owner_agrees else sorted({*pair, self.voter})


def find_disputes(
    steps: Sequence[GradientPrint],
    checks: Sequence[GradientPrint],
    pairing: Pairing,
    bound: float,
    exact: bool,
) -> List[Dispute]:
    """Return the gradients of which step and recomputation differ, each with its voter.

    Args:
        steps: Print of each rank's gradient in the step.
        checks: Print of the gradient that each rank has recomputed.
        pairing: Which rank checked which.
        bound: Largest difference that rounding explains; not used with ``exact``.
        exact: Whether the prints are digests.
    """
    disputes = []
    for owner, step in enumerate(steps):
        checker = pairing.checker(owner)
        parameter, difference = largest_difference(step, checks[checker], exact)
        if difference > (0.0 if exact else bound):
            disputes.append(Dispute(owner, checker, parameter, difference))
    involved = {rank for dispute in disputes for rank in (dispute.owner, dispute.checker)}
    for dispute in disputes:
        others = [
            rank for rank in range(len(steps)) if rank not in (dispute.owner, dispute.checker)
        ]
        # Prefer a rank that is part of no dispute.
        dispute.voter = min(others, key=lambda rank: (rank in involved, rank), default=None)
    return disputes


def guilty_ranks(disputes: Sequence[Dispute]) -> List[int]:
    """Return the ranks that are proven faulty, and the suspects of disputes without such a rank."""
    proven = {dispute.suspects[0] for dispute in disputes if len(dispute.suspects) == 1}
    open_suspects = {
        rank
        for dispute in disputes
        if not proven.intersection(dispute.suspects)
        for rank in dispute.suspects
    }
    return sorted(proven | open_suspects)
