"""Agreement between ranks about facts that each of them knows only for itself."""
from __future__ import annotations

import difflib
import zlib
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.errors import UserError

from .group_channel import open_channel

_LIMIT = 2**63 - 1  # facts lie between its negative and itself
_NOTHING = -2**63  # stands for a fact that a rank left out
# Up to this many bytes from all ranks, one gather is as quick as the maximum that may save it.
_GATHER_BYTES = 4096


class DisagreementError(UserError, RuntimeError):
    """Ranks gave different values of a field that must agree.

    Attributes:
        field: Name of the field.
        values: Value of each global rank that gave one.
    """

    def __init__(self, field: str, values: Mapping[int, int]) -> None:
        self.field, self.values = field, dict(values)
        held: Dict[int, List[int]] = {}
        for rank, value in self.values.items():
            held.setdefault(value, []).append(rank)
        parts = [f'{value} on rank(s) {ranks}' for value, ranks in held.items()]
        super().__init__(f'ranks disagree on {field!r}: ' + ', '.join(parts) + '. It must be equal '
                         'on every rank: look for what these ranks read, count or draw otherwise.')


class Facts:
    """What all ranks gave in one tick; equal on every rank.

    Args:
        fields: Names of the facts, in order.
        slots: Numbers of each global rank as :func:`fact_slots` returns them, in group order.
    """

    def __init__(self, fields: Sequence[str], slots: Mapping[int, Sequence[int]]) -> None:
        self._places = {field: place for place, field in enumerate(fields)}
        self._slots = slots

    def by_rank(self, field: str) -> Dict[int, int]:
        """Return the values by global rank, in group order, without ranks that gave none."""
        if field not in self._places:
            raise ValueError(_unknown(field, self._places))
        place = self._places[field]
        return {rank: slots[place] for rank, slots in self._slots.items()
                if slots[place] != _NOTHING}

    def max(self, field: str) -> Optional[int]:
        """Return the largest value; None if no rank gave one."""
        return max(self.by_rank(field).values(), default=None)

    def min(self, field: str) -> Optional[int]:
        """Return the smallest value; None if no rank gave one."""
        return min(self.by_rank(field).values(), default=None)

    def sum(self, field: str) -> int:
        """Return the sum of the values; 0 if no rank gave one."""
        return sum(self.by_rank(field).values())

    def any(self, field: str) -> Optional[bool]:
        """Return whether a value is not zero; None if no rank gave one."""
        values = self.by_rank(field).values()
        return any(values) if values else None

    def all(self, field: str) -> Optional[bool]:
        """Return whether no value is zero; None if no rank gave one."""
        values = self.by_rank(field).values()
        return all(values) if values else None

    def agree(self, field: str) -> Optional[bool]:
        """Return whether all values are equal; None if no rank gave one."""
        values = set(self.by_rank(field).values())
        return len(values) == 1 if values else None

    def complete(self, field: str) -> bool:
        """Return whether every rank gave a value."""
        return len(self.by_rank(field)) == len(self._slots)


class Consensus:
    """Named int64 facts of all ranks, told in every tick.

    Creating one is collective, and so is every tick: all ranks enter it, however little they have
    to say, and all ranks read the same answer. Few ranks gather their facts, eight bytes per field
    and rank. Where that would be over 4 KiB, they first agree on the maximum and minimum of each
    fact, 16 bytes per field, and gather only if these differ. The tensor's shape depends on the
    fields alone.

    Args:
        fields: Names of the facts; equal on every rank.
        group: Process group of the ranks that agree; all ranks when None.
        timeout: Seconds a rank may be late; the group's own timeout when None.
        must_agree: Names of the fields on which a difference is an error.
        purpose: Name of the use, as for :func:`open_channel`.

    Attributes:
        channel: Channel to the ranks, for what they do about the facts.

    Raises:
        ValueError: If fields are missing, repeated or not equal on all ranks.
        RankLostError: Naming the ranks that did not come.
    """

    def __init__(self, fields: Sequence[str], group: Optional[dist.ProcessGroup] = None,
                 timeout: Optional[float] = None, must_agree: Sequence[str] = (),
                 purpose: str = '') -> None:
        self.fields, self.must_agree = tuple(fields), tuple(must_agree)
        if isinstance(fields, str) or not fields or len(set(fields)) != len(self.fields):
            raise ValueError(f'fields={fields!r}, expected one or more different names.')
        for field in self.must_agree:
            if field not in self.fields:
                raise ValueError(_unknown(field, self.fields))
        self.channel = open_channel(group, timeout, purpose)
        names = repr((self.fields, self.must_agree))
        # Ranks with different fields would gather tensors of different shapes, which gloo may
        # answer with wrong numbers. So their names are compared first, in a shape that all have.
        if not self._gather(('names',), [zlib.crc32(names.encode())]).agree('names'):
            every = dict(zip(self.channel.ranks, self.channel.gather_texts(names)))
            raise ValueError(f'a Consensus must have the same (fields, must_agree) on every rank, '
                             f'got {every}.')

    def tick(self, **facts: int) -> Facts:
        """Give this rank's facts and return those of all ranks. Collective.

        Args:
            **facts: Values by field name, int or bool. A rank may leave out any of them.

        Raises:
            ValueError: If a name is unknown or a value is not an integer in ±(2**63 - 1). This
                rank raises it before the collective.
            DisagreementError: On every rank, if a field of ``must_agree`` differs.
            RankLostError: Naming the ranks that did not come.
        """
        result = self._gather(self.fields, fact_slots(self.fields, facts))
        for field in self.must_agree:
            if result.agree(field) is False:
                raise DisagreementError(field, result.by_rank(field))
        return result

    def _gather(self, fields: Sequence[str], slots: List[int]) -> Facts:
        mine, ranks = torch.tensor(slots, dtype=torch.int64), self.channel.ranks
        if mine.numel() * mine.element_size() * len(ranks) > _GATHER_BYTES:
            largest = torch.stack([mine, ~mine])  # ~ turns the order around, and never overflows
            self.channel.max(largest)
            if torch.equal(largest[0], ~largest[1]):
                return Facts(fields, dict.fromkeys(ranks, slots))
        every = self.channel.gather(mine)
        return Facts(fields, {rank: numbers.tolist() for rank, numbers in zip(ranks, every)})


def fact_slots(fields: Sequence[str], facts: Mapping[str, int]) -> List[int]:
    """Return the numbers that a rank sends: one for each field, in order. Pure.

    Raises:
        ValueError: If a name is unknown or a value is not an integer in ±(2**63 - 1).
    """
    for name, value in facts.items():
        if name not in fields:
            raise ValueError(_unknown(name, fields))
        if not isinstance(value, int):  # bool is one
            raise ValueError(f'fact {name}={value!r} is a {type(value).__name__}, expected int or '
                             f'bool. Leave it out where this rank has nothing to say.')
        if not -_LIMIT <= value <= _LIMIT:
            raise ValueError(f'fact {name}={value} is outside -(2**63 - 1) to 2**63 - 1: it '
                             f'travels as int64, whose smallest number stands for no value.')
    return [int(facts[field]) if field in facts else _NOTHING for field in fields]


def _unknown(field: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(field, list(fields), 1)
    return (f"unknown field {field!r}: expected {', '.join(fields)}."
            + (f' Did you mean {near[0]!r}?' if near else ''))
