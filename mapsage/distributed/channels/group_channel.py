"""The channel of several ranks: its collectives complete or name the missing ranks.

A rank sends about ``log2(ranks)`` messages in a collective (``channel.py``) and sends no request to
the rendezvous XX

Only threads of this process touch the data, never gloo. Gloo's thread may be the last to release a
tensor, for which it enters the interpreter. If a process on Python 3.8 forks its loader workers at
that moment, the workers deadlock.
"""

from __future__ import annotations

import time
import weakref
from types import ModuleType
from typing import Callable, Dict, NoReturn, Optional, Sequence

import torch.distributed as dist

from mapsage.distributed.descriptors import DescriptorLimitError
from mapsage.distributed.lost_ranks import describe_missing

from .channel import Channel, RankLostError
from .mesh import LinkLostError
from .roll_call import RollCall


class _GivenUpError(Exception):
    """This rank ends a collective early: it is overdue, or another rank has given it up."""


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
        # Seconds of the collective under way, and the time at which they are over.
        self._seconds = self._deadline = 0.0

    def publish(self, key: str, text: str) -> bool:
        """Store a text for ranks that are stuck elsewhere, see :meth:`Channel.publish`."""
        return self._roll.publish(
            self._lane, key, text.encode('utf-8', 'backslashreplace').decode()
        )

    def published(self, key: str) -> Optional[str]:
        """Return the first text published under ``key``, see :meth:`Channel.published`."""
        return self._roll.published(self._lane, key)

    def _send(self, position: int, tag: int, data: memoryview) -> None:
        receiver = self.ranks[position % len(self.ranks)]
        lane = self._lane
        self._roll.mesh.send(receiver, lane.key, lane.entered, tag, data, self._check)

    def _receive(self, position: int, tag: int, size: int) -> bytearray:
        rank, lane = self.ranks[position % len(self.ranks)], self._lane
        data = self._roll.mesh.receive(rank, lane.key, lane.entered, tag, self._check)
        if len(data) != size:
            raise ValueError(
                f'rank {rank} sent {len(data)} bytes where this rank expects {size}: '
                f'their tensors differ, or they are in different collectives.'
            )
        return data

    def _check(self) -> None:
        """Raise _GivenUpError if another rank has given up, or after the deadline."""
        if self._roll.failed(self._lane):
            raise _GivenUpError('another rank has given up')
        if time.monotonic() > self._deadline:
            raise _GivenUpError(f'no answer within {self._seconds:g} s')

    def _run(self, exchange: Callable[[], None], timeout: Optional[float] = None) -> None:
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
        self._seconds = self.timeout if timeout is None else min(timeout, self.timeout)
        self._deadline = time.monotonic() + self._seconds
        try:
            self._check()
            exchange()
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
