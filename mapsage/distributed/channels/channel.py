"""The interface of small collectives of CPU tensors, and the channel of a single process.

A channel either completes a collective or raises an error that names the missing ranks. Open one
with :func:`mapsage.distributed.open_channel`, which returns a :class:`SerialChannel` in a single
process: callers never ask whether there are other ranks. The channel of several ranks is in
``group_channel.py``.
"""

from __future__ import annotations

import abc
import itertools
from typing import Dict, List, Optional, Sequence

import torch

from mapsage.base.errors import UserError

# Limit of an error's text, in bytes of UTF-8.
_MAX_BYTES = 4000


class RankLostError(UserError, RuntimeError):
    """Some ranks did not enter a collective before its deadline, or died.

    Attributes:
        ranks: Global ranks that were waited for; empty if they are not known.
    """

    # A restarted job may succeed.
    final = False

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class Channel(abc.ABC):
    """Small collectives of CPU tensors over the ranks of a group.

    A collective that cannot complete raises :class:`RankLostError`, which names the missing ranks.

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
            timeout: Seconds that the reduction may take, at most the channel's timeout; the
                channel's timeout when None.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a CPU tensor with the tensor of rank ``source``. Collective.

        Args:
            tensor: Tensor of the same shape and dtype on every rank.
            source: Global rank that sends its tensor.
        """

    @abc.abstractmethod
    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's CPU tensor, in group order. Collective; shapes must be equal."""

    @abc.abstractmethod
    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small CPU tensor and return the rows they sent. Collective.

        Rows travel through other ranks, so that each rank sends only ``log2(ranks)`` messages.

        Args:
            tensor: Tensor of the same shape on every rank, one row per rank in group order.

        Returns:
            A tensor of the same shape, whose row i comes from the i-th rank of the group.
        """

    @abc.abstractmethod
    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
    ) -> None:
        """Send each rank its rows of a CPU tensor and receive rows into ``output``. Collective.

        Ranks without rows for each other exchange no message and do not wait for each other.

        Args:
            output: Buffer for the received rows, in group order of the senders.
            tensor: Rows to send, in group order of the receivers.
            output_sizes: Number of rows that each rank sends to this rank; may differ.
            input_sizes: Number of rows that this rank sends to each rank.
        """

    @abc.abstractmethod
    def publish(self, key: str, text: str) -> bool:
        """Store a text where ranks that are stuck elsewhere can read it later.

        Returns:
            Whether this was the first text under ``key``. Later texts are dropped. Also False if
            the rendezvous store no longer answers: publishing never raises.
        """

    @abc.abstractmethod
    def published(self, key: str) -> Optional[str]:
        """Return the first text published under ``key``; None without one or without a store."""

    def gather_texts(self, text: str) -> List[str]:
        """Return every rank's text, in group order. Collective.

        The ranks run one collective if all texts are empty, else two. Any text can be sent:
        characters that UTF-8 cannot encode, such as the undecodable bytes of a file name, arrive as
        backslash escapes.
        """
        encoded = text.encode('utf-8', 'backslashreplace')
        # gather() needs equal shapes, so every rank pads its text to the longest one.
        longest = torch.tensor([len(encoded)])
        self.max(longest)
        if not longest.item():
            return [''] * len(self.ranks)
        padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
        padded[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        return [
            bytes(row.tolist()).rstrip(b'\0').decode('utf-8', 'replace')
            for row in self.gather(padded)
        ]

    def next_number(self) -> int:
        """Return 0, 1, 2, ...; ranks that have called it equally often get the same number."""
        return next(self._numbers)


class SerialChannel(Channel):
    """The channel of a single process: every collective completes immediately.

    Args:
        rank: Global rank of this process.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__([rank], rank)
        self._published: Dict[str, str] = {}

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Leave the tensor unchanged: it is the maximum over one rank."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Leave the tensor unchanged: the only rank is the source."""

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return a copy of the tensor, because a collective returns new tensors."""
        return [tensor.clone()]

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the only row."""
        return tensor.clone()

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
    ) -> None:
        """Copy all rows to the output."""
        output.copy_(tensor)

    def publish(self, key: str, text: str) -> bool:
        """Store the text in this process, with the escapes that another rank would read."""
        if key in self._published:
            return False
        self._published[key] = text.encode('utf-8', 'backslashreplace').decode()
        return True

    def published(self, key: str) -> Optional[str]:
        """Return the first text published under ``key``, or None."""
        return self._published.get(key)


def error_text(error: BaseException) -> str:
    """Return type and message of an exception as a text that can be sent and logged anywhere.

    The text has at most 4,000 bytes of UTF-8. Characters that UTF-8 cannot encode, such as the
    undecodable bytes of a file name, become backslash escapes.
    """
    try:
        return bounded(f'{type(error).__name__}: {error}')
    # A __str__ may raise anything, and the other ranks must learn of the error even then.
    except Exception:
        return f'{type(error).__name__} without a readable message'


def bounded(text: str) -> str:
    """Return the text cut to 4,000 bytes of UTF-8, with escapes for what UTF-8 cannot encode."""
    return text.encode('utf-8', 'backslashreplace')[:_MAX_BYTES].decode('utf-8', 'ignore')
