"""What the ranks of a head replica tell each other about an item in one tick, as pure functions."""
from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Protocol

import torch

from mapsage.distributed import Facts
from mapsage.features.remote.state import State
from mapsage.features.wire.payload import DIMS, DTYPES, MAX_LEVELS, Layout

_SIZES = tuple(f'size{level}{axis}' for level in range(MAX_LEVELS) for axis in range(DIMS))

# The layout is told here and not in front of the data: who lacks the data knows it as well.
FIELDS = ('owner', 'item', 'attempt', 'state', 'total', 'arrived', 'checksum', 'dtype', 'original',
          'levels') + _SIZES


class ArrivingItem(Protocol):
    """An item on the rank that holds its data, while the data comes. Bytes come in order.

    An attempt that follows another begins at byte 0 again; what was read before is then void.
    """

    @property
    def number(self) -> int:
        """Of the item."""

    @property
    def attempt(self) -> int:
        """0, 1, ...: which of the encoders that were asked for it, one after the other."""

    @property
    def state(self) -> State:
        """How far it is; READY once all bytes are here and checked."""

    @property
    def total(self) -> Optional[int]:
        """Bytes; None before the header came."""

    @property
    def arrived(self) -> int:
        """Bytes from 0 on that may be read."""

    @property
    def error(self) -> Optional[str]:
        """Why it is FAILED."""

    @property
    def layout(self) -> Optional[Layout]:
        """None before the header came."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes, uint8 (stop - start,), of those that arrived."""

    def wait(self, timeout: float) -> None:
        """Return when something changed, or after ``timeout`` seconds."""


class Agreed(NamedTuple):
    """What every rank of a replica read in a tick.

    Attributes:
        owner: Group rank that holds the data; None when nobody does.
        item: Its number.
        attempt: See :class:`ArrivingItem`.
        state: The owner's; FAILED where any rank failed.
        total: Bytes; None before the header came.
        arrived: Bytes that the owner has.
        layout: What the bytes are; None before the header came.
        several: Whether more than one rank holds data, which is an error.
    """

    owner: Optional[int]
    item: int = -1
    attempt: int = 0
    state: State = State.NEW
    total: Optional[int] = None
    arrived: int = 0
    layout: Optional[Layout] = None
    several: bool = False

    @property
    def ready(self) -> bool:
        """Whether the owner has all of it, checked."""
        return self.state >= State.READY


def facts_of(arriving: ArrivingItem, rank: int) -> Dict[str, int]:
    """Return what the rank that holds an item tells the others. Pure.

    Args:
        arriving: The item; another thread may be filling it.
        rank: This rank in its group.

    Raises:
        ValueError: If its layout is none that :data:`FIELDS` can hold.
    """
    while True:
        attempt = arriving.attempt
        # The state first: an item that is READY a moment later than it was asked for its bytes
        # would be READY without all of them.
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
            raise ValueError(f'features are {dtype}, expected one of '
                             f'{", ".join(map(str, DTYPES))}.')
    shapes = layout.shapes
    if len(shapes) > MAX_LEVELS or any(len(shape) != DIMS for shape in shapes):
        raise ValueError(f'features have the shapes {list(shapes)}, expected at most {MAX_LEVELS} '
                         f'levels of (n, channels, height, width).')
    sizes = [size for shape in shapes for size in shape]
    return dict(zip(_SIZES, sizes), dtype=DTYPES.index(layout.dtype),
                original=DTYPES.index(layout.original), levels=len(shapes))


def read_agreed(facts: Facts) -> Agreed:
    """Return what all ranks read in a tick. Pure."""
    failed = facts.min('state') == State.FAILED
    owner, levels = facts.max('owner'), facts.max('levels')
    if owner is None:
        return Agreed(None, state=State.FAILED if failed else State.NEW)
    layout = None
    if levels is not None:
        sizes = [facts.max(name) or 0 for name in _SIZES[:DIMS * levels]]
        shapes = tuple(tuple(sizes[DIMS * i:DIMS * (i + 1)]) for i in range(levels))
        layout = Layout(shapes, DTYPES[facts.max('dtype') or 0],
                        DTYPES[facts.max('original') or 0])
    item = facts.max('item')
    return Agreed(owner, -1 if item is None else item, facts.max('attempt') or 0,
                  State.FAILED if failed else State(facts.max('state') or 0), facts.max('total'),
                  facts.max('arrived') or 0, layout, facts.agree('owner') is False)


def fault_of(agreed: Agreed, before: Agreed) -> Optional[str]:
    """Return why what was agreed cannot be, or None. Pure: all ranks find the same.

    Args:
        agreed: In this tick.
        before: In the tick before, of the same item; without an owner in its first.
    """
    if agreed.owner is None:
        return 'no rank of the replica holds an item: one of them must bring what arrives'
    if agreed.total is None:
        told = f'{agreed.arrived} bytes arrived before a header, state {agreed.state.name}'
        return told if agreed.arrived or agreed.ready else None
    if not 0 <= agreed.arrived <= agreed.total:
        return f'{agreed.arrived} bytes arrived of {agreed.total}'
    if agreed.ready and agreed.arrived < agreed.total:
        return f'it is {agreed.state.name} and {agreed.arrived} bytes of {agreed.total} arrived'
    if before.owner is not None and before.attempt >= agreed.attempt and (
            (before.attempt, before.arrived) > (agreed.attempt, agreed.arrived)
            or before.total not in (None, agreed.total)):
        return (f'attempt {before.attempt} had {before.arrived} bytes of {before.total}, and then '
                f'attempt {agreed.attempt} had {agreed.arrived} of {agreed.total}')
    if agreed.layout is None or agreed.layout.nbytes != agreed.total:
        return f'it has {agreed.total} bytes, and they are {agreed.layout}'
    return None
