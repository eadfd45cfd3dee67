"""Collectives of CPU tensors that end: with an answer, or with the name of the missing rank.

Gloo answers a dead peer with an address and a silent one, after its time-out, with nothing. So
every rank counts its arrivals in the rendezvous store, and where a collective fails the counts say
who did not come.
"""
from __future__ import annotations

import itertools
import time
import weakref
import zlib
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from .process_group import DEFAULT_TIMEOUT_SECONDS
from .staged import StagedProcessGroup
from .store import LockedStore, store_lock

# How often a waiting rank looks whether another has given up, in seconds.
_LOOK_SECONDS = 0.5
# How long a rank that saw a connection break waits for the others to say that they live: several
# looks of theirs, so that only the dead and the busy are named.
_GRACE_SECONDS = 3.0


class RankLostError(RuntimeError):
    """Ranks did not come to a collective before its deadline, or died.

    Attributes:
        ranks: Global ranks that were waited for; empty when they cannot be told.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Channel:
    """Small collectives over one group, each with a deadline. Use :func:`open_channel`.

    Args:
        group: A group that takes CPU tensors.
        ranks: The global ranks of the group, in group order.
        timeout: Seconds a collective may wait for the other ranks.
        prefix: Where in the rendezvous store the arrivals are counted; equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], timeout: float,
                 prefix: str) -> None:
        self.ranks = list(ranks)
        self.rank = dist.get_rank()
        self.timeout = timeout
        # Weak: a group that outlives destroy_process_group may abort the process at its end.
        self._group = weakref.ref(group)
        self._store = _store()
        self._prefix = prefix
        self._entered = 0
        self._numbers = itertools.count()
        self._failure: Optional[RankLostError] = None

    def max(self, tensor: torch.Tensor, patience: Optional[float] = None) -> None:
        """Replace an int64 CPU tensor by its elementwise maximum over the ranks. Collective.

        Args:
            tensor: Of the same shape on every rank.
            patience: Begin only once all ranks are here, and wait for them at most these seconds;
                nothing stays behind in the group when they do not come.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        def reduce() -> Any:
            return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._live_group(),
                                   async_op=True)

        if patience is None:
            self._run(reduce)
            return
        self._check()
        self._enter()
        self._await_all(min(patience, self.timeout))
        self._finish(reduce())

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a CPU tensor with that of one rank. Collective.

        Args:
            tensor: Of the same shape and dtype on every rank.
            source: The global rank whose tensor all get.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        self._run(lambda: dist.broadcast(tensor, source, group=self._live_group(), async_op=True))

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's CPU tensor, in group order. Collective; shapes must be equal.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        outputs = [torch.empty_like(tensor) for _ in self.ranks]
        self._run(lambda: dist.all_gather(outputs, tensor, group=self._live_group(),
                                          async_op=True))
        return outputs

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                   input_sizes: List[int]) -> None:
        """Send each rank its part of a CPU tensor and receive theirs into ``output``. Collective.

        Args:
            output: Where the parts arrive, in group order.
            tensor: What is sent, the parts in group order.
            output_sizes: Rows that each rank sends here; may differ and be 0.
            input_sizes: Rows that each rank gets.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        self._run(lambda: dist.all_to_all_single(output, tensor, output_sizes, input_sizes,
                                                 group=self._live_group(), async_op=True))

    def gather_texts(self, text: str) -> List[str]:
        """Return every rank's text, in group order. Collective; one collective when all are empty.

        Raises:
            RankLostError: Naming the ranks that did not come.
        """
        mine = text.encode()
        longest = torch.tensor([len(mine)])
        self.max(longest)
        if not longest.item():
            return [''] * len(self.ranks)
        padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
        padded[:len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        return [bytes(each.tolist()).rstrip(b'\0').decode() for each in self.gather(padded)]

    def next_number(self) -> int:
        """Return 0, 1, ...: equal on ranks that call it equally often."""
        return next(self._numbers)

    def publish(self, key: str, text: str) -> bool:
        """Leave a text where ranks that come to no collective find it; return if it was first."""
        first = self._store.add(f'{self._prefix}/{key}/count', 1) == 1
        if first:
            self._store.set(f'{self._prefix}/{key}/text', text)
            self._store.add(f'{self._prefix}/{key}/ready', 1)
        return first

    def published(self, key: str) -> Optional[str]:
        """Return the text that was published first, or None. Also None when the store is gone."""
        try:
            if self._store.add(f'{self._prefix}/{key}/ready', 0):
                return self._store.get(f'{self._prefix}/{key}/text')
        except RuntimeError:  # the process that keeps the store has ended
            pass
        return None

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError('the process group of this agreement was destroyed: make a new one '
                               'after init_process_group.')
        return group

    def _run(self, start: Callable[[], Any]) -> None:
        """Start a collective and see it end; the store is told while it is on its way."""
        self._check()
        work = start()
        try:
            self._enter()
        except RankLostError:
            pass  # a collective that ends well may be the last thing the store's keeper waited for
        self._finish(work)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _enter(self) -> None:
        self._entered += 1
        self._count(f'entered/{self.rank}', 1)

    def _count(self, key: str, more: int) -> int:
        """Add to a counter of the store, in one round trip; 0 reads it without waiting for it."""
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
                # 0 would mean for ever
                work.wait(timedelta(seconds=max(0.001, min(left, _LOOK_SECONDS))))
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

    def _fail(self, what: str, error: Optional[RuntimeError], grace: float) -> None:
        """Tell the others, find who is missing, and raise."""
        self._failure = RankLostError(f'rank {self.rank}, agreement {self._entered}: {what}.')
        self._count('failed', 1)
        self._count(f'alive/{self.rank}', 1)
        deadline = time.monotonic() + grace
        absent, silent = self._absent(), self.ranks
        while silent and time.monotonic() <= deadline:
            try:
                silent = [rank for rank in silent if not self._count(f'alive/{rank}', 0)]
                absent = self._absent()
            except RankLostError:  # who keeps the store has ended; what was seen until now counts
                break
            time.sleep(0.05)
        if grace:
            # A broadcast ends sooner on some ranks: one that saw it break stands behind as well.
            absent = [rank for rank in absent if rank in silent] or absent
        if absent:
            self.publish('lost', ' '.join(map(str, absent)))
        else:  # who was late may have come while this rank looked
            told = (self.published('lost') or '').split()
            absent = [int(rank) for rank in told if int(rank) != self.rank]
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


_channels: Any = weakref.WeakKeyDictionary()  # of group, then by time-out and purpose
_numbers: Any = itertools.count()


def open_channel(group: Optional[dist.ProcessGroup] = None,
                 timeout: Optional[float] = None, purpose: str = '') -> Optional[Channel]:
    """Return the channel over ``group``, or None where there is nobody to talk to.

    Collective on first use. With ``group=None`` it makes a gloo group of its own, so that nothing
    it sends can meet a collective of another kind, and the default group need not take CPU
    tensors (torch < 2.0 with an accelerator's backend). A group that is given is used as it is.

    Args:
        group: The ranks that talk; all when None.
        timeout: Seconds a collective may wait; the group's own when None.
        purpose: With ``group=None``, channels of different purposes have groups of their own.

    Raises:
        RankLostError: If ranks did not come to the making of the group.
        ValueError: If ``timeout`` is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds or None.')
    if not dist.is_available() or not dist.is_initialized():
        return None
    default = _c10d()._get_default_group()
    if group is None or group is default:
        if dist.get_world_size() == 1:
            return None
        return _open_default(default, timeout, purpose)
    if dist.get_world_size(group) == 1:
        return None
    known = _channels.setdefault(group, {})
    if timeout not in known:
        ranks = _global_ranks(group)
        seconds = timeout if timeout is not None else _own_timeout(group)
        known[timeout] = Channel(group, ranks, seconds, _prefix(ranks, len(known)))
    return known[timeout]


def _open_default(default: dist.ProcessGroup, timeout: Optional[float], purpose: str) -> Channel:
    known: Dict[Any, Channel] = _channels.setdefault(default, {})
    if (timeout, purpose) not in known:
        ranks = _global_ranks(default)
        seconds = timeout if timeout is not None else _own_timeout(default)
        prefix = _prefix(ranks, next(_numbers))
        _await_all(prefix, ranks, seconds)
        with store_lock:  # all ranks are here: nobody waits for another thread of this one
            group = dist.new_group(timeout=timedelta(seconds=seconds), backend='gloo')
        known[timeout, purpose] = Channel(group, ranks, seconds, prefix)
    return known[timeout, purpose]


def _await_all(prefix: str, ranks: Sequence[int], timeout: float) -> None:
    """Wait until all ranks are here: ``new_group`` would not say who is missing."""
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


def _prefix(ranks: Sequence[int], number: int) -> str:
    return f'mapsage/{zlib.crc32(repr(list(ranks)).encode()):08x}/{number}'


def _global_ranks(group: dist.ProcessGroup) -> List[int]:
    # get_process_group_ranks is torch 2.0's; this table has been there all along
    return sorted(_c10d()._pg_group_ranks[group], key=_c10d()._pg_group_ranks[group].get)


def _own_timeout(group: Any) -> float:
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
