"""Copies of checkpoints for machines that share no disk: where they go, and which one is resumed.

The checkpoints themselves stay what they are, files on the disk of rank 0's machine. With
``CheckpointHook(neighbor_copy=True)`` the newest one is also in the memory of another machine, and
a start looks on the disks and in the memory of all machines.
"""
from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from mapsage.distributed import all_ranks_or_none, error_text, open_channel
from mapsage.distributed.nodes.heartbeat import node_place
from mapsage.engine.checkpoints.resume import (
    UNREADABLE,
    Choice,
    ResumeError,
    choose_checkpoint,
    folders_of,
    read_choice,
)

from .link import CopyReceiver, CopySender
from .relay import pass_along
from .store import Arrival, CopyStore, checksum_of, megabytes

_PURPOSE = 'neighbor copy'  # of the channel


def asks_for_copies(cfg: Mapping[str, Any]) -> bool:
    """Return whether a CheckpointHook of a config has ``neighbor_copy=True``."""
    hooks = [*(cfg.get('default_hooks') or {}).values(), *(cfg.get('custom_hooks') or [])]
    return any(isinstance(hook, Mapping) and hook.get('neighbor_copy') is True for hook in hooks)


def copies_for_run(cfg: Mapping[str, Any], work_dir: str,
                   apart: bool) -> Optional[NeighborCopies]:
    """Return the copies of a run; None if it asks for none, or its machines share the work dir.

    Collective.

    Args:
        cfg: Config of the run.
        work_dir: Its folder on this machine.
        apart: Whether a machine does not see the work dir of rank 0; equal on all ranks. On one
            machine that stays alone it is not known, and a copy may still be there.
    """
    place = node_place()
    alone = place is None or place.nodes == 1
    if not (asks_for_copies(cfg) and (apart or alone)):
        return None
    return NeighborCopies(work_dir, folders_of(cfg, work_dir))


@dataclass(frozen=True)
class Offer:
    """The newest checkpoint that a machine has.

    Attributes:
        path: Where it lies on that machine; empty if there is none.
        place: ``'on the disk'`` or ``'in the memory'``.
        name: Name that it was saved under.
        iteration: Finished iterations.
        size: Bytes of the file.
        checksum: CRC-32 of the file.
        seed, virtual_ranks: Of the run that wrote it, if it says.
        skipped: A line for each newer checkpoint that could not be read.
    """

    path: str = ''
    place: str = ''
    name: str = ''
    iteration: int = -1
    size: int = 0
    checksum: int = 0
    seed: Optional[int] = None
    virtual_ranks: Optional[int] = None
    skipped: List[str] = field(default_factory=list)


def newest(offers: Mapping[int, Offer]) -> Optional[int]:
    """Return the rank whose offer all take, the lowest of those that are equal; or None. Pure.

    Args:
        offers: Offers by rank.
    """
    held = [rank for rank in sorted(offers) if offers[rank].path]
    return max(held, key=lambda rank: (offers[rank].iteration, -rank)) if held else None


def neighbor_of(node: Any, nodes: Sequence[Any]) -> Any:
    """Return the node behind ``node``, the first one behind the last; None if it is alone. Pure."""
    place = list(nodes).index(node)
    return None if len(nodes) == 1 else nodes[(place + 1) % len(nodes)]


