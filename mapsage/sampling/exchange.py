"""Move samples between ranks as a plan says."""
from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, List, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.distributed import Channel, open_channel, raise_together

from .candidate import Candidate
from .packing import Parcel, pack_samples, unpack_samples, write_parcel
from .plan import ExchangePlan, Move

PURPOSE = 'sampling'  # of the channel, whose group is used for nothing else
_FAILED = 1


class SampleMismatchError(ValueError):
    """Ranks that exchange samples hold samples with different keys."""


@dataclass
class Traffic:
    """Bytes that this rank sent and received; every exchange adds to them.

    Attributes:
        sent_bytes: Bytes of the tensors sent.
        received_bytes: Bytes of the tensors received.
        header_bytes: Bytes of the structure and metadata sent.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    header_bytes: int = 0


class _Letter(NamedTuple):
    """Four numbers that are sent to each rank ahead of the samples, whatever follows."""

    status: int
    keys: int
    header_bytes: int
    payload_bytes: int


def exchange(samples: Sequence[Any], plan: ExchangePlan,
             group: Optional[dist.ProcessGroup] = None,
             place: Optional[Callable[[Any], Any]] = None, timeout: Optional[float] = None,
             traffic: Optional[Traffic] = None) -> List[Any]:
    """Return this rank's batch of a plan. Collective, unless nothing moves.

    Only what moves is sent, over a CPU gloo group: to each destination one byte buffer, in which
    the bytes of all tensors follow a header with their dtypes and shapes, the samples' structure
    and metadata.

    Args:
        samples: This rank's samples, ``plan.valid_counts[rank]`` of them. Mappings or objects of
            any class that pickles; tensors in them of any device, dtype and shape.
        plan: Plan of the exchange, equal on every rank.
        group: Process group of the plan's ranks, in order; all ranks when None.
        place: Function that takes a sample that has arrived in host memory and returns it on the
            device where this rank needs it. Samples stay in host memory when None.
        timeout: Seconds a rank may be late; the group's own timeout when None.
        traffic: Counters to which this exchange adds its bytes.

    Returns:
        ``plan.targets[rank]`` samples, no two of them the same object: a sample that the plan gives
        to this rank twice is copied.

    Raises:
        SampleMismatchError: On every rank, if ranks hold samples with different keys.
        RankError: If another rank failed; the one that failed raises its own exception.
        RankLostError: Naming the ranks that did not come.
    """
    channel = open_channel(group, timeout, PURPOSE)
    rank = channel.ranks.index(channel.rank)
    if not plan.moves:
        _check_count(samples, plan, rank)
        return _distinct(samples[:plan.targets[rank]])
    parcels, letters, failure = _prepare(samples, plan, rank)
    received = _trade_letters(channel, letters)
    if any(letter.status for letter in received):
        raise_together(channel, failure, 'packing samples')
    _check_keys(channel, [letter.keys for letter in received], samples)
    buffer = _trade_parcels(channel, parcels, received)
    if traffic is not None:
        traffic.sent_bytes += sum(letter.payload_bytes for letter in letters)
        traffic.received_bytes += sum(letter.payload_bytes for letter in received)
        traffic.header_bytes += sum(letter.header_bytes for letter in letters)
    batch, failure = _assemble(samples, plan, rank, received, buffer, place)
    # Arrivals may not fit into this rank's device memory: then no rank goes on to the step.
    if any(_trade_flags(channel, failure is not None)):
        raise_together(channel, failure, 'placing samples')
    return batch


def _prepare(samples: Sequence[Any], plan: ExchangePlan, rank: int) -> Any:
    """Return a parcel and a letter for every rank, and the exception if that failed."""
    world = len(plan.targets)
    try:
        _check_count(samples, plan, rank)
        outgoing: List[List[Any]] = [[] for _ in range(world)]
        for move in plan.moves:
            if move.source_rank == rank:
                outgoing[move.destination_rank].append(samples[move.source_index])
        parcels = [pack_samples(each) if each else Parcel(b'', []) for each in outgoing]
        kinds = _kinds(samples)
        # a rank whose dataset mixes several kinds is not compared
        keys = zlib.crc32(kinds[0].encode()) if len(kinds) == 1 else 0
        letters = [_Letter(0, keys, len(parcel.header), parcel.payload_bytes)
                   for parcel in parcels]
        return parcels, letters, None
    except Exception as error:  # sent to all ranks and raised there
        return [], [_Letter(_FAILED, 0, 0, 0)] * world, error


def _assemble(samples: Sequence[Any], plan: ExchangePlan, rank: int, letters: Sequence[_Letter],
              buffer: torch.Tensor, place: Optional[Callable[[Any], Any]]) -> Any:
    """Return this rank's batch, and the exception if that failed."""
    try:
        kept = plan.kept(rank)
        batch = list(samples[:kept]) + [None] * (plan.targets[rank] - kept)
        arrivals: List[List[Move]] = [[] for _ in letters]
        for move in plan.moves:
            if move.destination_rank == rank:
                arrivals[move.source_rank].append(move)
        offset = 0
        for letter, moves in zip(letters, arrivals):
            if moves:
                for move, sample in zip(moves, unpack_samples(buffer, offset, letter.header_bytes)):
                    batch[move.destination_index] = sample
            offset += letter.header_bytes + letter.payload_bytes
        batch = _distinct(batch)
        if place is not None:
            batch[kept:] = [place(sample) for sample in batch[kept:]]
        return batch, None
    except Exception as error:  # sent to all ranks and raised there
        return [], error


