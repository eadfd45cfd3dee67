"""Names the rank at fault when a collective of torch.distributed itself breaks.

Gradients, metrics and a model's own collectives do not use a channel, which would name the missing
rank. Gloo reports a dead peer by its address only, and a silent peer not at all, just a timeout. So
every rank that fails writes a note into the rendezvous store: its error, or an empty text if its
error is only the broken collective. A rank without a note has died, hangs, or waits elsewhere. One
rank reads all notes and stores the finding for the others. A healthy run sends no requests.
"""

from __future__ import annotations

import itertools
import json
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Protocol, Tuple

import torch.distributed as dist

from .channels.agreement import RankError, error_text
from .channels.channel import RankLostError
from .channels.main_thread import (
    Activity,
    Position,
    find_stragglers,
    line_of,
    set_broken_collective,
)
from .channels.missing_ranks import describe_pause, describe_position
from .channels.open_channels import ask_positions, known_ends, known_pause
from .store import LockedStore

# The reader of the notes waits until no new note has come for this long, in seconds. Ranks in the
# same collective time out shortly one after the other.
_QUIET_SECONDS = 3.0
# Longest time for all notes, in seconds.
_MOST_SECONDS = 30.0
_PAUSE_SECONDS = 0.05

# How NCCL and eccl name a call that they refuse.
_REFUSALS = ('ncclInvalidArgument', 'ecclInvalidArgument')


class LossWatch(Protocol):
    """Notices lost ranks outside of collectives, as a heartbeat between machines does."""

    def lost_ranks(self) -> Dict[int, str]:
        """Return the ranks that were found to be lost, each with a text about it or ''."""

    def leave(self) -> None:
        """Say that this process ends as it should, so that its end is not taken for a loss."""


# Watches of this process. An extra adds the one that it starts.
watches: List[LossWatch] = []


def leave_watches() -> None:
    """Say goodbye to all watches."""
    for watch in watches:
        watch.leave()


# Numbers of the blocks, for their keys in the store; equal on all ranks.
_blocks = itertools.count()


class _Finding(NamedTuple):
    """The reason why a collective broke.

    Attributes:
        failed: A rank that failed for another reason than the broken collective, and its error; or
            None.
        lost: If no rank failed so: the ranks that are lost, and what is known about them or ''.
    """

    failed: Optional[Tuple[int, str]]
    lost: Dict[int, str]


@contextmanager
def lost_ranks_named(activity: str) -> Iterator[None]:
    """Turn the error of a broken collective in the block into one that names the rank at fault.

    Other errors pass unchanged. Every rank must enter the block.

    Args:
        activity: Phrase for the error message, for example ``'training'``.

    Raises:
        RankError: If a collective broke because another rank failed with an error.
        RankLostError: If a collective broke because ranks died, hang or took another path.
    """
    prefix = f'mapsage/lost_ranks/{next(_blocks)}'
    set_broken_collective(None)
    try:
        yield
    except Exception as error:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        try:
            cause = _find_cause(prefix, error, activity)
        # Usually the process that keeps the store has ended. Whatever fails here must not replace
        # the error of the block.
        except Exception:
            ended = _ended_ranks() if _is_broken_collective(error) else {}
            cause = _make_lost_error(ended, error, activity) if ended else None
        if cause is None:
            raise
        raise cause from error


def _find_cause(prefix: str, error: Exception, activity: str) -> Optional[Exception]:
    """Write this rank's note, and return the error that names the rank at fault.

    Returns:
        None if ``error`` is not a broken collective, or if the cause cannot be found.
    """
    store = LockedStore(dist.distributed_c10d._get_default_store())
    rank, is_broken = dist.get_rank(), _is_broken_collective(error)
    is_cause = not is_broken and not isinstance(error, (RankError, RankLostError))
    if not is_cause:
        set_broken_collective(error)
    store.set(f'{prefix}/line/{rank}', line_of(error))
    store.set(f'{prefix}/note/{rank}', error_text(error) if is_cause else '')
    paused = known_pause()
    if paused:
        store.add(f'{prefix}/paused/{rank}', int(paused))
    store.add(f'{prefix}/notes', 1)
    if not is_broken:
        return None
    finding = _find_together(store, prefix)
    if finding is None:
        ended = _ended_ranks()
        return _make_lost_error(ended, error, activity) if ended else None
    if finding.failed is not None:
        return RankError(*finding.failed, activity)
    # A watch names the ranks that broke the collective; other ranks without a note were late.
    return _make_lost_error(_watched_losses() or finding.lost, error, activity)


def _watched_losses() -> Dict[int, str]:
    return next(filter(None, (watch.lost_ranks() for watch in watches)), {})


def _ended_ranks() -> Dict[int, str]:
    """Return the ranks that have ended, as this process knows without the store."""
    return _watched_losses() or known_ends()


