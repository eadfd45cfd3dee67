"""Carry out an exchange plan: send samples to other ranks, and put the arrivals into batches.

Only samples that move are sent. `plan.py` decides which ones, `packing.py` turns them into bytes.
Their weights are few numbers, so every process gets all of them.
"""

from __future__ import annotations

import copy
import os
import zlib
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch

from mapsage.base.errors import UserError
from mapsage.distributed import Channel, raise_together
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage_launcher.trust.job_secret import job_secret

from .default_channel import default_channel
from .packing import Parcel, pack_samples, unpack_samples, write_parcel
from .plan import ExchangePlan, Move
from .pool import Candidate, DatedSample

_FAILED = 1


class SampleMismatchError(UserError, ValueError):
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
    """Four numbers that each rank gets ahead of the samples, also where no sample follows."""

    status: int
    keys: int
    header_bytes: int
    payload_bytes: int


def exchange(
    samples: Sequence[Any],
    plan: ExchangePlan,
    channel: Optional[Channel] = None,
    place: Optional[Callable[[Any], Any]] = None,
    traffic: Optional[Traffic] = None,
) -> List[Any]:
    """Return this rank's batch of a plan. Collective, unless nothing moves.

    Only samples that move are sent. Each destination gets one byte buffer: a header with the
    structure and metadata of the samples and the dtypes and shapes of their tensors, then the bytes
    of all tensors.

    Args:
        samples: This rank's samples, ``plan.valid_counts[rank]`` of them: mappings or objects of
            any class that pickles, with tensors of any device, dtype and shape.
        plan: Plan of the exchange, equal on every rank.
        channel: Channel to the plan's ranks, in order. None opens a new channel to all
            ranks, which is collective: pass the same one again where there are several exchanges.
        place: Function that takes a sample that has arrived in host memory and returns it on the
            device where this rank needs it. Samples stay in host memory when None.
        traffic: Counters to which this exchange adds its bytes.

    Returns:
        ``plan.targets[rank]`` samples, all different objects: a sample that the plan gives to this
        rank twice is copied.

    Raises:
        SampleMismatchError: On every rank, if ranks hold samples with different keys.
        RankError: If another rank failed; that rank raises its own exception.
        RankLostError: Naming the ranks that did not come.
    """
    world = len(plan.targets)
    [batch] = exchange_blocks(
        [samples], plan, VirtualRanks(world, world), channel or default_channel(), place, traffic
    )
    return batch


def exchange_blocks(
    samples: Sequence[Sequence[Any]],
    plan: ExchangePlan,
    ranks: VirtualRanks,
    channel: Channel,
    place: Optional[Callable[[Any], Any]] = None,
    traffic: Optional[Traffic] = None,
) -> List[List[Any]]:
    """Return the batches of this process's virtual ranks.

    Collective, unless no sample moves to another process. Samples that move between two virtual
    ranks of one process are not sent. Other arguments and errors are as in :func:`exchange`.

    Args:
        samples: Samples of each virtual rank of this process, ``plan.valid_counts[rank]`` of each.
        plan: Plan of the exchange between virtual ranks, equal on every process.
        ranks: Virtual ranks, and the process of the group that runs each.
    """
    routes = _Routes(plan, ranks, channel.ranks.index(channel.rank))
    if not routes.crossed:
        return _assemble(samples, routes, [], torch.empty(0), None)
    parcels, letters, failure = _prepare(samples, routes)
    received = _trade_letters(channel, letters)
    if any(letter.status for letter in received):
        raise_together(channel, failure, 'packing samples')
    _check_keys(channel, [letter.keys for letter in received], samples)
    buffer = _trade_parcels(channel, parcels, received)
    if traffic is not None:
        traffic.sent_bytes += sum(letter.payload_bytes for letter in letters)
        traffic.received_bytes += sum(letter.payload_bytes for letter in received)
        traffic.header_bytes += sum(letter.header_bytes for letter in letters)
    batches: List[List[Any]] = []
    failure = None
    try:
        batches = _assemble(samples, routes, received, buffer, place)
    except Exception as error:
        # All ranks learn of it and raise.
        failure = error
    # Arrivals may not fit into this rank's device memory. Then no rank may start the step.
    if any(_trade_flags(channel, failure is not None)):
        raise_together(channel, failure, 'placing samples')
    return batches


