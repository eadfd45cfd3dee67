"""Agreement between ranks about facts that each of them knows only for itself."""
from __future__ import annotations

import difflib
import zlib
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from .channel import Channel, RankLostError, open_channel

# The largest and smallest fact: -2**63 has no negative in int64, and marks what was left out.
_LIMIT = 2**63 - 1
_NOTHING = -2**63
_SLOTS = 4  # numbers a field takes in the reduced tensor: see encode
# A rank that failed waits this long, in seconds, for peers that may be stuck where it will never
# come; its end is what frees them.
_PEER_SECONDS = 5.0
_MAX_TEXT = 4000  # characters of an error that travel


class DisagreementError(RuntimeError):
    """Ranks brought different values of a field that must agree.

    Attributes:
        field: Its name.
        values: Each rank's value; None where the rank had nothing to say.
    """

    def __init__(self, field: str, values: Mapping[int, Optional[int]]) -> None:
        self.field, self.values = field, dict(values)
        held: Dict[Optional[int], List[int]] = {}
        for rank, value in self.values.items():
            held.setdefault(value, []).append(rank)
        parts = [f'{value} on rank(s) {ranks}' for value, ranks in held.items()
                 if value is not None]
        super().__init__(f'ranks disagree on {field!r}: ' + ', '.join(parts) + '. It must be equal '
                         'on every rank: look for what these ranks read, count or draw otherwise.')


class RankError(RuntimeError):
    """Another rank failed inside :func:`all_ranks_or_none`.

    Attributes:
        rank: The lowest rank that failed, or the first where peers were stuck.
        text: Type and message of its exception.
    """

    def __init__(self, rank: int, text: str, what: str) -> None:
        super().__init__(f'rank {rank} failed in {what}: {text}')
        self.rank, self.text = rank, text


class Facts:
    """What all ranks said in one tick. Every answer is None for a field that nobody gave.

    Args:
        fields: The names, in order.
        reduced: The maxima over the ranks, int64 of :data:`_SLOTS` a field.
    """

    def __init__(self, fields: Sequence[str], reduced: Sequence[int]) -> None:
        self._slots = {field: reduced[_SLOTS * i:_SLOTS * (i + 1)]
                       for i, field in enumerate(fields)}

    def max(self, field: str) -> Optional[int]:
        """Return the largest value given."""
        return None if self._of(field)[0] == _NOTHING else self._of(field)[0]

    def min(self, field: str) -> Optional[int]:
        """Return the smallest value given."""
        return None if self._of(field)[1] == _NOTHING else -self._of(field)[1]

    def any(self, field: str) -> Optional[bool]:
        """Return whether a value given is not zero."""
        return None if self.max(field) is None else (self.max(field), self.min(field)) != (0, 0)

    def all(self, field: str) -> Optional[bool]:
        """Return whether no value given is zero. A rank that gave none does not object."""
        return None if self.max(field) is None else not self._of(field)[2]

    def agree(self, field: str) -> Optional[bool]:
        """Return whether the values given are equal. A rank that gave none does not object."""
        return None if self.max(field) is None else self.max(field) == self.min(field)

    def complete(self, field: str) -> bool:
        """Return whether every rank gave a value."""
        return not self._of(field)[3]

    def _of(self, field: str) -> Sequence[int]:
        if field not in self._slots:
            raise ValueError(_unknown(field, self._slots))
        return self._slots[field]


class Consensus:
    """Named int64 facts that all ranks bring together in one MAX all-reduce a tick.

    Making one is collective, and so is every tick: all ranks enter it, however little they have to
    say, and all ranks read the same answer. The tensor's shape depends on the fields alone.

    Args:
        fields: Names of the facts; equal on every rank.
        group: The ranks that agree; all when None, over a gloo group of its own. A group that is
            given must take CPU tensors.
        timeout: Seconds a rank may be late; the group's own time-out when None.
        must_agree: Fields on which a difference is an error.

    Raises:
        ValueError: If fields are missing, repeated or not equal on all ranks.
        RankLostError: Naming the ranks that did not come.
    """

    def __init__(self, fields: Sequence[str], group: Optional[dist.ProcessGroup] = None,
                 timeout: Optional[float] = None, must_agree: Sequence[str] = ()) -> None:
        self.fields, self.must_agree = tuple(fields), tuple(must_agree)
        if isinstance(fields, str) or not fields or len(set(fields)) != len(self.fields):
            raise ValueError(f'fields={fields!r}, expected one or more different names.')
        for field in self.must_agree:
            if field not in self.fields:
                raise ValueError(_unknown(field, self.fields))
        self._channel = open_channel(group, timeout)
        names = repr((self.fields, self.must_agree))
        # Ranks with different fields would reduce tensors of different shape, which gloo may
        # answer with wrong numbers; so this is asked first, in a shape all have.
        told = self._reduce(encode(('names',), dict(names=zlib.crc32(names.encode()))))
        if not Facts(('names',), told).agree('names'):
            assert self._channel is not None
            every = dict(zip(self._channel.ranks, self._channel.gather_texts(names)))
            raise ValueError(f'a Consensus must have the same (fields, must_agree) on every rank, '
                             f'got {every}.')

    def tick(self, **facts: int) -> Facts:
        """Bring this rank's facts and return what all ranks said. Collective.

        Args:
            **facts: int or bool by field name. A rank may leave out any of them.

        Raises:
            ValueError: If a name is unknown or a value is not an integer in ±(2**63 - 1). This
                rank raises it before the collective.
            DisagreementError: On every rank, if a field of ``must_agree`` differs.
            RankLostError: Naming the ranks that did not come.
        """
        mine = encode(self.fields, facts)
        result = Facts(self.fields, self._reduce(mine))
        # Read from the reduced numbers: every rank enters the second gather, or none does.
        for field in self.must_agree:
            if result.agree(field) is False:
                raise DisagreementError(field, self._gather(field, mine))
        return result

    def by_rank(self, field: str, value: Optional[int]) -> Dict[int, Optional[int]]:
        """Return each rank's value of one field by global rank. Collective.

        For naming the ranks once a tick has shown all of them that there is something to name.

        Args:
            field: Its name, equal on every rank.
            value: This rank's value; None for nothing to say.

        Raises:
            ValueError: If the name is unknown or the value out of range.
            RankLostError: Naming the ranks that did not come.
        """
        return self._gather(field, encode(self.fields, {} if value is None else {field: value}))

    def _reduce(self, mine: List[int]) -> List[int]:
        if self._channel is None:
            return mine
        tensor = torch.tensor(mine, dtype=torch.int64)
        self._channel.max(tensor)
        return tensor.tolist()

    def _gather(self, field: str, mine: List[int]) -> Dict[int, Optional[int]]:
        if self._channel is None:
            return {0: Facts(self.fields, mine).max(field)}
        every = self._channel.gather(torch.tensor(mine, dtype=torch.int64))
        return {rank: Facts(self.fields, numbers.tolist()).max(field)
                for rank, numbers in zip(self._channel.ranks, every)}


