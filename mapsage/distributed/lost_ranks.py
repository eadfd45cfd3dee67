"""Names the rank at fault where a collective of torch.distributed itself breaks.

Gradients, metrics and whatever a model does with ``torch.distributed`` do not go over a channel.
Gloo reports a dead peer by its address and a silent one, after its timeout, not at all. So each
rank that fails leaves a note in the rendezvous store: with its error, where that is one of its own.
A rank that leaves no note has died or hangs. A healthy run asks the store for nothing, and one rank
alone reads the notes of all.
"""
from __future__ import annotations

import itertools
import json
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch.distributed as dist

from .channels.agreement import RankError, error_text
from .channels.channel import RankLostError
from .channels.group_channel import ask_positions, known_ends, known_pause
from .channels.main_thread import Activity, Position, find_stragglers, line_of
from .channels.roll_call import describe_pause, describe_position
from .nodes.heartbeat import lost_by_heartbeat
from .store import LockedStore

# A rank that failed waits until no other has failed for this long, in seconds: ranks that wait for
# the same collective time out one shortly after the other.
_QUIET_SECONDS = 3.0
_MOST_SECONDS = 30.0
_PAUSE_SECONDS = 0.05

_blocks = itertools.count()  # equal on all ranks


class _Finding(NamedTuple):
    failed: Optional[Tuple[int, str]]  # a rank with an error of its own, and that error
    lost: Dict[int, str]  # else the ranks that are lost, each with what is known about its end


@contextmanager
def lost_ranks_named(what: str) -> Iterator[None]:
    """Turn the error of a broken collective in the block into one that names the rank at fault.

    Other errors pass unchanged. Every rank must enter the block.

    Args:
        what: Words for the error, for example ``'training'``.

    Raises:
        RankError: Where a collective broke because another rank failed by an error of its own.
        RankLostError: Where it broke because of ranks that died, hang or took another path.
    """
    place = f'mapsage/lost_ranks/{next(_blocks)}'
    try:
        yield
    except Exception as error:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        try:
            cause = _cause(place, error, what)
        except Exception:  # such as that the process which keeps the store has ended
            ended = lost_by_heartbeat() or known_ends() if _is_broken_collective(error) else {}
            cause = _lost(ended, error, what) if ended else None
        if cause is None:
            raise
        raise cause from error


def _cause(place: str, error: Exception, what: str) -> Optional[Exception]:
    """Leave a note, and return the error that names the rank at fault; None where this one does."""
    store = LockedStore(dist.distributed_c10d._get_default_store())
    rank, broken = dist.get_rank(), _is_broken_collective(error)
    own = not broken and not isinstance(error, (RankError, RankLostError))
    store.set(f'{place}/line/{rank}', line_of(error))
    store.set(f'{place}/note/{rank}', error_text(error) if own else '')
    paused = known_pause()
    if paused:
        store.add(f'{place}/paused/{rank}', int(paused))
    store.add(f'{place}/notes', 1)
    if not broken:
        return None
    found = _find(store, place)
    if found is None:
        ended = lost_by_heartbeat() or known_ends()
        return _lost(ended, error, what) if ended else None
    if found.failed is not None:
        return RankError(*found.failed, what)
    if lost_by_heartbeat():  # these broke it; others that left no note were too late
        return _lost(lost_by_heartbeat(), error, what)
    return _lost(found.lost, error, what)


def _lost(ranks: Dict[int, str], error: Exception, what: str) -> RankLostError:
    """Return the error about missing ranks, given what is known about their ends."""
    rank = dist.get_rank()
    # One that is not alone in the finding may have failed after the look.
    ranks = {each: why for each, why in ranks.items() if each != rank} or ranks
    who = (f'the others have waited for it, rank {rank}, in vain' if rank in ranks else
           f'rank(s) {list(ranks)} did not come to it in time' if ranks else
           'every rank failed in it, so one was late')
    known = ''.join(f'{why[:1].upper()}{why[1:]}. ' for why in ranks.values() if why)
    advice = ('The others have given up.' if rank in ranks else 'They died, hang, or took a path '
              'without this collective: look at the first error in their log.')
    return RankLostError(
        f'rank {rank} waited in a collective of torch.distributed in {what} and {who} '
        f'({(str(error).splitlines() or [""])[0]}). {known}{advice}', list(ranks))


