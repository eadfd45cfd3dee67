"""Where an operator is computed: on the card, or on the CPU after a copy of its tensors.

PyTorch sends an operator without a kernel for the card to the CPU by a boxed fallback, and gives no
message. `DispatchTable` finds these in PyTorch's dispatch table on the machine with the card.
`S60Table` answers everywhere, from the list of torch_gcu 2.10.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Dict, Protocol, Tuple

import torch

from . import tables


class OperatorPlace(enum.Enum):
    """Where an operator is computed."""

    CARD = 'card'
    CPU = 'CPU'
    # By other operators, which have their placements, or not at all, such as a view.
    COMPOSED = 'composed'


@dataclass(frozen=True)
class Placement:
    """Place of an operator, and why it is there.

    Attributes:
        place: Where it is computed.
        reason: Reason for the report; empty on the card.
    """

    place: OperatorPlace
    reason: str = ''


class OperatorLocations(Protocol):
    """Knows where operators are computed.

    Attributes:
        source: What the answers are from, for the report.
    """

    @property
    def source(self) -> str:
        """What the answers are from, for the report."""

    def locate(self, name: str) -> Placement:
        """Return where the operator with this name (`dispatch.operator_name`) is computed."""


# Attention has one operator for the CPU and others for cards.
_ATTENTION = '_scaled_dot_product_{}attention{}'
# Operators that are recorded on the CPU -> operators in their place on a card, the first preferred.
_ON_CARDS: Dict[str, Tuple[str, ...]] = {
    'convolution': ('convolution', 'convolution_overrideable'),
    'convolution_backward': ('convolution_backward', 'convolution_backward_overrideable'),
    **{
        _ATTENTION.format('flash_', f'_for_cpu{backward}'): tuple(
            _ATTENTION.format(kind, f'{suffix}{backward}')
            for kind, suffix in (('flash_', ''), ('efficient_', ''), ('fused_', '_overrideable'))
        )
        for backward in ('', '_backward')
    },
}


class S60Table:
    """Places on an S60 by the list of torch_gcu 2.10 (`tables.py`), for machines without it."""

    source = f'the list of {tables.S60_SOURCE} (not measured: no card here)'

    def locate(self, name: str) -> Placement:
        """Return where torch_gcu 2.10 computes an operator on an S60."""
        if '::' in name:
            return Placement(OperatorPlace.CPU, 'not an operator of ATen')
        groups = tables.s60_groups()
        group = next(
            (
                groups[candidate]
                for candidate in _ON_CARDS.get(name, (name,))
                if candidate in groups
            ),
            None,
        )
        if group is None:
            return Placement(OperatorPlace.COMPOSED)
        if group in (tables.CARD, tables.LISTED_PARTLY):
            return Placement(OperatorPlace.CARD)
        return Placement(
            OperatorPlace.CPU,
            'no kernel' if group == tables.NO_KERNEL else "on the vendor's list for the CPU",
        )


class DispatchTable:
    """Places on the card of this process, by PyTorch's dispatch table.

    A kernel that the vendor has registered may still compute on the CPU. For Enflame's cards the
    vendor's list names those, so `s60_list` adds it.

    Args:
        device_type: Type of the card's devices, such as ``'gcu'`` or ``'cuda'``.
        s60_list: Whether operators on the S60's list for the CPU are computed there.
    """

    def __init__(self, device_type: str, s60_list: bool = False) -> None:
        self._key = torch._C._dispatch_key_for_device(device_type)
        self._s60_list = s60_list
        self.source = f"PyTorch's dispatch table for {device_type}" + (
            f', and the list of {tables.S60_SOURCE}' if s60_list else ''
        )

    def locate(self, name: str) -> Placement:
        """Return where the card of this process has an operator computed."""
        candidates = _ON_CARDS.get(name) or (name, *self._out_variants(name))
        if any(_has_kernel(candidate, self._key) for candidate in candidates):
            if self._s60_list and tables.s60_groups().get(name) == tables.LISTED:
                return Placement(OperatorPlace.CPU, "on the vendor's list for the CPU")
            return Placement(OperatorPlace.CARD)
        # A convolution without a kernel for the card would be composed of nothing.
        if name not in _ON_CARDS and any(
            _has_kernel(name, key)
            for key in ('CompositeExplicitAutograd', 'CompositeImplicitAutograd')
        ):
            return Placement(OperatorPlace.COMPOSED)
        return Placement(OperatorPlace.CPU, 'no kernel')

    @staticmethod
    def _out_variants(name: str) -> Tuple[str, ...]:
        """Return the operators that PyTorch calls for a structured operator without a kernel.

        It makes the result tensor, and calls the variant that writes into one.
        """
        if not _has_kernel(name, 'CompositeExplicitAutogradNonFunctional'):
            return ()
        base, _, overload = name.partition('.')
        return tuple(f'{base.rstrip("_")}.{out}' for out in ('out', f'{overload}_out'))


def _has_kernel(name: str, key: str) -> bool:
    """Return whether an operator has a kernel for a key; a boxed fallback does not count."""
    qualified = name if '::' in name else f'aten::{name}'
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key))
    # This version of torch has no such operator.
    except RuntimeError:
        return False
