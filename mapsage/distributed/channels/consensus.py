"""Exchange of small integers ("facts") between ranks, so that all ranks take the same decision.

A rank knows only its own loader, pool and errors, but collectives need the same decision
on all ranks. So each rank gives its facts to :meth:`Consensus.tick` and decides from the returned
:class:`Facts`, which are equal on all ranks. Errors of a rank are raised with ``agreement.py``.
"""

from __future__ import annotations

import difflib
import zlib
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.base.errors import UserError

from .channel import Channel

# A fact lies between -_LIMIT and _LIMIT.
_LIMIT = 2**63 - 1
# Sent for a fact that a rank left out.
_NOTHING = -(2**63)
# Up to this many bytes from all ranks together, a gather is as quick as a maximum.
_GATHER_BYTES = 4096


class DisagreementError(UserError, RuntimeError):
    """Ranks gave different values of a field that must agree.

    Attributes:
        field: Name of the field.
        values: Values by global rank, without ranks that gave none.
    """

    def __init__(self, field: str, values: Mapping[int, int]) -> None:
        self.field, self.values = field, dict(values)
        ranks_by_value: Dict[int, List[int]] = {}
        for rank, value in self.values.items():
            ranks_by_value.setdefault(value, []).append(rank)
        listed = ', '.join(f'{value} on rank(s) {ranks}' for value, ranks in ranks_by_value.items())
        super().__init__(
            f'ranks disagree on {field!r}: {listed}. It must be equal on every rank: '
            'look for what these ranks read, count or draw differently.'
        )


class Facts:
    """The facts of all ranks in one tick; equal on every rank.

    Args:
        fields: Names of the facts, in order.
        slots: Numbers of :func:`fact_slots` by global rank, in group order.
    """

    def __init__(self, fields: Sequence[str], slots: Mapping[int, Sequence[int]]) -> None:
        self._columns = {field: column for column, field in enumerate(fields)}
        self._slots = slots

    def by_rank(self, field: str) -> Dict[int, int]:
        """Return the values by global rank, in group order, without ranks that gave none."""
        if field not in self._columns:
            raise ValueError(_describe_unknown(field, self._columns))
        column = self._columns[field]
        return {
            rank: slots[column] for rank, slots in self._slots.items() if slots[column] != _NOTHING
        }

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
    """Named int64 facts of all ranks, exchanged in every tick.

    Creating a Consensus is collective, and so is every tick: all ranks enter it, even without a
    fact to give, and all ranks get the same answer. A tick gathers the facts, eight bytes per field
    and rank. If that is more than 4 KiB, the ranks first reduce the maximum and minimum of every
    fact, 16 bytes per field, and gather only if these differ. The shapes depend on the fields and
    the number of ranks only, never on the facts of one rank.

    Args:
        fields: Names of the facts; equal on every rank.
        group: Process group of the ranks that agree; all ranks when None.
        timeout: Seconds a rank may be late; the group's timeout when None.
        must_agree: Names of the fields on which a difference is an error.
        purpose: Name of the use, as for :func:`open_channel`.
        channel: Channel to the ranks, in place of group, timeout and purpose.

    Attributes:
        channel: Channel to the ranks, for collectives that follow from the facts.

    Raises:
        ValueError: If fields are missing, repeated or not equal on all ranks.
        RankLostError: Naming the ranks that did not come.
    """

    def __init__(
        self,
        fields: Sequence[str],
        group: Optional[dist.ProcessGroup] = None,
        timeout: Optional[float] = None,
        must_agree: Sequence[str] = (),
        purpose: str = '',
        channel: Optional[Channel] = None,
    ) -> None:
        self.fields, self.must_agree = tuple(fields), tuple(must_agree)
        if isinstance(fields, str) or not fields or len(set(fields)) != len(self.fields):
            raise ValueError(f'fields={fields!r}, expected one or more different names.')
        for field in self.must_agree:
            if field not in self.fields:
                raise ValueError(_describe_unknown(field, self.fields))
        if channel is None:
            # Imported here, because the sampling library brings a channel.
            from .open_channels import open_channel

            channel = open_channel(group, timeout, purpose)
        self.channel = channel
        names = repr((self.fields, self.must_agree))
        # Ranks with different fields would gather tensors of different shapes. So the ranks compare
        # a checksum of the names first, whose shape is the same on all of them.
        if not self._gather(('names',), [zlib.crc32(names.encode())]).agree('names'):
            names_by_rank = dict(zip(self.channel.ranks, self.channel.gather_texts(names)))
            raise ValueError(
                f'a Consensus must have the same (fields, must_agree) on every rank, '
                f'got {names_by_rank}.'
            )

    def tick(self, **facts: int) -> Facts:
        """Send this rank's facts and return the facts of all ranks. Collective.

        Args:
            **facts: Values by field name, int or bool. A rank may leave out any field.

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
        local_slots, ranks = torch.tensor(slots, dtype=torch.int64), self.channel.ranks
        if local_slots.numel() * local_slots.element_size() * len(ranks) > _GATHER_BYTES:
            # ~ reverses the order, so one maximum finds both ends. Unlike -, it never overflows.
            largest = torch.stack([local_slots, ~local_slots])
            self.channel.max(largest)
            if torch.equal(largest[0], ~largest[1]):
                return Facts(fields, dict.fromkeys(ranks, slots))
        gathered = self.channel.gather(local_slots)
        return Facts(fields, {rank: row.tolist() for rank, row in zip(ranks, gathered)})


def fact_slots(fields: Sequence[str], facts: Mapping[str, int]) -> List[int]:
    """Return the numbers that a rank sends, one for each field, in order. Pure.

    Raises:
        ValueError: If a name is unknown or a value is not an integer in ±(2**63 - 1).
    """
    for name, value in facts.items():
        if name not in fields:
            raise ValueError(_describe_unknown(name, fields))
        # bool is a subclass of int.
        if not isinstance(value, int):
            raise ValueError(
                f'fact {name}={value!r} is a {type(value).__name__}, expected int or '
                f'bool. Leave it out if this rank has no value.'
            )
        if not -_LIMIT <= value <= _LIMIT:
            raise ValueError(
                f'fact {name}={value} is outside -(2**63 - 1) to 2**63 - 1: it '
                f'travels as int64, whose smallest number stands for no value.'
            )
    return [int(facts[field]) if field in facts else _NOTHING for field in fields]


def _describe_unknown(field: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(field, list(fields), 1)
    return f'unknown field {field!r}: expected {", ".join(fields)}.' + (
        f' Did you mean {near[0]!r}?' if near else ''
    )