def encode(fields: Sequence[str], facts: Mapping[str, int]) -> List[int]:
    """Return the numbers whose maximum over ranks holds every answer of :class:`Facts`. Pure.

    A field takes four: its value, its negative, whether it is zero, whether it was left out. What
    is left out is smaller than any value, so that it changes no maximum.

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
                             f'travels as int64 together with its negative.')
    numbers: List[int] = []
    for field in fields:
        if field in facts:
            value = int(facts[field])
            numbers += [value, -value, int(value == 0), 0]
        else:
            numbers += [_NOTHING, _NOTHING, 0, 1]
    return numbers


@contextmanager
def all_ranks_or_none(what: str = 'this step', group: Optional[dist.ProcessGroup] = None,
                      timeout: Optional[float] = None) -> Iterator[None]:
    """Make an exception on one rank an exception on every rank, at the end of the block.

    The rank that fails raises its own exception, unchanged; the others raise :class:`RankError`
    with the text of the lowest rank that failed. Collective at the end of the block, and at its
    beginning on first use; KeyboardInterrupt and SystemExit pass through.

    Keep collectives out of the block: a rank that fails never comes to those that follow. Peers
    that wait in one are freed when the failed rank ends, which it may after five seconds, or by the
    time-out of their group; they then raise RankError with the text that it left for them.

    Args:
        what: Words for the error, for example ``'reading the scene list'``.
        group: As for :class:`Consensus`.
        timeout: Seconds a rank may be late; the group's own time-out when None.

    Raises:
        RankError: If another rank failed.
        RankLostError: Naming the ranks that did not come to the end of the block.
    """
    # a channel of its own: a peer may be inside a Consensus of the other one
    channel = open_channel(group, timeout, purpose='blocks')
    if channel is None:
        yield
        return
    block = f'block/{channel.next_number()}'
    try:
        yield
    except Exception as error:
        text = f'{type(error).__name__}: {error}'[:_MAX_TEXT]
        first = channel.publish(block, f'{channel.rank} {text}')
        try:
            _failed_rank(channel, True, text, _PEER_SECONDS)
        except RankLostError:
            cause = None if first else _left_for_us(channel, block, what)
            if cause is not None:  # this rank's collective broke when that one failed
                raise cause from error
        raise
    try:
        failed = _failed_rank(channel, False, '')
    except RankLostError as lost:
        cause = _left_for_us(channel, block, what)
        if cause is not None:
            raise cause from lost
        raise
    if failed:
        raise RankError(failed[0], failed[1], what)


def _failed_rank(channel: Channel, failed: bool, text: str,
                 patience: Optional[float] = None) -> Optional[tuple]:
    """Return the lowest rank that failed and its text, or None. Collective."""
    flag = torch.tensor([int(failed)])
    channel.max(flag, patience)
    if not flag.item():
        return None
    texts = channel.gather_texts(f'!{text}' if failed else '')
    return next((rank, each[1:]) for rank, each in zip(channel.ranks, texts) if each)


def _left_for_us(channel: Channel, block: str, what: str) -> Optional[RankError]:
    """Return the error that a rank published before it went."""
    published = channel.published(block)
    if published is None:
        return None
    rank, text = published.split(' ', 1)
    return None if int(rank) == channel.rank else RankError(int(rank), text, what)


def _unknown(field: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(field, list(fields), 1)
    return (f"unknown field {field!r}: expected {', '.join(fields)}."
            + (f' Did you mean {near[0]!r}?' if near else ''))
