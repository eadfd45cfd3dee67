"""The channel of several ranks: collectives of small tensors that complete or name missing ranks.

A rank sends about ``log2(ranks)`` messages in a collective and sends no request to the rendezvous
store. If a collective fails, a roll call finds out which ranks are missing (``roll_call.py``). The
connections are in ``mesh.py``.

Only threads of this process touch the data, never gloo. Gloo's thread may be the last to release a
tensor, for which it enters the interpreter. If a process on Python 3.8 forks its loader workers at
that moment, the workers deadlock.
"""

from __future__ import annotations

import time
import weakref
from types import ModuleType
from typing import Callable, Dict, List, NoReturn, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mapsage.distributed.descriptors import DescriptorLimitError

from .channel import Channel, RankLostError
from .mesh import LinkLostError
from .missing_ranks import describe_missing
from .roll_call import Lane, RollCall


class _GivenUpError(Exception):
    """This rank ends a collective early: it is overdue, or another rank has given it up."""


class _Collective:
    """One collective of this rank: sends and receives its messages until the deadline.

    Args:
        lane: Lane of the channel.
        roll: Roll call of this process.
        seconds: Time that the collective may take.

    Attributes:
        position: Position of this rank in the group, from 0.
    """

    def __init__(self, lane: Lane, roll: RollCall, seconds: float) -> None:
        self._lane, self._roll, self._seconds = lane, roll, seconds
        self._number = lane.entered
        self._deadline = time.monotonic() + seconds
        self._ranks = lane.ranks
        self.position = lane.ranks.index(roll.rank)

    def send(self, position: int, tag: int, data: memoryview) -> None:
        """Send bytes to the rank at a position of the group, modulo the group's size.

        Args:
            position: Position of the receiver.
            tag: Number that tells apart the messages between the same ranks.
            data: Bytes to send.
        """
        self._roll.mesh.send(
            self._ranks[position % len(self._ranks)],
            self._lane.key,
            self._number,
            tag,
            data,
            self.check,
        )

    def receive(self, position: int, tag: int, size: int) -> bytearray:
        """Return the bytes from the rank at a position of the group, see :meth:`send`.

        Raises:
            ValueError: If the rank sent more or fewer bytes than ``size``.
        """
        rank = self._ranks[position % len(self._ranks)]
        data = self._roll.mesh.receive(rank, self._lane.key, self._number, tag, self.check)
        if len(data) != size:
            raise ValueError(
                f'rank {rank} sent {len(data)} bytes where this rank expects {size}: '
                f'their tensors differ, or they are in different collectives.'
            )
        return data

    def check(self) -> None:
        """Raise _GivenUpError if another rank has given up, or after the deadline."""
        if self._roll.failed(self._lane):
            raise _GivenUpError('another rank has given up')
        if time.monotonic() > self._deadline:
            raise _GivenUpError(f'no answer within {self._seconds:g} s')


