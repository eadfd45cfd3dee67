"""Sends a checkpoint file from one rank to several others at the start of a run.

The file travels along a chain of ranks, chunk by chunk: in every step each rank passes on the chunk
that it received in the step before. Every connection thus carries the file once, and all of them
work at the same time. `copies.py` decides which ranks form the chain.

Example with chunks c0, c1 and the chain A -> B -> C:

    step 0: A sends c0 to B
    step 1: A sends c1 to B, B sends c0 to C
    step 2: B sends c1 to C
"""

from __future__ import annotations

from typing import BinaryIO, Dict, List, Optional, Sequence, Tuple, Union

import torch

from mapsage.distributed import Channel

from .store import CHUNK_BYTES, Arrival

Data = Union[bytes, memoryview]


def pass_along(
    channel: Channel,
    chain: Sequence[int],
    size: int,
    source: Optional[BinaryIO] = None,
    arrival: Optional[Arrival] = None,
) -> Optional[Exception]:
    """Send a file from the first rank of a chain to all others in it. Collective, for all ranks.

    A rank that cannot read or write the file still takes part until the end, so that no rank waits.

    Args:
        channel: Channel to all ranks.
        chain: At least two ranks, equal on all ranks. A rank outside the chain passes nothing on.
        size: Bytes of the file.
        source: File that is open for reading; on the first rank of the chain.
        arrival: Copy that is being written; on the other ranks of the chain.

    Returns:
        The error of this rank's file, if any.

    Raises:
        RankLostError: If ranks did not come, with their numbers.
    """
    chunks = -(-size // CHUNK_BYTES)
    # This rank's position in the chain; one behind the last if it only takes part in the
    # collective.
    position = chain.index(channel.rank) if channel.rank in chain else len(chain)
    previous = chain[position - 1] if 0 < position < len(chain) else None
    following = chain[position + 1] if position < len(chain) - 1 else None
    error: Optional[Exception] = None
    data: Data = b''

    def chunk_bytes(sender: int, step: int) -> int:
        """Return how many bytes the rank at position ``sender`` of the chain sends in a step."""
        number = step - sender
        return min(CHUNK_BYTES, size - number * CHUNK_BYTES) if 0 <= number < chunks else 0

    for step in range(chunks + len(chain) - 2 if chunks else 0):
        outgoing: Dict[int, Tuple[int, Data]] = {}
        incoming: Dict[int, int] = {}
        sent_bytes = chunk_bytes(position, step)
        if following is not None and sent_bytes:
            if source is not None:
                data, error = _read(source, sent_bytes, error)
            outgoing[following] = sent_bytes, data
            # One byte comes back, which says that the receiver has written the chunk before.
            incoming[following] = 1
        received_bytes = chunk_bytes(position - 1, step)
        if previous is not None and received_bytes:
            outgoing[previous] = 1, b'\0'
            incoming[previous] = received_bytes
        received = _swap(channel, outgoing, incoming)
        if previous is not None and received_bytes:
            data = received[previous]
            if error is None:
                assert arrival is not None
                try:
                    arrival.write(data)
                except OSError as failure:
                    error = failure
    return error


def _swap(
    channel: Channel, outgoing: Dict[int, Tuple[int, Data]], incoming: Dict[int, int]
) -> Dict[int, memoryview]:
    """Exchange bytes with other ranks. Collective.

    Args:
        channel: Channel to all ranks.
        outgoing: Number of bytes and the bytes, by receiving rank.
        incoming: Number of bytes by sending rank.

    Returns:
        The bytes by sending rank.
    """
    sends = [outgoing.get(rank, (0, b'')) for rank in channel.ranks]
    receives = [incoming.get(rank, 0) for rank in channel.ranks]
    tensors: List[torch.Tensor] = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8) for size, data in sends if size
    ]
    output = torch.empty(sum(receives), dtype=torch.uint8)
    channel.all_to_all(
        output,
        torch.cat(tensors) if tensors else output.new_empty(0),
        receives,
        [size for size, _ in sends],
    )
    return {
        rank: memoryview(tensor.numpy())  # type: ignore[arg-type]
        for rank, tensor in zip(channel.ranks, output.split(receives))
    }


def _read(
    source: BinaryIO, size: int, error: Optional[Exception]
) -> Tuple[bytes, Optional[Exception]]:
    """Return the next bytes of a file, or zeros once the file cannot be read, and the error."""
    data = b''
    if error is None:
        try:
            data = source.read(size)
            if len(data) < size:
                raise OSError(f'{source.name} became shorter while it was read')
        except OSError as failure:
            error = failure
    return data.ljust(size, b'\0'), error