def _trade_flags(channel: Channel, mine: bool) -> List[bool]:
    # All-to-all has one stage, while gloo's gather is a ring: half the time at 8 ranks.
    flags = torch.full((len(channel.ranks),), int(mine), dtype=torch.int64)
    theirs = torch.empty_like(flags)
    even = [1] * len(flags)
    channel.all_to_all(theirs, flags, even, even)
    return [bool(flag) for flag in theirs.tolist()]


def _trade_letters(channel: Channel, letters: Sequence[_Letter]) -> List[_Letter]:
    mine = torch.tensor(letters, dtype=torch.int64).reshape(-1)
    theirs = torch.empty_like(mine)
    even = [len(_Letter._fields)] * len(letters)
    channel.all_to_all(theirs, mine, even, even)
    return [_Letter(*row) for row in theirs.view(len(letters), -1).tolist()]


def _trade_parcels(channel: Channel, parcels: Sequence[Parcel],
                   letters: Sequence[_Letter]) -> torch.Tensor:
    """Send each rank its parcel; return what they sent, one after the other."""
    sizes = [len(parcel.header) + parcel.payload_bytes for parcel in parcels]
    sent, offset = torch.empty(sum(sizes), dtype=torch.uint8), 0
    for parcel in parcels:
        offset = write_parcel(parcel, sent, offset)
    expected = [letter.header_bytes + letter.payload_bytes for letter in letters]
    received = torch.empty(sum(expected), dtype=torch.uint8)
    channel.all_to_all(received, sent, expected, sizes)
    return received


def _check_keys(channel: Channel, keys: Sequence[int], samples: Sequence[Any]) -> None:
    if len({each for each in keys if each}) < 2:
        return
    texts = channel.gather_texts(' or '.join(_kinds(samples)) or 'none')
    raise SampleMismatchError(
        'ranks hold samples of different keys: '
        + '; '.join(f'rank {rank}: {text}' for rank, text in zip(channel.ranks, texts))
        + '. They cannot meet in one batch: give every rank the same data pipeline.')


def _kinds(samples: Iterable[Any]) -> List[str]:
    bare = (each.sample if isinstance(each, Candidate) else each for each in samples)
    kinds = {f'({", ".join(sorted(map(str, each)))})' if isinstance(each, Mapping) else
             type(each).__name__ for each in bare}
    return sorted(kinds)


def _check_count(samples: Sequence[Any], plan: ExchangePlan, rank: int) -> None:
    if len(samples) != plan.valid_counts[rank]:
        raise ValueError(f'rank {rank} of the plan has {plan.valid_counts[rank]} samples, got '
                         f'{len(samples)}: plan and samples belong to different steps.')


def _distinct(samples: Sequence[Any]) -> List[Any]:
    """Return samples of which no two are the same object: batching may change them in place."""
    seen, batch = set(), []
    for sample in samples:
        batch.append(copy.deepcopy(sample) if id(sample) in seen else sample)
        seen.add(id(sample))
    return batch
