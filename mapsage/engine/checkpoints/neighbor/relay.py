"""Passes a file along a chain of ranks, chunk by chunk, at the start of a run."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from mapsage.distributed import Channel

from .store import CHUNK_BYTES


def pass_along(channel: Channel, chain: Sequence[int], size: int, source: Any = None,
               arrival: Any = None) -> Optional[Exception]:
    """Send a file from the first rank of a chain to all others in it. Collective, for all ranks.

    Each rank hands on the chunk of the step before, so that every connection carries the file once
    and all carry it at the same time. A rank that cannot read or write takes part to the end.

    Args:
        channel: Channel to all ranks.
        chain: Ranks, at least two; equal on all ranks, which need not be among them.
        size: Bytes of the file.
        source: File, open for reading; on the first rank of the chain.
        arrival: :class:`~.store.Arrival` on the others.

    Returns:
        The error of this rank's file, if it had one.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    chunks = -(-size // CHUNK_BYTES)
    place = chain.index(channel.rank) if channel.rank in chain else None
    error: Optional[Exception] = None
    held = b''
    for step in range(chunks + len(chain) - 2 if chunks else 0):
        def chunk(giver: int, step: int = step) -> int:
            """Return how many bytes the rank at that place of the chain gives in this step."""
            number = step - giver
            return min(CHUNK_BYTES, size - number * CHUNK_BYTES) if 0 <= number < chunks else 0

        gives: Dict[int, Tuple[int, Any]] = {}
        takes: Dict[int, int] = {}
        if place is not None and place < len(chain) - 1 and chunk(place):
            if source is not None:
                held, error = _read(source, chunk(place), error)
            gives[chain[place + 1]] = chunk(place), held
            takes[chain[place + 1]] = 1  # a byte that says that the chunk before has been written
        if place and chunk(place - 1):
            gives[chain[place - 1]] = 1, b'\0'
            takes[chain[place - 1]] = chunk(place - 1)
        came = _swap(channel, gives, takes)
        if place and chunk(place - 1):
            held = came[chain[place - 1]]
            if error is None:
                try:
                    arrival.write(held)
                except OSError as failed:
                    error = failed
    return error


def _swap(channel: Channel, gives: Dict[int, Tuple[int, Any]],
          takes: Dict[int, int]) -> Dict[int, Any]:
    """Give bytes to ranks, and take some from them; return these by rank. Collective."""
    given = [gives.get(rank, (0, b'')) for rank in channel.ranks]
    taken = [takes.get(rank, 0) for rank in channel.ranks]
    parts: List[torch.Tensor] = [torch.frombuffer(bytearray(data), dtype=torch.uint8)
                                 for size, data in given if size]
    output = torch.empty(sum(taken), dtype=torch.uint8)
    channel.all_to_all(output, torch.cat(parts) if parts else output.new_empty(0), taken,
                       [size for size, _ in given])
    return {rank: part.numpy() for rank, part in zip(channel.ranks, output.split(taken))}


def _read(source: Any, size: int, error: Optional[Exception]) -> Tuple[bytes, Any]:
    """Return bytes of a file; zeros in their place once it cannot be read."""
    data = b''
    if error is None:
        try:
            data = source.read(size)
            if len(data) < size:
                raise OSError(f'{source.name} became shorter while it was read')
        except OSError as failed:
            error = failed
    return data.ljust(size, b'\0'), error