def _make_lost_error(ranks: Dict[int, str], error: Exception, activity: str) -> RankLostError:
    """Return the error about lost ranks, with what is known about them."""
    rank = dist.get_rank()
    # If other ranks are lost too, this rank may only have failed after the notes were read.
    ranks = {lost_rank: reason for lost_rank, reason in ranks.items() if lost_rank != rank} or ranks
    description = (
        f'the others have waited for it, rank {rank}, in vain'
        if rank in ranks
        else f'rank(s) {list(ranks)} did not come to it in time'
        if ranks
        else 'every rank failed in it, so one was late'
    )
    reasons = ''.join(f'{reason[:1].upper()}{reason[1:]}. ' for reason in ranks.values() if reason)
    advice = (
        'The others have given up.'
        if rank in ranks
        else 'They died, hang, or took a path '
        'without this collective: look at the first error in their log.'
    )
    return RankLostError(
        f'rank {rank} waited in a collective of torch.distributed in {activity} and {description} '
        f'({(str(error).splitlines() or [""])[0]}). {reasons}{advice}',
        list(ranks),
    )


def _is_broken_collective(error: BaseException) -> bool:
    """Return whether an error comes from a backend, because of another rank."""
    # A tensor or an operation that the backend does not take, such as int64 with eccl.
    if any(refusal in str(error) for refusal in _REFUSALS):
        return False
    # torch 1.10 has none of these classes, and raises RuntimeError.
    kinds: Tuple[type, ...] = tuple(
        getattr(dist, name)
        for name in ('DistBackendError', 'DistNetworkError')
        if hasattr(dist, name)
    )
    return isinstance(error, kinds) or (type(error) is RuntimeError and 'gloo/' in str(error))


def _find_together(store: LockedStore, prefix: str) -> Optional[_Finding]:
    """Return the finding of the rank that reads the notes for all; None if that rank has ended.

    Not every rank reads the notes: a later reader would take ranks for lost that have left a note
    and ended in the meantime.
    """
    if store.add(f'{prefix}/reader', 1) == 1:
        _await_notes(store, prefix)
        finding = _read_notes(store, prefix)
        store.set(f'{prefix}/found', json.dumps([finding.failed, list(finding.lost.items())]))
        return finding
    deadline = time.monotonic() + _MOST_SECONDS + _QUIET_SECONDS
    while time.monotonic() < deadline:
        text = store.find(f'{prefix}/found')
        if text is not None:
            failed, lost = json.loads(text)
            return _Finding(failed, dict(lost))
        time.sleep(_PAUSE_SECONDS)
    return None


def _read_notes(store: LockedStore, prefix: str) -> _Finding:
    """Return the finding from the notes and what is known about the ranks without a note."""
    silent, late = [], {}
    for rank in range(dist.get_world_size()):
        text = store.find(f'{prefix}/note/{rank}')
        if text:
            return _Finding((rank, text), {})
        if text is None:
            silent.append(rank)
        paused = store.add(f'{prefix}/paused/{rank}', 0)
        if paused:
            late[rank] = f'rank {rank} {describe_pause(paused)}'
    # A rank without a note need not be lost: only the neighbors of a dead rank notice its end. The
    # other ranks still wait, for ranks that have failed, and have no note yet.
    ended = known_ends(silent)
    if late and not silent:
        return _Finding(None, late)
    if ended.keys() & set(silent):
        return _Finding(None, {rank: ended[rank] for rank in silent if rank in ended})
    return _Finding(None, _find_hanging(store, prefix, silent))


def _find_hanging(store: LockedStore, prefix: str, silent: List[int]) -> Dict[int, str]:
    """Return the ranks that the others wait for, and what is known about them.

    A rank without a note may itself wait, in a later collective of another kind. If all ranks wait,
    one of them may have been in a collective that no other rank has entered.
    """
    positions = ask_positions(prefix, silent)
    mute = [rank for rank in silent if rank not in positions]
    # If no rank answers, this job has opened no channel yet, and all ranks without a note count.
    hanging = mute or find_stragglers(positions)
    if all(
        rank in positions and positions[rank].activity == Activity.IN_COLLECTIVE for rank in hanging
    ):
        for rank in set(range(dist.get_world_size())) - set(silent):
            positions[rank] = Position(
                Activity.IN_COLLECTIVE, store.find(f'{prefix}/line/{rank}') or ''
            )
        hanging = find_stragglers(positions)
        if len(hanging) == len(positions):
            return {}
    return {
        rank: f'rank {rank} answers{describe_position(positions[rank])}'
        if rank in positions
        else ''
        for rank in hanging
    }


def _await_notes(store: LockedStore, prefix: str) -> None:
    """Wait until all ranks have left a note, or no new note has come for a while."""
    now = time.monotonic()
    end, quiet, seen = now + _MOST_SECONDS, now + _QUIET_SECONDS, 0
    while seen < dist.get_world_size() and time.monotonic() < min(end, quiet):
        count = store.add(f'{prefix}/notes', 0)
        if count != seen:
            seen, quiet = count, time.monotonic() + _QUIET_SECONDS
        time.sleep(_PAUSE_SECONDS)
