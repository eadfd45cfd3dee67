"""The facts about an item that the ranks of a head replica exchange in one tick. Pure functions.

Every rank contributes its numbers, and all ranks read the same combined numbers. :class:`Agreed` is
their meaning, and the only input by which `replica_features.py` chooses the next collective.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Protocol

import torch

from mapsage.distributed import Facts
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.wire.payload import DIMS, DTYPES, MAX_LEVELS, Layout

_SIZES = tuple(f'size{level}{axis}' for level in range(MAX_LEVELS) for axis in range(DIMS))

# The layout is among the facts and not in front of the data, so that ranks without the data know it
# as well.
FIELDS = (
    'owner',
    'item',
    'attempt',
    'state',
    'total',
    'arrived',
    'checksum',
    'dtype',
    'original',
    'has_facts',
    'levels',
) + _SIZES


class ArrivingItem(Protocol):
    """An item on the rank that receives its data. Bytes arrive in order.

    Each new attempt begins at byte 0 again and makes earlier reads invalid.
    """

    @property
    def number(self) -> int:
        """Number of the item."""

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0: encoders are asked for the item one after the other."""

    @property
    def state(self) -> State:
        """State of the item; READY once all bytes have arrived and their checksum is right."""

    @property
    def total(self) -> Optional[int]:
        """Number of bytes of the item; None until its header has arrived."""

    @property
    def arrived(self) -> int:
        """Number of bytes, counted from byte 0, that may be read."""

    @property
    def error(self) -> Optional[str]:
        """Reason why the state is FAILED."""

    @property
    def layout(self) -> Optional[Layout]:
        """Shapes and dtypes of the features; None until the header has arrived."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes ``start`` to ``stop``, uint8 (stop - start,); they must have arrived."""

    def wait(self, timeout: float) -> None:
        """Return when something has changed, or after ``timeout`` seconds."""


class Agreed(NamedTuple):
    """What every rank of a replica has read in a tick.

    Attributes:
        owner: Group rank that holds the data; None if no rank does.
        item: Number of the item.
        attempt: Number of the attempt, see :class:`ArrivingItem`.
        state: State of the item on its owner; FAILED if any rank failed.
        total: Number of bytes of the item; None until its header has arrived.
        arrived: Number of bytes that the owner has.
        layout: Shapes and dtypes of the features; None until the header has arrived.
        has_many_owners: Whether more than one rank holds data, which is an error.
    """

    owner: Optional[int]
    item: int = -1
    attempt: int = 0
    state: State = State.NEW
    total: Optional[int] = None
    arrived: int = 0
    layout: Optional[Layout] = None
    has_many_owners: bool = False

    @property
    def ready(self) -> bool:
        """Whether the owner has the whole item, with the right checksum."""
        return self.state >= State.READY


def facts_of(arriving: ArrivingItem, rank: int) -> Dict[str, int]:
    """Return the facts that the rank that holds an item sends to the others. Pure.

    Args:
        arriving: Item of this rank; another thread may be filling it.
        rank: This rank's number in its group.

    Raises:
        ValueError: If :data:`FIELDS` cannot hold the layout of the item.
    """
    while True:
        attempt = arriving.attempt
        # The state is read before the number of bytes. If it were read after it, an item that
        # becomes READY in between would be reported READY with some of its bytes missing.
        state = arriving.state
        facts = dict(owner=rank, item=arriving.number, attempt=attempt, state=int(state))
        total, layout, arrived = arriving.total, arriving.layout, arriving.arrived
        if arriving.attempt == attempt:
            break
    facts['arrived'] = arrived
    if total is not None and layout is not None:
        facts.update(total=total, **_layout_facts(layout))
    return facts


def _layout_facts(layout: Layout) -> Dict[str, int]:
    for dtype in (layout.dtype, layout.original):
        if dtype not in DTYPES:
            raise ValueError(
                f'features are {dtype}, expected one of {", ".join(map(str, DTYPES))}.'
            )
    shapes = layout.shapes
    if len(shapes) > MAX_LEVELS or any(len(shape) != DIMS for shape in shapes):
        raise ValueError(
            f'features have the shapes {list(shapes)}, expected at most {MAX_LEVELS} '
            f'levels of (n, channels, height, width).'
        )
    sizes = [size for shape in shapes for size in shape]
    return dict(
        zip(_SIZES, sizes),
        dtype=DTYPES.index(layout.dtype),
        original=DTYPES.index(layout.original),
        has_facts=int(layout.has_facts),
        levels=len(shapes),
    )


def read_agreed(facts: Facts) -> Agreed:
    """Return the agreement that all ranks read from the facts of a tick. Pure."""
    failed = facts.min('state') == State.FAILED
    owner, levels = facts.max('owner'), facts.max('levels')
    if owner is None:
        return Agreed(None, state=State.FAILED if failed else State.NEW)
    layout = None
    if levels is not None:
        sizes = [facts.max(name) or 0 for name in _SIZES[: DIMS * levels]]
        shapes = tuple(tuple(sizes[DIMS * i : DIMS * (i + 1)]) for i in range(levels))
        layout = Layout(
            shapes,
            DTYPES[facts.max('dtype') or 0],
            DTYPES[facts.max('original') or 0],
            bool(facts.max('has_facts')),
        )
    item = facts.max('item')
    return Agreed(
        owner,
        -1 if item is None else item,
        facts.max('attempt') or 0,
        State.FAILED if failed else State(facts.max('state') or 0),
        facts.max('total'),
        facts.max('arrived') or 0,
        layout,
        facts.agree('owner') is False,
    )


def fault_of(agreed: Agreed, last: Agreed) -> Optional[str]:
    """Return why the agreed facts contradict each other, or None; equal on all ranks. Pure.

    Args:
        agreed: Agreement of this tick.
        last: Agreement of the previous tick about the same item. In the first tick of an item it
            has no owner.
    """
    if agreed.owner is None:
        return 'no rank of the replica holds an item: one of them must bring what arrives'
    if agreed.total is None:
        fault = f'{agreed.arrived} bytes arrived before a header, state {agreed.state.name}'
        return fault if agreed.arrived or agreed.ready else None
    if not 0 <= agreed.arrived <= agreed.total:
        return f'{agreed.arrived} bytes arrived of {agreed.total}'
    if agreed.ready and agreed.arrived < agreed.total:
        return f'it is {agreed.state.name} and {agreed.arrived} bytes of {agreed.total} arrived'
    if (
        last.owner is not None
        and last.attempt >= agreed.attempt
        and (
            (last.attempt, last.arrived) > (agreed.attempt, agreed.arrived)
            or last.total not in (None, agreed.total)
        )
    ):
        return (
            f'attempt {last.attempt} had {last.arrived} bytes of {last.total}, and then '
            f'attempt {agreed.attempt} had {agreed.arrived} of {agreed.total}'
        )
    if agreed.layout is None or agreed.layout.nbytes != agreed.total:
        return f'it has {agreed.total} bytes, and they are {agreed.layout}'
    return None
