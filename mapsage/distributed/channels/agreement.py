"""Turns an error on one rank into an error on every rank.

Without this, a rank that raises leaves its peers waiting in the next collective until the timeout.
Wrap code without collectives in :func:`all_ranks_or_none`. Use :func:`raise_together` if the ranks
have already learned from a collective that a rank failed (``consensus.py``).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Dict, Iterator, NoReturn, Optional

import torch
import torch.distributed as dist

from mapsage.base.errors import UserError

from .channel import Channel, RankLostError, bounded, error_text

# Seconds that a failed rank waits for its peers. They may be stuck in a collective that the failed
# rank will never enter, and only its end frees them.
_PEER_SECONDS = 5.0


class RankError(UserError, RuntimeError):
    """Another rank failed.

    Attributes:
        rank: Lowest global rank that failed, or the first rank that failed if peers were stuck.
        text: Type and message of its exception.

    Args:
        rank: Global rank that failed.
        text: Type and message of its exception.
        activity: Phrase for what the ranks were doing, for example ``'packing samples'``.
    """

    # The failed rank itself tells the launcher whether a restart can help.
    final = False

    def __init__(self, rank: int, text: str, activity: str) -> None:
        super().__init__(f'rank {rank} failed in {activity}: {text}')
        self.rank, self.text = rank, text


def raise_together(
    channel: Channel,
    error: Optional[Exception],
    activity: str,
    *,
    text: Optional[str] = None,
    everywhere: Optional[Callable[[Dict[int, str]], Exception]] = None,
) -> NoReturn:
    """Raise on every rank because at least one of them failed. Collective.

    Every rank must call this, so all ranks must have learned from the same gathered data that a
    rank failed. A failed rank raises ``error``; the others raise :class:`RankError` with the text
    of the lowest failed rank. With ``everywhere``, all ranks raise the same error instead. No
    message of an exception can break this: see :func:`error_text`.

    Args:
        channel: Channel to the ranks.
        error: Exception of this rank; None if it did not fail.
        activity: Phrase for what the ranks were doing, for example ``'packing samples'``.
        text: Text for the other ranks, if type and message of ``error`` are not enough.
        everywhere: Function that makes the error of all ranks. Its argument maps the global ranks
            that failed to their texts.

    Raises:
        RankLostError: Naming the missing ranks, if this rank has no exception to raise.
    """
    local_text = bounded(text) if text else '' if error is None else error_text(error)
    try:
        gathered = channel.gather_texts(local_text)
    except RankLostError as lost:
        if error is None or everywhere is not None:
            raise lost from error
        # A peer that has ended in the meantime is a lesser cause than the error of this rank.
        gathered = []
    texts = {rank: rank_text for rank, rank_text in zip(channel.ranks, gathered) if rank_text}
    if everywhere is not None:
        raise everywhere(texts) from error
    if error is not None:
        raise error
    rank = next(iter(texts))
    raise RankError(rank, texts[rank], activity)


@contextmanager
def all_ranks_or_none(
    activity: str = 'this step',
    group: Optional[dist.ProcessGroup] = None,
    timeout: Optional[float] = None,
) -> Iterator[None]:
    """Turn an exception on one rank into an exception on every rank, at the end of the block.

    A rank that fails raises its own exception, unchanged; the others raise :class:`RankError` with
    the text of the lowest failed rank. The end of the block is collective. KeyboardInterrupt and
    SystemExit pass through.

    Keep collectives out of the block: a failed rank never enters the later ones. Peers that wait in
    one are freed when the failed rank ends, five seconds after its error, or by the timeout of
    their group. They then raise RankError with the text that the failed rank published.

    Args:
        activity: Phrase for the error message, for example ``'reading the scene list'``.
        group: Process group, as for :class:`Consensus`.
        timeout: Seconds a rank may be late; the group's timeout when None.

    Raises:
        RankError: If another rank failed.
        RankLostError: Naming the ranks that did not reach the end of the block.
    """
    # Imported here, because the sampling library agrees over a channel of its own.
    from .open_channels import open_channel

    # No other purpose uses this channel, so a peer inside a Consensus cannot be in its collectives.
    channel = open_channel(group, timeout, purpose='blocks')
    block = f'block/{channel.next_number()}'
    try:
        yield
    except Exception as error:
        # RankLostError is not published: the lost rank may have published the cause itself.
        is_first = not isinstance(error, RankLostError) and channel.publish(
            block, f'{channel.rank} {error_text(error)}'
        )
        try:
            channel.max(torch.tensor([1]), _PEER_SECONDS)
            peers_came = True
        # RankLostError, or the process group was destroyed.
        except RuntimeError:
            peers_came = False
        if peers_came:
            raise_together(channel, error, activity)
        cause = None if is_first else _published_error(channel, block, activity)
        # A collective in the block broke on this rank because the publishing rank had failed.
        if cause is not None:
            raise cause from error
        raise
    failed = torch.tensor([0])
    try:
        channel.max(failed)
        if failed.item():
            raise_together(channel, None, activity)
    except RankLostError as lost:
        cause = _published_error(channel, block, activity)
        if cause is not None:
            raise cause from lost
        raise


def _published_error(channel: Channel, block: str, activity: str) -> Optional[RankError]:
    """Return the error that another rank published before it ended, or None."""
    published = channel.published(block)
    if published is None:
        return None
    rank, text = published.split(' ', 1)
    return None if int(rank) == channel.rank else RankError(int(rank), text, activity)
