"""Collectives of small tensors between ranks that either complete or name the missing ranks.

A rank sends about ``log2(ranks)`` messages in a collective and asks the rendezvous store nothing.
Where a collective fails, a roll call finds out who is missing.

The data is copied by the threads of this process. A tensor given to gloo may be released last by
gloo's own thread, which enters the interpreter for it, and on Python 3.8 a process that forks its
loader workers at that moment leaves them in a deadlock.
"""
from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from mapsage.distributed.descriptors import DescriptorLimitError, check_descriptors
from mapsage.distributed.groups.process_group import DEFAULT_TIMEOUT_SECONDS
from mapsage.distributed.groups.staged import StagedProcessGroup
from mapsage.distributed.store import LockedStore

from .channel import Channel, RankLostError, SerialChannel, error_text
from .mesh import LinkLostError
from .roll_call import Lane, Missing, RollCall, is_late


class _GivenUpError(Exception):
    """A collective ends before it is complete: it is overdue, or another rank has given it up."""


class _Turn:
    """One collective of this rank: what it sends and receives in it.

    Args:
        lane: Lane of the channel.
        roll: Roll call of this process.
        seconds: Time it may take.
    """

    def __init__(self, lane: Lane, roll: RollCall, seconds: float) -> None:
        self._lane, self._roll, self._seconds = lane, roll, seconds
        self._number = lane.entered
        self._deadline = time.monotonic() + seconds
        self.ranks = lane.ranks
        self.me = lane.ranks.index(roll.rank)

    def send(self, index: int, part: int, data: Any) -> None:
        """Send bytes to a place of the group, modulo its size; ``part`` tells messages apart."""
        self._roll.mesh.send(self.ranks[index % len(self.ranks)], self._lane.key, self._number,
                             part, data, self.check)

    def receive(self, index: int, part: int, size: int) -> bytearray:
        """Return the bytes that a place has sent.

        Raises:
            ValueError: If there are not ``size`` of them.
        """
        rank = self.ranks[index % len(self.ranks)]
        data = self._roll.mesh.receive(rank, self._lane.key, self._number, part, self.check)
        if len(data) != size:
            raise ValueError(f'rank {rank} sent {len(data)} bytes where this rank expects {size}: '
                             f'their tensors differ, or they are in different collectives.')
        return data

    def check(self) -> None:
        """Raise if it makes no sense to wait any longer."""
        if self._roll.failed(self._lane):
            raise _GivenUpError('another rank has given up')
        if time.monotonic() > self._deadline:
            raise _GivenUpError(f'no answer within {self._seconds:g} s')


