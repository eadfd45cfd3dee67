"""An error on one rank becomes an error on every rank."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Dict, Iterator, NoReturn, Optional

import torch
import torch.distributed as dist

from mapsage.errors import UserError

from .channel import Channel, RankLostError, bounded, error_text
from .group_channel import open_channel

# How long a rank that failed waits for peers that may be stuck in a collective which it will never
# enter, in seconds; they are freed when it ends.
_PEER_SECONDS = 5.0


class RankError(UserError, RuntimeError):
    """Another rank failed.

    Attributes:
        rank: Lowest global rank that failed, or the first one where peers were stuck.
        text: Type and message of its exception.
    """

    # whether it is final, the rank that failed tells the launcher
    final = False

    def __init__(self, rank: int, text: str, what: str) -> None:
        super().__init__(f'rank {rank} failed in {what}: {text}')
        self.rank, self.text = rank, text


def raise_together(channel: Channel, error: Optional[Exception], what: str, *,
                   text: Optional[str] = None,
                   everywhere: Optional[Callable[[Dict[int, str]], Exception]] = None) -> NoReturn:
    """Raise on every rank because at least one of them failed. Collective.

    All ranks must have learned from the same gathered data that one failed. A rank that failed
    raises its own exception and the others :class:`RankError` with the text of the lowest rank that
    failed, unless ``everywhere`` makes one error for all. No text can prevent it: see
    :func:`error_text`.

    Args:
        channel: Channel to the ranks.
        error: Exception of this rank; None where it did not fail.
        what: Words for what the ranks were doing, for example ``'packing samples'``.
        text: Words that the other ranks get, where type and message of ``error`` are not enough.
        everywhere: Makes the error that every rank raises from the texts by global rank. Only
            ranks that failed have one.

    Raises:
        RankLostError: Naming the ranks that did not come, where this rank has no exception of its
            own to raise.
    """
    mine = bounded(text) if text else '' if error is None else error_text(error)
    try:
        gathered = channel.gather_texts(mine)
    except RankLostError as lost:
        if error is None or everywhere is not None:
            raise lost from error
        gathered = []  # this rank's own error says more than that a peer has gone since
    texts = {rank: each for rank, each in zip(channel.ranks, gathered) if each}
    if everywhere is not None:
        raise everywhere(texts) from error
    if error is not None:
        raise error
    rank = next(iter(texts))
    raise RankError(rank, texts[rank], what)


@contextmanager
def all_ranks_or_none(what: str = 'this step', group: Optional[dist.ProcessGroup] = None,
                      timeout: Optional[float] = None) -> Iterator[None]:
    """Turn an exception on one rank into an exception on every rank, at the end of the block.

    A rank that fails raises its own exception, unchanged; the others raise :class:`RankError` with
    the text of the lowest rank that failed. Collective at the end of the block, and at its
    beginning on first use; KeyboardInterrupt and SystemExit pass through.

    Keep collectives out of the block: a rank that fails never enters those that follow. Peers that
    wait in one are freed when the failed rank ends, which happens after five seconds, or by the
    timeout of their group; they then raise RankError with the text that it left for them.

    Args:
        what: Words for the error, for example ``'reading the scene list'``.
        group: Process group, as for :class:`Consensus`.
        timeout: Seconds a rank may be late; the group's own timeout when None.

    Raises:
        RankError: If another rank failed.
        RankLostError: Naming the ranks that did not come to the end of the block.
    """
    # A channel of its own: a peer may be inside a Consensus of another one.
    channel = open_channel(group, timeout, purpose='blocks')
    block = f'block/{channel.next_number()}'
    try:
        yield
    except Exception as error:
        # A rank that missed another one says nothing about why: that one may have told.
        first = (not isinstance(error, RankLostError)
                 and channel.publish(block, f'{channel.rank} {error_text(error)}'))
        try:
            channel.max(torch.tensor([1]), _PEER_SECONDS)
            peers_came = True
        except RuntimeError:  # also where the group no longer exists
            peers_came = False
        if peers_came:
            raise_together(channel, error, what)
        cause = None if first else _published_error(channel, block, what)
        if cause is not None:  # a collective in the block broke when that rank failed
            raise cause from error
        raise
    failed = torch.tensor([0])
    try:
        channel.max(failed)
        if failed.item():
            raise_together(channel, None, what)
    except RankLostError as lost:
        cause = _published_error(channel, block, what)
        if cause is not None:
            raise cause from lost
        raise


def _published_error(channel: Channel, block: str, what: str) -> Optional[RankError]:
    """Return the error that another rank published before it ended."""
    published = channel.published(block)
    if published is None:
        return None
    rank, text = published.split(' ', 1)
    return None if int(rank) == channel.rank else RankError(int(rank), text, what)
