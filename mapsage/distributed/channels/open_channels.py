"""The channels of this process, and the roll call and mesh that they share.

Callers open channels here and never close them: they end with their process group. A roll call
belongs to the default group, because torch.distributed may be initialized several times.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from mapsage.distributed.descriptors import DescriptorLimitError, check_descriptors
from mapsage.distributed.groups.process_group import DEFAULT_TIMEOUT_SECONDS
from mapsage.distributed.groups.staged import StagedProcessGroup
from mapsage.distributed.lost_ranks import Report
from mapsage.distributed.store import LockedStore

from .channel import Channel, RankLostError, SerialChannel, error_text
from .group_channel import GroupChannel, c10d, first_line
from .pauses import is_late
from .roll_call import RollCall

# A channel has a key of its timeout and its purpose in the table of its group.
_ChannelTable = Dict[Tuple[Optional[float], str], Channel]
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, _ChannelTable] = weakref.WeakKeyDictionary()
# The keys are default groups.
_roll_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()
# A process may initialize torch.distributed several times with one store, so each roll call gets
# another prefix there.
_numbers: Iterator[int] = itertools.count()
_opening = threading.Lock()
# Several threads may be the first to need the roll call.
_calling = threading.Lock()
# Descriptors of a mesh without its connections: listener, selector, and a spare one.
_MESH_DESCRIPTORS = 3


def open_channel(
    group: Optional[dist.ProcessGroup] = None, timeout: Optional[float] = None, purpose: str = ''
) -> Channel:
    """Return the channel over ``group``; a :class:`SerialChannel` if the group has one rank.

    Opening is not collective. The same arguments return the same channel. All channels of a process
    share its mesh of connections and use none of the group's. Therefore a group without CPU tensors
    has a channel too, messages of different channels cannot be confused, and several threads can
    communicate at the same time if each uses another channel.

    Args:
        group: Process group of the ranks; all ranks when None. Ranks that create several groups
            must create them in the same order, as torch demands.
        timeout: Seconds a collective may wait, equal on all ranks; the group's timeout when None.
        purpose: Name of the use. Different purposes have different channels.

    Raises:
        DescriptorLimitError: If this process may not open another connection.
        RankLostError: If the process that keeps the rendezvous store has ended.
        ValueError: If ``timeout`` is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds or None.')
    if not dist.is_available() or not dist.is_initialized():
        return SerialChannel()
    default = c10d()._get_default_group()
    if dist.get_world_size(default if group is None else group) == 1:
        return SerialChannel(dist.get_rank())
    group = default if group is None else group
    with _opening:
        return _open(group, timeout, purpose)


def _open(group: dist.ProcessGroup, timeout: Optional[float], purpose: str) -> Channel:
    opened = _channels.setdefault(group, {})
    if (timeout, purpose) not in opened:
        seconds = timeout if timeout is not None else _group_timeout(group)
        # torch gives a group the same name on all ranks.
        name = f'{c10d()._pg_names[group]}/{purpose}/{timeout}'
        try:
            opened[timeout, purpose] = GroupChannel(
                group, global_ranks(group), seconds, name, roll_call()
            )
        except DescriptorLimitError:
            raise
        except RuntimeError as error:
            raise RankLostError(
                f'rank {dist.get_rank()} cannot open a channel: the rendezvous store does not '
                f'answer ({first_line(error)}). The process that keeps it has ended: the '
                f'launcher, or rank 0 where there is none. Look at its log.',
                [0],
            ) from error
    return opened[timeout, purpose]


def tell_why(error: BaseException) -> None:
    """Send the other ranks the error that ends this rank. Never raises, hardly waits."""
    try:
        roll = _existing_roll_call()
        if roll is not None:
            roll.mesh.say_why(error_text(error))
    # The caller is about to report ``error``, which no failure here may replace.
    except Exception:
        pass


def known_ends(probed: Sequence[int] = ()) -> Dict[int, str]:
    """Return the ranks whose process has ended, as far as this process has noticed.

    Args:
        probed: Global ranks to connect to first, in order to notice their end.

    Returns:
        Text by global rank: the rank, its host and the reason of its end, if known.
    """
    roll = _existing_roll_call()
    if roll is None:
        return {}
    roll.mesh.probe(probed)
    return roll.mesh.reasons()


def ask_reports(name: str) -> Dict[int, Report]:
    """Return reports with the positions of main threads, see :meth:`RollCall.ask_reports`.

    The answer is empty if this process has opened no channel.
    """
    roll = _existing_roll_call()
    return {} if roll is None else roll.ask_reports(name)


def known_pause() -> float:
    """Return the seconds of this process's longest recent pause; 0.0 without a long one.

    A pause is long if other ranks may have waited for this one until the default group's timeout.
    """
    roll = _existing_roll_call()
    if roll is None:
        return 0.0
    waited = _group_timeout(c10d()._get_default_group())
    paused = roll.mesh.pauses.longest(2 * waited)
    return paused if is_late(paused, waited) else 0.0


def roll_call() -> RollCall:
    """Return the roll call of the default group, with the connections of this process.

    Raises:
        DescriptorLimitError: If this process may not open another connection.
    """
    default = c10d()._get_default_group()
    with _calling:
        if default not in _roll_calls:
            check_descriptors(dist.get_world_size(), 0, _MESH_DESCRIPTORS)
            roll = RollCall(
                LockedStore(c10d()._get_default_store()),
                f'mapsage/{next(_numbers)}',
                dist.get_rank(),
                dist.get_world_size(),
            )
            weakref.finalize(default, roll.mesh.close)
            _roll_calls[default] = roll
        return _roll_calls[default]


def _existing_roll_call() -> Optional[RollCall]:
    """Return the roll call of the default group; None if this process has not needed one yet."""
    return _roll_calls.get(c10d()._get_default_group()) if dist.is_initialized() else None


def global_ranks(group: dist.ProcessGroup) -> List[int]:
    """Return the global ranks of a group, in group order."""
    # torch 1.10 has no get_process_group_ranks, and all versions have this table.
    return sorted(c10d()._pg_group_ranks[group], key=c10d()._pg_group_ranks[group].get)


def _group_timeout(group: dist.ProcessGroup) -> float:
    """Return the seconds that a collective over ``group`` may take."""
    backend: object
    if isinstance(group, StagedProcessGroup):
        return group.collective_timeout.total_seconds()
    try:
        backend = (
            group._get_backend(torch.device('cpu')) if hasattr(group, '_get_backend') else group
        )
    # The group takes no CPU tensors.
    except RuntimeError:
        backend = None
    options: Any = getattr(backend, 'options', None)
    return (
        options._timeout.total_seconds()
        if hasattr(options, '_timeout')
        else float(DEFAULT_TIMEOUT_SECONDS)
    )