class GroupChannel(Channel):
    """The channel of several ranks. Use :func:`open_channel`.

    Args:
        group: Process group of the ranks; its own connections are not used.
        ranks: Global ranks of the group, in group order.
        timeout: Seconds a collective may wait for the other ranks.
        name: Name of the channel; equal on all ranks and unlike that of any other.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], timeout: float,
                 name: str) -> None:
        super().__init__(ranks, dist.get_rank())
        self.timeout = timeout
        # Weak: a group that outlives destroy_process_group may abort the process at its end.
        self._group = weakref.ref(group)
        self._roll = roll_call()
        self._lane = self._roll.open(name, ranks)
        self._failure: Optional[RankLostError] = None

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace a tensor by its maximum over the ranks, see :meth:`Channel.max`."""
        def reduce(turn: _Turn) -> None:
            step = 1
            while step < len(self.ranks):
                turn.send(turn.me + step, step, _bytes(largest))
                _bytes(theirs)[:] = turn.receive(turn.me - step, step, size)
                torch.max(largest, theirs, out=largest)
                step *= 2

        largest = tensor.detach().clone(memory_format=torch.contiguous_format)
        theirs, size = torch.empty_like(largest), len(_bytes(largest))
        self._run(reduce, timeout)
        tensor.copy_(largest)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with the one of rank ``source``, see :meth:`Channel.broadcast`."""
        def spread(turn: _Turn) -> None:
            place = (turn.me - root) % len(self.ranks)
            step = 1
            while step < len(self.ranks):
                if place < step and place + step < len(self.ranks):
                    turn.send(turn.me + step, 0, _bytes(data))
                elif step <= place < 2 * step:
                    _bytes(data)[:] = turn.receive(turn.me - step, 0, size)
                step *= 2

        data, root = tensor.detach().contiguous(), self.ranks.index(source)
        size = len(_bytes(data))
        self._run(spread)
        if not tensor.is_contiguous():
            tensor.detach().copy_(data)

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's tensor, see :meth:`Channel.gather`."""
        def collect(turn: _Turn) -> None:
            _bytes(held[0])[:] = _bytes(tensor)
            step = 1
            while step < world:  # the place `i` holds what the rank `i` before this one gave
                count = min(step, world - step)
                turn.send(turn.me + step, step, _bytes(held[:count]))
                _bytes(held[step:step + count])[:] = turn.receive(
                    turn.me - step, step, count * size)
                step *= 2

        world, size = len(self.ranks), len(_bytes(tensor))
        held = torch.empty((world, *tensor.shape), dtype=tensor.dtype)
        self._run(collect)
        me = self.ranks.index(self.rank)
        return [held[(me - place) % world] for place in range(world)]

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small tensor, see :meth:`Channel.trade`."""
        def pass_on(turn: _Turn) -> None:
            step = 1
            while step < world:  # row `i` is for the rank `i` behind this one
                places = [place for place in range(world) if place & step]
                sent = rows[places]
                turn.send(turn.me + step, step, _bytes(sent))
                _bytes(sent)[:] = turn.receive(turn.me - step, step, len(_bytes(sent)))
                rows[places] = sent
                step *= 2

        world, me = len(self.ranks), self.ranks.index(self.rank)
        rows = tensor[[(me + place) % world for place in range(world)]].contiguous()
        self._run(pass_on)
        return rows[[(me - place) % world for place in range(world)]]

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                   input_sizes: List[int]) -> None:
        """Send each rank its part of a tensor, see :meth:`Channel.all_to_all`."""
        def swap(turn: _Turn) -> None:
            arrivals[turn.me].copy_(parts[turn.me])
            for step in range(1, len(self.ranks)):
                place = (turn.me + step) % len(self.ranks)
                if input_sizes[place]:
                    turn.send(place, 0, _bytes(parts[place]))
            for step in range(1, len(self.ranks)):
                place = (turn.me - step) % len(self.ranks)
                if output_sizes[place]:
                    arrived = _bytes(arrivals[place])
                    arrived[:] = turn.receive(place, 0, len(arrived))

        whole = output.detach().contiguous()
        parts, arrivals = tensor.split(input_sizes), whole.split(output_sizes)
        self._run(swap)
        if not output.is_contiguous():
            output.detach().copy_(whole)

    def publish(self, key: str, text: str) -> bool:
        """Store a text for ranks that are stuck elsewhere, see :meth:`Channel.publish`."""
        return self._roll.publish(self._lane, key,
                                  text.encode('utf-8', 'backslashreplace').decode())

    def published(self, key: str) -> Optional[str]:
        """Return the text that was published first, see :meth:`Channel.published`."""
        return self._roll.published(self._lane, key)

    def _run(self, collective: Callable[[_Turn], None], timeout: Optional[float] = None) -> None:
        """Carry out a collective; count it, so that a rank that does not enter it can be found."""
        if self._failure is not None:
            raise self._failure
        group = self._group()
        if group is None or group not in _c10d()._pg_group_ranks:
            raise RuntimeError('the process group of this channel was destroyed: open a new '
                               'channel after init_process_group.')
        self._lane.entered += 1
        self._lane.inside = True
        seconds = self.timeout if timeout is None else min(timeout, self.timeout)
        turn = _Turn(self._lane, self._roll, seconds)
        try:
            turn.check()
            collective(turn)
        except DescriptorLimitError:
            self._roll.alarm(self._lane, {})
            raise
        except LinkLostError as error:
            self._fail('a connection broke', error, {error.rank: str(error)})
        except (_GivenUpError, RuntimeError, ValueError) as error:
            self._fail(_first_line(error), error, {})
        finally:
            self._lane.inside = False

    def _fail(self, what: str, error: Exception, lost: Dict[int, str]) -> NoReturn:
        """Report the failure to the other ranks, find out which are missing, and raise."""
        self._roll.alarm(self._lane, lost, self.timeout)
        missing = self._roll.find_missing(self._lane)
        self._roll.mesh.drop(self._lane.key)
        refused = self._roll.mesh.refused()
        if refused is not None:
            self._failure = RankLostError(f'rank {self.rank} ends: {refused[1]}.', refused[0])
            raise self._failure from error
        text, ranks = describe_missing(missing, self.rank)
        self._failure = RankLostError(
            f'rank {self.rank} waited at agreement {self._lane.entered} and {text[0]} ({what}). '
            f'{text[1]}', ranks)
        raise self._failure from error


def describe_missing(missing: Optional[Missing],
                     rank: int) -> Tuple[Tuple[str, str], List[int]]:
    """Return what is missing and what to do about it in words, and the missing ranks. Pure.

    Args:
        missing: Answer of :meth:`RollCall.find_missing`.
        rank: Global rank of this process.
    """
    log = 'look at the first error in their log.'
    if missing is None:
        return ('the rendezvous store does not answer', 'The process that keeps it has ended or '
                f'hangs: the launcher, or rank 0 where there is none: {log}'), [0]
    if missing.ranks == [rank]:
        return (f'the others have waited for it, rank {rank}, in vain',
                f'{_known(missing)}The others have given up: {log}'), [rank]
    ranks = [each for each in missing.ranks if each != rank]
    if not ranks:
        return ('every rank came to it, this one perhaps too late',
                f'Another one has ended or gave up before: {log}'), []
    why = ('They died, there or in it, hang, or have opened no channel yet' if missing.silent else
           'They are slow or took a path without this agreement')
    return (f'rank(s) {ranks} did not come to it', f'{_known(missing)}{why}: {log}'), ranks


def _known(missing: Missing) -> str:
    """Return what is known about the ends of the missing ranks, as sentences. Pure."""
    return ''.join(f'{reason[:1].upper()}{reason[1:]}. ' for reason in missing.reasons.values())


_channels: Any = weakref.WeakKeyDictionary()  # by group, then by timeout and purpose
_roll_calls: Any = weakref.WeakKeyDictionary()  # by default group
# A process may initialize torch.distributed several times, over one store.
_numbers: Iterator[int] = itertools.count()
_opening = threading.Lock()
_calling = threading.Lock()  # several threads may be the first to need the roll call
_OWN_DESCRIPTORS = 3  # of a mesh beside its connections: to listen, to wait, and one to spare


def open_channel(group: Optional[dist.ProcessGroup] = None,
                 timeout: Optional[float] = None, purpose: str = '') -> Channel:
    """Return the channel over ``group``; a :class:`SerialChannel` where it has one rank.

    This is no collective; the channel's first collective is where ranks meet. All channels of a
    process share its connections, which are not those of the group: the group need not take CPU
    tensors, its messages cannot be mistaken for others, and several threads can talk at once over
    channels of their own.

    Args:
        group: Process group of the ranks; all ranks when None. Ranks that create several groups
            create them in the same order, as torch demands it.
        timeout: Seconds a collective may wait; the group's own timeout when None. Equal on all
            ranks.
        purpose: Name of the use. Each purpose has a channel of its own.

    Raises:
        DescriptorLimitError: If this process may not open another connection.
        RankLostError: If the rendezvous store has ended.
        ValueError: If ``timeout`` is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout={timeout!r}, expected a positive number of seconds or None.')
    if not dist.is_available() or not dist.is_initialized():
        return SerialChannel()
    default = _c10d()._get_default_group()
    if dist.get_world_size(default if group is None else group) == 1:
        return SerialChannel(dist.get_rank())
    group = default if group is None else group
    with _opening:
        return _open(group, timeout, purpose)