class GroupChannel(Channel):
    """The channel of several ranks. Use :func:`~.open_channels.open_channel`.

    Args:
        group: Process group of the ranks; the channel does not use its connections.
        ranks: Global ranks of the group, in group order.
        timeout: Seconds a collective may wait for the other ranks.
        name: Name of the channel. It is equal on all ranks, and no other channel has it.
        roll: Roll call of this process.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        timeout: float,
        name: str,
        roll: RollCall,
    ) -> None:
        super().__init__(ranks, dist.get_rank())
        self.timeout = timeout
        # Weak: a group that outlives destroy_process_group may abort the process at its end.
        self._group = weakref.ref(group)
        self._roll = roll
        self._lane = self._roll.open(name, ranks)
        self._failure: Optional[RankLostError] = None

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace a tensor by its maximum over the ranks, see :meth:`Channel.max`.

        After the round with distance d, a rank has the maximum of the 2 * d ranks that end with it.
        """

        def reduce(collective: _Collective) -> None:
            distance = 1
            while distance < len(self.ranks):
                collective.send(collective.position + distance, distance, _bytes(largest))
                _bytes(received)[:] = collective.receive(
                    collective.position - distance, distance, size
                )
                torch.max(largest, received, out=largest)
                distance *= 2

        largest = tensor.detach().clone(memory_format=torch.contiguous_format)
        received, size = torch.empty_like(largest), len(_bytes(largest))
        self._run(reduce, timeout)
        tensor.copy_(largest)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with the tensor of rank ``source``, see :meth:`Channel.broadcast`.

        In the round with distance d, the d ranks that have the data send it d positions further.
        """

        def spread(collective: _Collective) -> None:
            from_root = (collective.position - root) % len(self.ranks)
            distance = 1
            while distance < len(self.ranks):
                if from_root < distance and from_root + distance < len(self.ranks):
                    collective.send(collective.position + distance, 0, _bytes(data))
                elif distance <= from_root < 2 * distance:
                    _bytes(data)[:] = collective.receive(collective.position - distance, 0, size)
                distance *= 2

        data, root = tensor.detach().contiguous(), self.ranks.index(source)
        size = len(_bytes(data))
        self._run(spread)
        if not tensor.is_contiguous():
            tensor.detach().copy_(data)

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's tensor, see :meth:`Channel.gather`.

        Row i of the buffer is the tensor of the rank i positions before this one. In the round with
        distance d, a rank sends its first d rows, which the receiver appends.
        """

        def collect(collective: _Collective) -> None:
            _bytes(rows[0])[:] = _bytes(tensor)
            distance = 1
            while distance < world:
                count = min(distance, world - distance)
                collective.send(collective.position + distance, distance, _bytes(rows[:count]))
                _bytes(rows[distance : distance + count])[:] = collective.receive(
                    collective.position - distance, distance, count * size
                )
                distance *= 2

        world, size = len(self.ranks), len(_bytes(tensor))
        rows = torch.empty((world, *tensor.shape), dtype=tensor.dtype)
        self._run(collect)
        this_position = self.ranks.index(self.rank)
        return [rows[(this_position - position) % world] for position in range(world)]

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small tensor, see :meth:`Channel.trade`.

        Row i of the buffer travels i positions: in the round with distance d, by d positions if bit
        d of i is set.
        """

        def pass_on(collective: _Collective) -> None:
            distance = 1
            while distance < world:
                travelling = [offset for offset in range(world) if offset & distance]
                moved_rows = rows[travelling]
                collective.send(collective.position + distance, distance, _bytes(moved_rows))
                _bytes(moved_rows)[:] = collective.receive(
                    collective.position - distance, distance, len(_bytes(moved_rows))
                )
                rows[travelling] = moved_rows
                distance *= 2

        world, this_position = len(self.ranks), self.ranks.index(self.rank)
        rows = tensor[[(this_position + offset) % world for offset in range(world)]].contiguous()
        self._run(pass_on)
        return rows[[(this_position - position) % world for position in range(world)]]

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
    ) -> None:
        """Send each rank its rows of a tensor, see :meth:`Channel.all_to_all`."""

        def swap(collective: _Collective) -> None:
            arrivals[collective.position].copy_(sent[collective.position])
            for distance in range(1, len(self.ranks)):
                receiver = (collective.position + distance) % len(self.ranks)
                if input_sizes[receiver]:
                    collective.send(receiver, 0, _bytes(sent[receiver]))
            for distance in range(1, len(self.ranks)):
                sender = (collective.position - distance) % len(self.ranks)
                if output_sizes[sender]:
                    arrival = _bytes(arrivals[sender])
                    arrival[:] = collective.receive(sender, 0, len(arrival))

        received = output.detach().contiguous()
        sent, arrivals = tensor.split(input_sizes), received.split(output_sizes)
        self._run(swap)
        if not output.is_contiguous():
            output.detach().copy_(received)

    def publish(self, key: str, text: str) -> bool:
        """Store a text for ranks that are stuck elsewhere, see :meth:`Channel.publish`."""
        return self._roll.publish(
            self._lane, key, text.encode('utf-8', 'backslashreplace').decode()
        )

    def published(self, key: str) -> Optional[str]:
        """Return the first text published under ``key``, see :meth:`Channel.published`."""
        return self._roll.published(self._lane, key)

    def _run(
        self, exchange: Callable[[_Collective], None], timeout: Optional[float] = None
    ) -> None:
        """Run a collective and count it; the counts show which rank did not enter it."""
        if self._failure is not None:
            raise self._failure
        group = self._group()
        if group is None or group not in c10d()._pg_group_ranks:
            raise RuntimeError(
                'the process group of this channel was destroyed: open a new '
                'channel after init_process_group.'
            )
        self._lane.entered += 1
        self._lane.inside = True
        seconds = self.timeout if timeout is None else min(timeout, self.timeout)
        collective = _Collective(self._lane, self._roll, seconds)
        try:
            collective.check()
            exchange(collective)
        except DescriptorLimitError:
            self._roll.alarm(self._lane, {})
            raise
        except LinkLostError as error:
            self._fail('a connection broke', error, {error.rank: str(error)})
        except (_GivenUpError, RuntimeError, ValueError) as error:
            self._fail(first_line(error), error, {})
        finally:
            self._lane.inside = False

    def _fail(self, symptom: str, error: Exception, lost: Dict[int, str]) -> NoReturn:
        """Report the failure to the other ranks, find out which are missing, and raise.

        Args:
            symptom: What this rank noticed, for the message.
            error: Exception that ended the collective.
            lost: Reason by global rank, for ranks whose connection broke.
        """
        self._roll.alarm(self._lane, lost, self.timeout)
        missing = self._roll.find_missing(self._lane)
        self._roll.mesh.drop(self._lane.key)
        refused = self._roll.mesh.refused()
        if refused is not None:
            self._failure = RankLostError(f'rank {self.rank} ends: {refused[1]}.', refused[0])
            raise self._failure from error
        (description, advice), ranks = describe_missing(missing, self.rank)
        self._failure = RankLostError(
            f'rank {self.rank} waited at agreement {self._lane.entered} and {description} '
            f'({symptom}). {advice}',
            ranks,
        )
        raise self._failure from error


def c10d() -> ModuleType:
    """Return torch's module with the private tables of groups, for which it has no type hints."""
    return dist.distributed_c10d


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [''])[0]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor, or of a copy if the tensor is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # NumPy has no bfloat16.
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return flat.numpy().view(np.uint8).data