def exchange_weights(
    channel: Channel,
    plan: ExchangePlan,
    local_weights: Sequence[Sequence[float]],
    ranks: VirtualRanks,
) -> List[List[float]]:
    """Return the weight of each sample in the batches of this process's virtual ranks. Collective.

    Args:
        channel: Channel to the processes, in order.
        plan: Plan of the exchange between virtual ranks, equal on every process.
        local_weights: Weights of the samples of every virtual rank of this process,
            ``plan.valid_counts[rank]`` of them.
        ranks: Virtual ranks, and the process that runs each.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    block = ranks.block(channel.ranks.index(channel.rank))
    table = gather_rows(channel, ranks, local_weights, max(plan.valid_counts), 0.0)
    weights = [
        table[rank][: plan.kept(rank)] + [0.0] * (plan.targets[rank] - plan.kept(rank))
        for rank in block
    ]
    for move in plan.moves:
        if move.destination_rank in block:
            weights[move.destination_rank - block.start][move.destination_index] = table[
                move.source_rank
            ][move.source_index]
    return weights


def gather_rows(
    channel: Channel,
    ranks: VirtualRanks,
    local_rows: Sequence[Sequence[float]],
    length: int,
    padding: float,
) -> List[List[float]]:
    """Return the numbers of every virtual rank, in order, padded to a length. Collective.

    Args:
        channel: Channel to the processes, in order.
        ranks: Virtual ranks, and the process that runs each.
        local_rows: Numbers of every virtual rank of this process, at most ``length``.
        length: Length of the longest row of all ranks.
        padding: Number that fills shorter rows.
    """
    rows = torch.full((len(ranks.block(0)), length), padding, dtype=torch.float64)
    for row, numbers in zip(rows, local_rows):
        row[: len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
    return [
        row
        for table, block in zip(channel.gather(rows), ranks.blocks)
        for row in table[: len(block)].tolist()
    ]


class _Routes:
    """The moves of a plan, as one process sees them.

    Attributes:
        plan: The plan.
        block: Virtual ranks of this process.
        processes: Number of processes.
        crossed: Whether any sample moves from one process to another.
    """

    def __init__(self, plan: ExchangePlan, ranks: VirtualRanks, process: int) -> None:
        self.plan, self.block, self.processes = plan, ranks.block(process), ranks.processes
        process_of = [number for number, block in enumerate(ranks.blocks) for _ in block]
        self.crossed = False
        self._local: List[Move] = []
        self._to: Dict[int, List[Move]] = {}
        self._from: Dict[int, List[Move]] = {}
        for move in plan.moves:
            source, destination = process_of[move.source_rank], process_of[move.destination_rank]
            self.crossed = self.crossed or source != destination
            if source == destination == process:
                self._local.append(move)
            elif source == process:
                self._to.setdefault(destination, []).append(move)
            elif destination == process:
                self._from.setdefault(source, []).append(move)

    @property
    def local(self) -> List[Move]:
        """Moves between two virtual ranks of this process, in the order of the plan."""
        return self._local

    def sent_to(self, process: int) -> List[Move]:
        """Return the moves from this process to another one, in the order of the plan."""
        return self._to.get(process, [])

    def got_from(self, process: int) -> List[Move]:
        """Return the moves from another process to this one, in the order of the plan."""
        return self._from.get(process, [])

    def source_of(self, samples: Sequence[Sequence[Any]], move: Move) -> Any:
        """Return the sample of this process that a move sends."""
        return samples[move.source_rank - self.block.start][move.source_index]

    def check(self, samples: Sequence[Sequence[Any]]) -> None:
        """Raise ValueError unless each virtual rank has as many samples as the plan says."""
        for rank, rank_samples in zip(self.block, samples):
            if len(rank_samples) != self.plan.valid_counts[rank]:
                raise ValueError(
                    f'rank {rank} of the plan has {self.plan.valid_counts[rank]} samples, got '
                    f'{len(rank_samples)}: plan and samples belong to different steps.'
                )


def _prepare(
    samples: Sequence[Sequence[Any]], routes: _Routes
) -> Tuple[List[Parcel], List[_Letter], Optional[Exception]]:
    """Return a parcel and a letter for every process, and the exception if that failed."""
    world = routes.processes
    try:
        routes.check(samples)
        outgoing = [
            [routes.source_of(samples, move) for move in routes.sent_to(process)]
            for process in range(world)
        ]
        secret = job_secret(os.environ)
        parcels = [pack_samples(sent, secret) if sent else Parcel(b'', []) for sent in outgoing]
        kinds = _kinds(samples)
        # A rank whose dataset mixes several kinds is not compared.
        keys = zlib.crc32(kinds[0].encode()) if len(kinds) == 1 else 0
        letters = [_Letter(0, keys, len(parcel.header), parcel.payload_bytes) for parcel in parcels]
        return parcels, letters, None
    except Exception as error:
        # All ranks learn of it and raise.
        return [], [_Letter(_FAILED, 0, 0, 0)] * world, error


def _assemble(
    samples: Sequence[Sequence[Any]],
    routes: _Routes,
    letters: Sequence[_Letter],
    buffer: torch.Tensor,
    place: Optional[Callable[[Any], Any]],
) -> List[List[Any]]:
    """Return the batches of this process's virtual ranks."""
    routes.check(samples)
    plan, first = routes.plan, routes.block.start
    batches = []
    for rank, rank_samples in zip(routes.block, samples):
        stays = plan.kept(rank)
        batches.append(list(rank_samples[:stays]) + [None] * (plan.targets[rank] - stays))
    for move in routes.local:
        batches[move.destination_rank - first][move.destination_index] = routes.source_of(
            samples, move
        )
    offset = 0
    for process, letter in enumerate(letters):
        moves = routes.got_from(process)
        if moves:
            arrivals = unpack_samples(buffer, offset, letter.header_bytes, job_secret(os.environ))
            for move, sample in zip(moves, arrivals):
                batches[move.destination_rank - first][move.destination_index] = (
                    sample if place is None else place(sample)
                )
        offset += letter.header_bytes + letter.payload_bytes
    make_distinct(batches)
    return batches