def _open(group: dist.ProcessGroup, timeout: Optional[float], purpose: str) -> Channel:
    known: Dict[Any, Channel] = _channels.setdefault(group, {})
    if (timeout, purpose) not in known:
        seconds = timeout if timeout is not None else _group_timeout(group)
        # torch numbers its groups alike on all ranks
        name = f'{_c10d()._pg_names[group]}/{purpose}/{timeout}'
        try:
            known[timeout, purpose] = GroupChannel(group, global_ranks(group), seconds, name)
        except DescriptorLimitError:
            raise
        except RuntimeError as error:
            raise RankLostError(
                f'rank {dist.get_rank()} cannot open a channel: the rendezvous store does not '
                f'answer ({_first_line(error)}). The process that keeps it has ended: the '
                f'launcher, or rank 0 where there is none. Look at its log.', [0]) from error
    return known[timeout, purpose]


def tell_why(error: BaseException) -> None:
    """Tell the other ranks with what error this one ends. Never raises, hardly waits."""
    try:
        default: Any = _c10d()._get_default_group() if dist.is_initialized() else None
        if default in _roll_calls:
            _roll_calls[default].mesh.say_why(error_text(error))
    except Exception:  # the error itself must get out all the same
        pass


def known_ends(probed: Sequence[int] = ()) -> Dict[int, str]:
    """Return the ranks whose process has ended, as far as this one has noticed.

    Args:
        probed: Global ranks to which this one connects first, to find out.

    Returns:
        Words by global rank: who it was, on which host, and why, if it said so.
    """
    default: Any = _c10d()._get_default_group() if dist.is_initialized() else None
    if default not in _roll_calls:
        return {}
    mesh = _roll_calls[default].mesh
    mesh.probe(probed)
    return mesh.reasons()


