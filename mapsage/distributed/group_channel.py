"""Collectives over a process group that either complete or name the missing ranks.

Gloo reports a dead peer by its address and a silent one, after its timeout, not at all. So every
rank counts the collectives it has entered in the rendezvous store, and where a collective fails the
counts show which ranks did not enter it.
"""
from __future__ import annotations

import itertools
import time
import weakref
import zlib
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .channel import Channel, RankLostError, SerialChannel
from .process_group import DEFAULT_TIMEOUT_SECONDS
from .staged import StagedProcessGroup
from .store import LockedStore, store_lock

# How often a waiting rank checks whether another one has given up, in seconds.
_POLL_SECONDS = 0.5
# How long a rank that saw a connection break waits for the other ranks to report that they are
# alive, in seconds: several of their polls, so that only dead and busy ranks are named.
_GRACE_SECONDS = 3.0


class GroupChannel(Channel):
    """The channel of several ranks. Use :func:`open_channel`.

    Args:
        group: Process group that takes CPU tensors.
        ranks: Global ranks of the group, in group order.
        timeout: Seconds a collective may wait for the other ranks.
        prefix: Prefix of this channel's keys in the rendezvous store; equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], timeout: float,
                 prefix: str) -> None:
        super().__init__(ranks, dist.get_rank())
        self.timeout = timeout
        # Weak: a group that outlives destroy_process_group may abort the process at its end.
        self._group = weakref.ref(group)
        self._store = _store()
        self._prefix = prefix
        self._entered = 0
        self._failure: Optional[RankLostError] = None
        self._last_work: Any = None

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace a tensor by its maximum over the ranks, see :meth:`Channel.max`."""
        def reduce() -> Any:
            return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._live_group(),
                                   async_op=True)

        if timeout is None:
            self._run(reduce)
            return
        self._check()
        self._enter()
        self._await_all(min(timeout, self.timeout))
        self._finish(reduce())

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with the one of rank ``source``, see :meth:`Channel.broadcast`."""
        self._run(lambda: dist.broadcast(tensor, source, group=self._live_group(), async_op=True))

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's tensor, see :meth:`Channel.gather`."""
        outputs = [torch.empty_like(tensor) for _ in self.ranks]
        self._run(lambda: dist.all_gather(outputs, tensor, group=self._live_group(),
                                          async_op=True))
        return outputs

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                   input_sizes: List[int]) -> None:
        """Send each rank its part of a tensor, see :meth:`Channel.all_to_all`."""
        self._run(lambda: dist.all_to_all_single(output, tensor, output_sizes, input_sizes,
                                                 group=self._live_group(), async_op=True))

    def publish(self, key: str, text: str) -> bool:
        """Store a text for ranks that are stuck elsewhere, see :meth:`Channel.publish`."""
        try:
            first = self._store.add(f'{self._prefix}/{key}/count', 1) == 1
            if first:
                self._store.set(f'{self._prefix}/{key}/text', text)
                self._store.add(f'{self._prefix}/{key}/ready', 1)
            return first
        except RuntimeError:  # the process that keeps the store has ended
            return False

    def published(self, key: str) -> Optional[str]:
        """Return the text that was published first, see :meth:`Channel.published`."""
        try:
            if self._store.add(f'{self._prefix}/{key}/ready', 0):
                return self._store.get(f'{self._prefix}/{key}/text')
        except RuntimeError:  # the process that keeps the store has ended
            pass
        return None

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError('the process group of this channel was destroyed: open a new '
                               'channel after init_process_group.')
        return group

    def _run(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait for its end; count it in the store while it is under way."""
        self._check()
        work = start()
        try:
            self._enter()
        except RankLostError:
            pass  # the store's keeper may have waited for nothing but this collective
        self._finish(work)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _enter(self) -> None:
        self._entered += 1
        self._count(f'entered/{self.rank}', 1)

    def _count(self, key: str, more: int) -> int:
        """Add to a counter of the store in one round trip and return it; 0 only reads it."""
        try:
            return self._store.add(f'{self._prefix}/{key}', more)
        except RuntimeError as error:
            raise RankLostError(
                f'rank {self.rank}, agreement {self._entered}: the rendezvous store does not '
                f'answer ({_first_line(error)}). The process that keeps it has ended: the '
                f'launcher, or rank 0 where there is none. Look at its log.', [0]) from error

    def _await_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._absent():
            if time.monotonic() > deadline:
                self._fail(f'not all came within {seconds:g} s', None, 0.0)
            time.sleep(0.01)

    def _finish(self, work: Any) -> None:
        deadline = time.monotonic() + self.timeout
        while not work.is_completed():
            left = deadline - time.monotonic()
            try:
                # a timeout of 0 would mean no timeout
                work.wait(timedelta(seconds=max(0.001, min(left, _POLL_SECONDS))))
            except RuntimeError as error:
                if work.is_completed():
                    break
                if left <= 0:
                    self._fail(f'no answer within {self.timeout:g} s', error, 0.0)
                if self._count('failed', 0):
                    self._fail('another rank has given up', error, _GRACE_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(_first_line(error), error, _GRACE_SECONDS)
        # Kept until the next collective. Otherwise gloo's thread may be the last to hold the
        # tensors, and enters the interpreter to release them. A process that forks its loader
        # workers at that moment leaves them in a deadlock on Python 3.8, whose lock over all
        # threads a fork copies in the state it has.
        self._last_work = work

    def _fail(self, what: str, error: Optional[RuntimeError], grace: float) -> None:
        """Report the failure to the other ranks, find out which are missing, and raise."""
        self._failure = RankLostError(f'rank {self.rank}, agreement {self._entered}: {what}.')
        self._count('failed', 1)
        self._count(f'alive/{self.rank}', 1)
        deadline = time.monotonic() + grace
        absent, silent = self._absent(), self.ranks
        while silent and time.monotonic() <= deadline:
            try:
                silent = [rank for rank in silent if not self._count(f'alive/{rank}', 0)]
                absent = self._absent()
            except RankLostError:  # the store has ended: go by what was seen until now
                break
            time.sleep(0.05)
        if grace:
            # A broadcast ends sooner on some ranks, so a rank that is alive and saw the connection
            # break may be one collective behind.
            absent = [rank for rank in absent if rank in silent] or absent
        if absent:
            self.publish('lost', ' '.join(map(str, absent)))
        else:  # a late rank may have come in the meantime
            lost = (self.published('lost') or '').split()
            absent = [int(rank) for rank in lost if int(rank) != self.rank]
        if absent:
            who, ranks = f'rank(s) {absent} did not come to it', absent
        elif silent and grace:
            who, ranks = f'rank(s) {silent} came to it and then fell silent', silent
        else:
            who, ranks = 'every rank came to it, this one perhaps too late', []
        self._failure = RankLostError(
            f'rank {self.rank} waited at agreement {self._entered} and {who} ({what}). They died, '
            f'hang, or took a path without this agreement: look at the first error in their log.',
            ranks)
        raise self._failure from error

    def _absent(self) -> List[int]:
        return [rank for rank in self.ranks if self._count(f'entered/{rank}', 0) < self._entered]


_channels: Any = weakref.WeakKeyDictionary()  # by group, then by timeout and purpose
# By ranks: channels over the same ranks must not count their arrivals under the same keys, and a
# process may create several groups over them, one after the other.
_numbers: Dict[Tuple[int, ...], Iterator[int]] = {}


def open_channel(group: Optional[dist.ProcessGroup] = None,
                 timeout: Optional[float] = None, purpose: str = '') -> Channel:
    """Return the channel over ``group``; a :class:`SerialChannel` where it has one rank.

    Collective on first use. With ``group=None`` it creates a gloo group of its own, so that its
    messages cannot be mistaken for those of another collective, and the default group need not take
    CPU tensors (torch < 2.0 with an accelerator's backend). A group that is given is used itself.

    Args:
        group: Process group to communicate over; all ranks when None.
        timeout: Seconds a collective may wait; the group's own timeout when None.
        purpose: Name of the use. With ``group=None``, each purpose has a group of its own, so that
            several threads can communicate at once.

    Raises:
        RankLostError: If ranks did not come to create the group.
        ValueError: If ``timeout`` is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds or None.')
    if not dist.is_available() or not dist.is_initialized():
        return SerialChannel()
    default = _c10d()._get_default_group()
    if dist.get_world_size(default if group is None else group) == 1:
        return SerialChannel(dist.get_rank())
    if group is None or group is default:
        return _open_default(default, timeout, purpose)
    known = _channels.setdefault(group, {})
    if timeout not in known:
        ranks = _global_ranks(group)
        seconds = timeout if timeout is not None else _group_timeout(group)
        known[timeout] = GroupChannel(group, ranks, seconds, _new_prefix(ranks))
    return known[timeout]


def _open_default(default: dist.ProcessGroup, timeout: Optional[float], purpose: str) -> Channel:
    known: Dict[Any, Channel] = _channels.setdefault(default, {})
    if (timeout, purpose) not in known:
        ranks = _global_ranks(default)
        seconds = timeout if timeout is not None else _group_timeout(default)
        prefix = _new_prefix(ranks)
        _await_all(prefix, ranks, seconds)
        with store_lock:  # all ranks are here, so no thread waits long for the lock
            group = dist.new_group(timeout=timedelta(seconds=seconds), backend='gloo')
        known[timeout, purpose] = GroupChannel(group, ranks, seconds, prefix)
    return known[timeout, purpose]


def _await_all(prefix: str, ranks: Sequence[int], timeout: float) -> None:
    """Wait until all ranks are here: ``new_group`` would not say which are missing."""
    store, deadline = _store(), time.monotonic() + timeout
    store.add(f'{prefix}/here/{dist.get_rank()}', 1)
    here = store.add(f'{prefix}/here', 1)
    while here < len(ranks):
        if time.monotonic() > deadline:
            absent = [rank for rank in ranks if not store.add(f'{prefix}/here/{rank}', 0)]
            raise RankLostError(
                f'rank {dist.get_rank()} waited {timeout:g} s to open a channel to all ranks, and '
                f'rank(s) {absent} did not come: look at the first error in their log.', absent)
        time.sleep(0.005)
        here = store.add(f'{prefix}/here', 0)


def _new_prefix(ranks: Sequence[int]) -> str:
    """Return a place in the rendezvous store, equal on ranks that open channels equally often."""
    number = next(_numbers.setdefault(tuple(ranks), itertools.count()))
    return f'mapsage/{zlib.crc32(repr(list(ranks)).encode()):08x}/{number}'


def _global_ranks(group: dist.ProcessGroup) -> List[int]:
    # torch 2.0 added get_process_group_ranks; this table exists in all versions
    return sorted(_c10d()._pg_group_ranks[group], key=_c10d()._pg_group_ranks[group].get)


def _group_timeout(group: Any) -> float:
    """Return the seconds that a collective over ``group`` may take."""
    if isinstance(group, StagedProcessGroup):
        return group._timeout.total_seconds()
    backend = (group._get_backend(torch.device('cpu')) if hasattr(group, '_get_backend') else group)
    options: Any = getattr(backend, 'options', None)
    return (options._timeout.total_seconds() if hasattr(options, '_timeout') else
            float(DEFAULT_TIMEOUT_SECONDS))


def _store() -> LockedStore:
    return LockedStore(_c10d()._get_default_store())


def _c10d() -> Any:
    return dist.distributed_c10d


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [''])[0]