def _trade_flags(channel: Channel, local_flag: bool) -> List[bool]:
    return [bool(flag) for flag in channel.gather(torch.tensor(local_flag))]


def _trade_letters(channel: Channel, letters: Sequence[_Letter]) -> List[_Letter]:
    return [_Letter(*row) for row in channel.trade(torch.tensor(letters)).tolist()]


def _trade_parcels(
    channel: Channel, parcels: Sequence[Parcel], letters: Sequence[_Letter]
) -> torch.Tensor:
    """Send each rank its parcel; return the parcels of all ranks in one buffer, in rank order."""
    sizes = [len(parcel.header) + parcel.payload_bytes for parcel in parcels]
    sent, offset = torch.empty(sum(sizes), dtype=torch.uint8), 0
    for parcel in parcels:
        offset = write_parcel(parcel, sent, offset)
    expected = [letter.header_bytes + letter.payload_bytes for letter in letters]
    received = torch.empty(sum(expected), dtype=torch.uint8)
    channel.all_to_all(received, sent, expected, sizes)
    return received


def _check_keys(channel: Channel, keys: Sequence[int], samples: Sequence[Sequence[Any]]) -> None:
    if len(set(keys) - {0}) < 2:
        return
    texts = channel.gather_texts(' or '.join(_kinds(samples)) or 'none')
    raise SampleMismatchError(
        'ranks hold samples of different keys: '
        + '; '.join(f'rank {rank}: {text}' for rank, text in zip(channel.ranks, texts))
        + '. They cannot meet in one batch: give every rank the same data pipeline.'
    )


def _kinds(samples: Iterable[Iterable[Any]]) -> List[str]:
    undated = (
        sample.sample if isinstance(sample, DatedSample) else sample
        for rank_samples in samples
        for sample in rank_samples
    )
    bare = (sample.sample if isinstance(sample, Candidate) else sample for sample in undated)
    return sorted(
        {
            f'({", ".join(sorted(map(str, sample)))})'
            if isinstance(sample, Mapping)
            else type(sample).__name__
            for sample in bare
        }
    )


def make_distinct(batches: List[List[Any]]) -> None:
    """Copy samples that occur twice, since batching may change a sample in place."""
    seen = set()
    for batch in batches:
        for index, sample in enumerate(batch):
            if id(sample) in seen:
                batch[index] = copy.deepcopy(sample)
            seen.add(id(sample))