def known_pause() -> float:
    """Return for how many seconds this process did not run lately; 0.0 if not for long.

    A pause counts if the others may have waited for it until the timeout of the default group.
    """
    default: Any = _c10d()._get_default_group() if dist.is_initialized() else None
    if default not in _roll_calls:
        return 0.0
    waited = _group_timeout(default)
    paused = _roll_calls[default].mesh.paused(2 * waited)
    return paused if is_late(paused, waited) else 0.0


def roll_call() -> RollCall:
    """Return the roll call of the default group, with the connections of this process.

    Raises:
        DescriptorLimitError: If this process may not open another connection.
    """
    default = _c10d()._get_default_group()
    with _calling:
        if default not in _roll_calls:
            check_descriptors(dist.get_world_size(), 0, _OWN_DESCRIPTORS)
            roll = RollCall(LockedStore(_c10d()._get_default_store()),
                            f'mapsage/{next(_numbers)}', dist.get_rank(), dist.get_world_size())
            weakref.finalize(default, roll.mesh.close)
            _roll_calls[default] = roll
        return _roll_calls[default]


def global_ranks(group: dist.ProcessGroup) -> List[int]:
    """Return the global ranks of a group, in group order."""
    # torch 2.0 added get_process_group_ranks; this table exists in all versions
    return sorted(_c10d()._pg_group_ranks[group], key=_c10d()._pg_group_ranks[group].get)


def _group_timeout(group: Any) -> float:
    """Return the seconds that a collective over ``group`` may take."""
    if isinstance(group, StagedProcessGroup):
        return group._timeout.total_seconds()
    try:
        backend = (group._get_backend(torch.device('cpu')) if hasattr(group, '_get_backend')
                   else group)
    except RuntimeError:  # the group takes no CPU tensors
        backend = None
    options: Any = getattr(backend, 'options', None)
    return (options._timeout.total_seconds() if hasattr(options, '_timeout') else
            float(DEFAULT_TIMEOUT_SECONDS))


def _c10d() -> Any:
    return dist.distributed_c10d


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [''])[0]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, or that of a copy of another one."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)  # numpy has no bfloat16
    return flat.numpy().view(np.uint8).data