def _is_broken_collective(error: BaseException) -> bool:
    kinds: Tuple[type, ...] = tuple(
        getattr(dist, name) for name in ('DistBackendError', 'DistNetworkError')
        if hasattr(dist, name))
    return isinstance(error, kinds) or (type(error) is RuntimeError and 'gloo/' in str(error))


def _find(store: LockedStore, place: str) -> Optional[_Finding]:
    """Return who is at fault, which one rank finds out for all; None if that one is gone.

    A second look, at a later moment, would take ranks for lost that have reported and left.
    """
    if store.add(f'{place}/reader', 1) == 1:
        _await_notes(store, place)
        found = _look(store, place)
        store.set(f'{place}/found', json.dumps([found.failed, list(found.lost.items())]))
        return found
    deadline = time.monotonic() + _MOST_SECONDS + _QUIET_SECONDS
    while time.monotonic() < deadline:
        text = store.find(f'{place}/found')
        if text is not None:
            failed, lost = json.loads(text)
            return _Finding(failed, dict(lost))
        time.sleep(_PAUSE_SECONDS)
    return None


def _look(store: LockedStore, place: str) -> _Finding:
    silent, late = [], {}
    for rank in range(dist.get_world_size()):
        text = store.find(f'{place}/note/{rank}')
        if text:
            return _Finding((rank, text), {})
        if text is None:
            silent.append(rank)
        paused = store.add(f'{place}/paused/{rank}', 0)
        if paused:
            late[rank] = f'rank {rank} {describe_pause(paused)}'
    # Only neighbors of a rank that died notice it at once. The others wait on, for ranks which have
    # failed, and leave no note for now.
    ended = known_ends(silent)
    if late and not silent:
        return _Finding(None, late)
    if ended.keys() & set(silent):
        return _Finding(None, {rank: ended[rank] for rank in silent if rank in ended})
    return _Finding(None, _find_hanging(store, place, silent))


def _find_hanging(store: LockedStore, place: str, silent: List[int]) -> Dict[int, str]:
    """Return which ranks the others wait for, each with what is known about it.

    A rank without a note may itself wait, in a collective of another kind that came later. If all
    ranks wait, one of them may have been in a collective that no other rank has entered.
    """
    positions = ask_positions(place, silent)
    mute = [rank for rank in silent if rank not in positions]
    # Without any answer there are no channels yet, and nothing is known about anybody.
    hanging = mute or find_stragglers(positions)
    if all(rank in positions and positions[rank].activity == Activity.IN_COLLECTIVE
           for rank in hanging):
        for rank in set(range(dist.get_world_size())) - set(silent):
            positions[rank] = Position(Activity.IN_COLLECTIVE,
                                       store.find(f'{place}/line/{rank}') or '')
        hanging = find_stragglers(positions)
        if len(hanging) == len(positions):
            return {}
    return {rank: f'rank {rank} answers{describe_position(positions[rank])}'
            if rank in positions else '' for rank in hanging}


def _await_notes(store: LockedStore, place: str) -> None:
    now = time.monotonic()
    end, quiet, seen = now + _MOST_SECONDS, now + _QUIET_SECONDS, 0
    while seen < dist.get_world_size() and time.monotonic() < min(end, quiet):
        count = store.add(f'{place}/notes', 0)
        if count != seen:
            seen, quiet = count, time.monotonic() + _QUIET_SECONDS
        time.sleep(_PAUSE_SECONDS)
