"""The interface of small collectives of CPU tensors, and the channel of a single process.

A channel either completes a collective or raises an error that names the missing ranks. Use
:func:`mapsage.distributed.open_channel`, which always returns one: callers do not ask whether there
are other ranks.
"""
from __future__ import annotations

import abc
import itertools
from typing import Dict, List, Optional, Sequence

import torch

from mapsage.errors import UserError

_MAX_BYTES = 4000  # of an error's text, in UTF-8


class RankLostError(UserError, RuntimeError):
    """Some ranks did not enter a collective before its deadline, or died.

    Attributes:
        ranks: Global ranks that were waited for; empty when they are not known.
    """

    final = False

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Channel(abc.ABC):
    """Small collectives of CPU tensors over a number of ranks.

    Every collective raises :class:`RankLostError`, which names the ranks that did not come.

    Args:
        ranks: Global ranks of the group, in group order.
        rank: Global rank of this process.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = list(ranks)
        self.rank = rank
        self._numbers = itertools.count()

    @abc.abstractmethod
    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace an int64 CPU tensor by its elementwise maximum over the ranks. Collective.

        Args:
            tensor: Tensor of the same shape on every rank.
            timeout: Seconds to wait until all ranks have entered, when the reduction shall start
                only then: if they do not come, nothing is left behind in the group. With None it
                starts at once and may take the channel's own timeout.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a CPU tensor with the one of rank ``source``. Collective.

        Args:
            tensor: Tensor of the same shape and dtype on every rank.
            source: Global rank whose tensor all ranks receive.
        """

    @abc.abstractmethod
    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's CPU tensor, in group order. Collective; shapes must be equal."""

    @abc.abstractmethod
    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small CPU tensor and return the rows they sent. Collective.

        The rows are passed on from rank to rank, in ``log2(ranks)`` messages from each.

        Args:
            tensor: Tensor of the same shape on every rank, a row for each rank in group order.
        """

    @abc.abstractmethod
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                   input_sizes: List[int]) -> None:
        """Send each rank its part of a CPU tensor and receive theirs into ``output``. Collective.

        Args:
            output: Buffer for the received parts, in group order.
            tensor: Parts to send, in group order.
            output_sizes: Number of rows that each rank sends to this one; may differ. Ranks with
                nothing for each other do not talk, and a rank does not wait for those.
            input_sizes: Number of rows that this rank sends to each one.
        """

    @abc.abstractmethod
    def publish(self, key: str, text: str) -> bool:
        """Store a text where ranks that are stuck elsewhere can read it later.

        Returns:
            Whether this was the first text under ``key``. Only the first is kept. False also when
            the rendezvous store no longer answers: publishing never raises.
        """

    @abc.abstractmethod
    def published(self, key: str) -> Optional[str]:
        """Return the text that was published first, or None. Also None when the store is gone."""

    def gather_texts(self, text: str) -> List[str]:
        """Return every rank's text, in group order. Collective; a single one when all are empty.

        Any text can be sent: what UTF-8 cannot encode, such as the undecodable bytes of a file
        name, arrives as a backslash escape.
        """
        mine = text.encode('utf-8', 'backslashreplace')
        longest = torch.tensor([len(mine)])
        self.max(longest)
        if not longest.item():
            return [''] * len(self.ranks)
        padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
        padded[:len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        return [bytes(each.tolist()).rstrip(b'\0').decode('utf-8', 'replace')
                for each in self.gather(padded)]

    def next_number(self) -> int:
        """Return 0, 1, ...: equal on all ranks that have called it equally often."""
        return next(self._numbers)


class SerialChannel(Channel):
    """The channel of one process without peers: every collective ends at once.

    Args:
        rank: Global rank of this process.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__([rank], rank)
        self._published: Dict[str, str] = {}

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Leave the tensor unchanged: it is the maximum over one rank."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Leave the tensor unchanged: it is that of the only rank."""

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return a copy of the tensor, as a collective does."""
        return [tensor.clone()]

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the only row."""
        return tensor.clone()

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                   input_sizes: List[int]) -> None:
        """Copy the only part."""
        output.copy_(tensor)

    def publish(self, key: str, text: str) -> bool:
        """Keep the text in this process, in the form in which another one would read it."""
        if key in self._published:
            return False
        self._published[key] = text.encode('utf-8', 'backslashreplace').decode()
        return True

    def published(self, key: str) -> Optional[str]:
        """Return the text that was published first, or None."""
        return self._published.get(key)


def error_text(error: BaseException) -> str:
    """Return type and message of an exception as a text that can be sent and logged anywhere.

    It has at most 4,000 bytes of UTF-8. What UTF-8 cannot encode, such as the undecodable bytes of
    a file name, becomes a backslash escape.
    """
    try:
        return bounded(f'{type(error).__name__}: {error}')
    except Exception:  # a faulty __str__; the report of the error must get out all the same
        return f'{type(error).__name__} without a readable message'


def bounded(text: str) -> str:
    """Return the text cut to 4,000 bytes that UTF-8 can encode."""
    return text.encode('utf-8', 'backslashreplace')[:_MAX_BYTES].decode('utf-8', 'ignore')
