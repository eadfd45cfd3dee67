"""Small collectives of CPU tensors, and the channel of a single process.

A channel either completes a collective or raises an error that names the missing ranks. Open one
with :func:`mapsage.distributed.open_channel`, which returns a :class:`SerialChannel` in a single
process: callers never ask whether there are other ranks. The channel of several ranks is in
``group_channel.py``.
"""

from __future__ import annotations

import abc
import itertools
from typing import Callable, Dict, List, Optional, Sequence

import numpy as np
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
    A subclass carries the messages between ranks; one thread at a time uses a channel.

    Args:
        ranks: Global ranks of the group, in group order.
        rank: Global rank of this process.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.rank = list(ranks), rank
        self._position = self.ranks.index(rank)
        self._numbers = itertools.count()

    @abc.abstractmethod
    def _run(self, exchange: Callable[[], None], timeout: Optional[float] = None) -> None:
        """Run a collective, whose messages ``exchange`` sends and receives."""

    def _send(self, position: int, tag: int, data: memoryview) -> None:
        """Send bytes to the rank at a position of the group, modulo the group's size.

        Args:
            position: Position of the receiver.
            tag: Number that tells apart the messages between the same ranks.
            data: Bytes to send.
        """
        raise NotImplementedError('the only rank has no peer')

    def _receive(self, position: int, tag: int, size: int) -> bytearray:
        """Return the bytes from the rank at a position, see :meth:`_send`.

        Raises:
            ValueError: If the rank sent more or fewer bytes than ``size``.
        """
        raise NotImplementedError('the only rank has no peer')

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

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Replace an int64 CPU tensor by its elementwise maximum over the ranks. Collective.

        After the round with distance d, a rank has the maximum of the 2 * d ranks that end with it.

        Args:
            tensor: Tensor of the same shape on every rank.
            timeout: Seconds that the reduction may take, at most the channel's timeout; the
                channel's timeout when None.
        """

        def reduce() -> None:
            for distance in self._distances():
                self._send(self._position + distance, distance, _bytes(largest))
                _bytes(received)[:] = self._receive(self._position - distance, distance, size)
                torch.max(largest, received, out=largest)

        largest = tensor.detach().clone(memory_format=torch.contiguous_format)
        received, size = torch.empty_like(largest), len(_bytes(largest))
        self._run(reduce, timeout)
        tensor.copy_(largest)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a CPU tensor with the tensor of rank ``source``. Collective.

        In the round with distance d, the d ranks that have the data send it d positions further.

        Args:
            tensor: Tensor of the same shape and dtype on every rank.
            source: Global rank that sends its tensor.
        """

        def spread() -> None:
            from_root = (self._position - root) % len(self.ranks)
            for distance in self._distances():
                if from_root < distance and from_root + distance < len(self.ranks):
                    self._send(self._position + distance, 0, _bytes(data))
                elif distance <= from_root < 2 * distance:
                    _bytes(data)[:] = self._receive(self._position - distance, 0, size)

        data, root = tensor.detach().contiguous(), self.ranks.index(source)
        size = len(_bytes(data))
        self._run(spread)
        if not tensor.is_contiguous():
            tensor.detach().copy_(data)

    def gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return every rank's CPU tensor, in group order. Collective; shapes must be equal.

        Row i of the buffer is the tensor of the rank i positions before this one. In the round with
        distance d, a rank sends its first d rows, which the receiver appends.
        """

        def collect() -> None:
            for distance in self._distances():
                count = min(distance, world - distance)
                self._send(self._position + distance, distance, _bytes(rows[:count]))
                _bytes(rows[distance : distance + count])[:] = self._receive(
                    self._position - distance, distance, count * size
                )

        world, size = len(self.ranks), len(_bytes(tensor))
        rows = torch.empty((world, *tensor.shape), dtype=tensor.dtype)
        _bytes(rows[0])[:] = _bytes(tensor)
        self._run(collect)
        return [rows[(self._position - position) % world] for position in range(world)]

    def trade(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send each rank its row of a small CPU tensor and return the rows they sent. Collective.

        Rows travel through other ranks, so that each rank sends only ``log2(ranks)`` messages. Row i
        of the buffer travels i positions: in the round with distance d, by d positions if bit d of
        i is set.

        Args:
            tensor: Tensor of the same shape on every rank, one row per rank in group order.

        Returns:
            A tensor of the same shape, whose row i comes from the i-th rank of the group.
        """

        def pass_on() -> None:
            for distance in self._distances():
                travelling = [offset for offset in range(world) if offset & distance]
                moved_rows = rows[travelling]
                self._send(self._position + distance, distance, _bytes(moved_rows))
                _bytes(moved_rows)[:] = self._receive(
                    self._position - distance, distance, len(_bytes(moved_rows))
                )
                rows[travelling] = moved_rows

        world = len(self.ranks)
        rows = tensor[[(self._position + offset) % world for offset in range(world)]].contiguous()
        self._run(pass_on)
        return rows[[(self._position - position) % world for position in range(world)]]

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

        def swap() -> None:
            arrivals[self._position].copy_(sent[self._position])
            world = len(self.ranks)
            for receiver in range(self._position + 1, self._position + world):
                if input_sizes[receiver % world]:
                    self._send(receiver, 0, _bytes(sent[receiver % world]))
            for sender in range(self._position - 1, self._position - world, -1):
                if output_sizes[sender % world]:
                    arrival = _bytes(arrivals[sender % world])
                    arrival[:] = self._receive(sender, 0, len(arrival))

        received = output.detach().contiguous()
        sent, arrivals = tensor.split(input_sizes), received.split(output_sizes)
        self._run(swap)
        if not output.is_contiguous():
            output.detach().copy_(received)

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

    def _distances(self) -> List[int]:
        """Return the distances of the rounds: the powers of two below the number of ranks."""
        return [1 << round_ for round_ in range((len(self.ranks) - 1).bit_length())]


class SerialChannel(Channel):
    """The channel of a single process: every collective completes immediately.

    Args:
        rank: Global rank of this process.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__([rank], rank)
        self._published: Dict[str, str] = {}

    def _run(self, exchange: Callable[[], None], timeout: Optional[float] = None) -> None:
        exchange()

    def max(self, tensor: torch.Tensor, timeout: Optional[float] = None) -> None:
        """Leave the tensor as it is, because every training step asks."""

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


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor, or of a copy if the tensor is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # NumPy has no bfloat16.
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return flat.numpy().view(np.uint8).data