class NeighborCopies:
    """The copies of a run, as one of its ranks sees them. Collective.

    On each machine the first rank acts for the others.

    Args:
        work_dir: The run's folder on this machine.
        folders: Other folders in which its checkpoints may be.
        memory: As for :class:`CopyStore`.
    """

    def __init__(self, work_dir: str, folders: Sequence[str] = (), **memory: Path) -> None:
        self._work_dir, self._folders = work_dir, folders
        self._store = CopyStore(work_dir, **memory)
        self._sender: Optional[CopySender] = None
        place = node_place()
        self._channel = open_channel(purpose=_PURPOSE)
        mine = dict(host=socket.gethostname(), node=0 if place is None else place.node)
        self._hosts: Dict[int, str] = {}  # by rank
        self._leaders: Dict[int, int] = {}  # lowest rank of each node
        for rank, each in self._tell(mine).items():
            self._hosts[rank] = each['host']
            leader = self._leaders.setdefault(each['node'], rank)
            if rank == self._channel.rank:
                self._leader = leader

    def choose(self) -> Optional[Choice]:
        """Return the newest checkpoint of all machines, under its path here. Collective.

        Machines that do not have it receive it first.

        Returns:
            The choice, or None if no machine has a checkpoint.

        Raises:
            ResumeError: On all ranks, if there are checkpoints and none can be read.
            RankError, NoRoomError: If a machine that lacks it cannot take it.
            RankLostError: Naming the ranks that did not come.
        """
        mine = Offer()
        with all_ranks_or_none('looking for checkpoints'):
            if self._leads():
                mine = self._best()
        offers = {rank: Offer(**each) for rank, each in self._tell(asdict(mine)).items()}
        holder = newest(offers)
        if holder is None:
            first = self._channel.ranks[0]  # it looks once more, and has an error of its own
            damaged = [f'{self._hosts[rank]}: {line}' for rank, each in sorted(offers.items())
                       for line in each.skipped if rank != first]
            if damaged:
                raise ResumeError(f'no machine has a checkpoint that can be read. '
                                  f'{" ".join(damaged)} Remove the files to begin anew, or bring '
                                  f'back a whole one.')
            return None
        chosen = offers[holder]
        lacking = [rank for rank in self._leaders.values()
                   if (offers[rank].size, offers[rank].checksum) != (chosen.size, chosen.checksum)]
        path = mine.path
        if lacking:
            path = self._receive([holder, *lacking], chosen) or path
        paths = self._tell(path)
        notes = [] if holder == self._channel.ranks[0] and chosen.place == 'on the disk' else [
            f'the newest checkpoint of all machines is {chosen.name} of iteration '
            f'{chosen.iteration} {chosen.place} of {self._hosts[holder]}']
        if lacking:
            notes.append(f'{chosen.name} ({megabytes(chosen.size)}) was sent to '
                         f'{", ".join(self._hosts[rank] for rank in lacking)}')
        return Choice(paths[self._leader], chosen.seed, chosen.virtual_ranks,
                      [f'{self._hosts[rank]}: {line}' for rank in sorted(offers)
                       for line in offers[rank].skipped], notes, chosen.iteration)

    @contextmanager
    def running(self, logger: Any, resumed: bool) -> Iterator[None]:
        """Copy what :meth:`send` names while the block runs. Collective at its beginning.

        When the block has ended without an error, the run is complete and the copies are removed.

        Args:
            logger: Logger of the run.
            resumed: Whether the run goes on. Else the copies are those of an earlier one.
        """
        receiver = self._connect(logger, resumed)
        try:
            yield
        finally:
            if receiver is not None:
                receiver.close()
            if self._sender is not None:
                self._sender.close()
        if self._leads():
            self._store.clear()

    def send(self, path: str) -> None:
        """Copy a checkpoint to the other machine soon. Only rank 0 does; never raises or waits."""
        if self._sender is not None:
            self._sender.send(path)

    def _leads(self) -> bool:
        return self._leader == self._channel.rank

    def _tell(self, value: Any) -> Dict[int, Any]:
        """Return what every rank says, by rank; as JSON can say it. Collective."""
        texts = self._channel.gather_texts(json.dumps(value))
        return {rank: json.loads(text) for rank, text in zip(self._channel.ranks, texts)}

    def _best(self) -> Offer:
        """Return the newest checkpoint of this machine's disk and memory."""
        found: List[Offer] = []
        skipped: List[str] = []
        try:
            choice = choose_checkpoint(self._work_dir, None, 'auto', self._folders)
            skipped += choice.skipped
            if choice.path is not None:
                found.append(_offer(choice, 'on the disk', os.path.basename(choice.path)))
        except ResumeError as error:
            skipped.append(str(error))
        for path in self._store.copies():
            try:
                place = 'in the memory' if self._store.is_in_memory(path) else 'on the disk'
                found.append(_offer(read_choice(str(path)), place, path.name.split('-', 2)[2]))
            except UNREADABLE as error:
                skipped.append(error_text(error))
        best = max(found, key=lambda offer: offer.iteration, default=Offer())
        if best.path:
            best = replace(best, size=os.path.getsize(best.path), checksum=checksum_of(best.path))
        return replace(best, skipped=skipped)

    def _receive(self, chain: List[int], chosen: Offer) -> str:
        """Pass the file along a chain of ranks; return its path on those that received it."""
        arrival: Optional[Arrival] = None
        source: Any = None
        try:
            with all_ranks_or_none('making room for the checkpoint'):
                if self._channel.rank == chain[0]:
                    source = open(chosen.path, 'rb')
                elif self._channel.rank in chain:
                    arrival = self._store.arrive(chosen.name, chosen.size)
            error = pass_along(self._channel, chain, chosen.size, source, arrival)
            with all_ranks_or_none('receiving the checkpoint'):
                if error is not None:
                    raise error
                return '' if arrival is None else str(arrival.keep(chosen.checksum))
        finally:
            if source is not None:
                source.close()
            if arrival is not None:
                arrival.drop()

    def _connect(self, logger: Any, resumed: bool) -> Optional[CopyReceiver]:
        """Start what sends and receives; a machine that cannot is a warning. Collective."""
        nodes, first = sorted(self._leaders), self._channel.ranks[0]
        writer = next(node for node in nodes if self._leaders[node] == first)
        neighbor = neighbor_of(writer, nodes)
        keeper = None if neighbor is None else self._leaders[neighbor]
        receiver: Optional[CopyReceiver] = None
        address: Any = None
        if self._leads():
            if resumed:
                self._store.remove_stale()
            else:
                self._store.clear()
            try:
                receiver = CopyReceiver(self._store)
                address = receiver.address
            except OSError as error:  # told by rank 0
                address = error_text(error)
        told = self._tell(address)
        if self._channel.rank != first:
            return receiver
        if keeper is None:
            logger.warning('neighbor copy: no other machine is there, so checkpoints are on the '
                           f'disk of {self._hosts[first]} alone.')
            return None
        address = told[keeper]
        if isinstance(address, str):
            logger.warning(f'neighbor copy: {self._hosts[keeper]} cannot take copies ({address}), '
                           f'so checkpoints are on the disk of {self._hosts[first]} alone.')
        else:
            # What the other machines received at the start is obsolete with the next checkpoint.
            others = [told[rank] for rank in self._leaders.values()
                      if rank != keeper and isinstance(told[rank], list)]
            self._sender = CopySender(self._hosts[keeper], address, logger, others)
        return receiver


def _offer(choice: Choice, place: str, name: str) -> Offer:
    assert choice.path is not None
    return Offer(choice.path, place, name, choice.iteration or 0, seed=choice.seed,
                 virtual_ranks=choice.virtual_ranks)
