"""Copies of checkpoints for machines that share no disk, and the choice among them at a start.

Checkpoints remain files on the disk of rank 0's machine. With
``CheckpointHook(neighbor_copy=True)`` another machine also keeps the newest one in its memory
(`store.py`). While a run trains, `link.py` sends the copies. When a run starts, every machine
offers the newest checkpoint on its disk or in its memory, the newest offer wins, and `relay.py`
sends it to the machines that lack it.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

from mmengine.config import Config
from mmengine.logging import MMLogger

from mapsage.base.files import megabytes
from mapsage.distributed import all_ranks_or_none, error_text, open_channel
from mapsage.engine.checkpoints.resume import (
    UNREADABLE,
    Choice,
    ResumeError,
    choose_checkpoint,
    folders_of,
    read_choice,
)
from mapsage.extras.elastic.heartbeat import node_place

from .link import Address, CopyReceiver, CopySender
from .relay import pass_along
from .store import Arrival, CopyStore, checksum_of

# Purpose of the channel.
_PURPOSE = 'neighbor copy'
_ON_DISK, _IN_MEMORY = 'on the disk', 'in the memory'
Node = TypeVar('Node')


def asks_for_copies(cfg: Config) -> bool:
    """Return whether a CheckpointHook of a config has ``neighbor_copy=True``."""
    hooks = [*(cfg.get('default_hooks') or {}).values(), *(cfg.get('custom_hooks') or [])]
    return any(isinstance(hook, Mapping) and hook.get('neighbor_copy') is True for hook in hooks)


def copies_for_run(cfg: Config, work_dir: str, separate_disks: bool) -> Optional[NeighborCopies]:
    """Return the copies of a run; None if it asks for none, or its machines share the work dir.

    Collective.

    Args:
        cfg: Config of the run.
        work_dir: Its folder on this machine.
        separate_disks: Whether some machine cannot read rank 0's work dir (the same value on all
            ranks). A job on a single machine cannot tell, so it ignores the value: a copy may still
            exist in memory from a job on several machines.
    """
    node = node_place()
    is_single_machine = node is None or node.nodes == 1
    if not (asks_for_copies(cfg) and (separate_disks or is_single_machine)):
        return None
    return NeighborCopies(work_dir, folders_of(cfg, work_dir))


@dataclass(frozen=True)
class Offer:
    """The newest checkpoint of a machine.

    Attributes:
        path: Path on that machine; empty if it has no checkpoint.
        location: ``'on the disk'`` or ``'in the memory'``.
        name: Name under which the checkpoint was saved.
        iteration: Finished iterations.
        size: Bytes of the file.
        checksum: CRC-32 of the file.
        seed: Seed of the run that wrote it; None if the checkpoint does not have it.
        virtual_ranks: Number of virtual ranks of that run; None likewise.
        skipped: A line for each newer checkpoint that could not be read.
        fast: Whether that run had the fast settings of a card.
    """

    path: str = ''
    location: str = ''
    name: str = ''
    iteration: int = -1
    size: int = 0
    checksum: int = 0
    seed: Optional[int] = None
    virtual_ranks: Optional[int] = None
    skipped: List[str] = field(default_factory=list)
    fast: bool = False


def newest(offers: Mapping[int, Offer]) -> Optional[int]:
    """Return the rank with the newest checkpoint, the lowest of equal ones; None without any. Pure.

    Args:
        offers: Offers by rank.
    """
    ranks = [rank for rank in sorted(offers) if offers[rank].path]
    return max(ranks, key=lambda rank: (offers[rank].iteration, -rank)) if ranks else None


def neighbor_of(node: Node, nodes: Sequence[Node]) -> Optional[Node]:
    """Return the node that follows ``node``, cyclically; None if there is no other node. Pure."""
    position = list(nodes).index(node)
    return None if len(nodes) == 1 else nodes[(position + 1) % len(nodes)]


class NeighborCopies:
    """The copies of a run, seen from one of its ranks. Creating it is collective.

    On each machine the lowest rank, the machine's leader, acts for all its ranks.

    Args:
        work_dir: Folder of the run on this machine.
        folders: Other folders that may contain checkpoints of the run.
        memory: Keyword ``memory`` of :class:`CopyStore`.
    """

    def __init__(self, work_dir: str, folders: Sequence[str] = (), **memory: Path) -> None:
        self._work_dir, self._folders = work_dir, folders
        self._store = CopyStore(work_dir, **memory)
        self._sender: Optional[CopySender] = None
        node = node_place()
        self._channel = open_channel(purpose=_PURPOSE)
        local_facts = dict(host=socket.gethostname(), node=0 if node is None else node.node)
        # Host names by rank.
        self._hosts: Dict[int, str] = {}
        # Lowest rank of each node.
        self._leaders: Dict[int, int] = {}
        for rank, facts in self._exchange(local_facts).items():
            self._hosts[rank] = facts['host']
            leader = self._leaders.setdefault(facts['node'], rank)
            if rank == self._channel.rank:
                self._leader = leader

    def choose(self) -> Optional[Choice]:
        """Return the newest checkpoint of all machines, with its path on this machine. Collective.

        Machines that do not have the checkpoint receive it first.

        Returns:
            The choice, or None if no machine has a checkpoint.

        Raises:
            ResumeError: On all ranks, if there are checkpoints and none can be read.
            RankError, NoRoomError: If a machine that lacks the checkpoint cannot store it.
            RankLostError: If ranks did not come, with their numbers.
        """
        local_offer = Offer()
        with all_ranks_or_none('looking for checkpoints'):
            if self._leads():
                local_offer = self._best_offer()
        offers = {
            rank: Offer(**fields) for rank, fields in self._exchange(asdict(local_offer)).items()
        }
        holder = newest(offers)
        if holder is None:
            self._refuse_damaged(offers)
            return None
        chosen = offers[holder]
        lacking = [
            rank
            for rank in self._leaders.values()
            if (offers[rank].size, offers[rank].checksum) != (chosen.size, chosen.checksum)
        ]
        path = local_offer.path
        if lacking:
            path = self._receive([holder, *lacking], chosen) or path
        paths = self._exchange(path)
        notes = []
        if holder != self._channel.ranks[0] or chosen.location != _ON_DISK:
            notes.append(
                f'the newest checkpoint of all machines is {chosen.name} of iteration '
                f'{chosen.iteration} {chosen.location} of {self._hosts[holder]}'
            )
        if lacking:
            notes.append(
                f'{chosen.name} ({megabytes(chosen.size)}) was sent to '
                f'{", ".join(self._hosts[rank] for rank in lacking)}'
            )
        skipped = [
            f'{self._hosts[rank]}: {line}'
            for rank in sorted(offers)
            for line in offers[rank].skipped
        ]
        return Choice(
            paths[self._leader],
            chosen.seed,
            chosen.virtual_ranks,
            skipped,
            notes,
            chosen.iteration,
            chosen.fast,
        )

    def _refuse_damaged(self, offers: Mapping[int, Offer]) -> None:
        """Raise an error if machines other than rank 0's have checkpoints that cannot be read."""
        # Rank 0 searches its disk again after this, and then raises its error itself.
        first = self._channel.ranks[0]
        damaged = [
            f'{self._hosts[rank]}: {line}'
            for rank, offer in sorted(offers.items())
            for line in offer.skipped
            if rank != first
        ]
        if damaged:
            raise ResumeError(
                f'no machine has a checkpoint that can be read. '
                f'{" ".join(damaged)} Remove the files to start over, or bring '
                f'back a whole one.'
            )

    @contextmanager
    def running(self, logger: MMLogger, resumed: bool) -> Iterator[None]:
        """Copy the checkpoints of :meth:`send` while the block runs. Collective at its beginning.

        If the block ends without an error, the run is complete and the copies are removed.

        Args:
            logger: Logger of the run.
            resumed: Whether the run continues an earlier one. Otherwise existing copies belong to
                another run and are removed.
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
        """Copy a checkpoint to the other machine soon, on rank 0. Never raises or waits."""
        if self._sender is not None:
            self._sender.send(path)

    def _leads(self) -> bool:
        return self._leader == self._channel.rank

    def _exchange(self, value: object) -> Dict[int, Any]:
        """Return the values of all ranks, by rank, after a round trip through JSON. Collective."""
        texts = self._channel.gather_texts(json.dumps(value))
        return {rank: json.loads(text) for rank, text in zip(self._channel.ranks, texts)}

    def _best_offer(self) -> Offer:
        """Return the newest checkpoint on this machine's disk or in its memory."""
        offers: List[Offer] = []
        skipped: List[str] = []
        try:
            choice = choose_checkpoint(self._work_dir, None, 'auto', self._folders)
            skipped += choice.skipped
            if choice.path is not None:
                offers.append(_make_offer(choice, _ON_DISK, os.path.basename(choice.path)))
        except ResumeError as error:
            skipped.append(str(error))
        for path in self._store.copies():
            try:
                location = _IN_MEMORY if self._store.is_in_memory(path) else _ON_DISK
                # The name of a copy is <size>-<CRC-32>-<name of the checkpoint>.
                offers.append(
                    _make_offer(read_choice(str(path)), location, path.name.split('-', 2)[2])
                )
            except UNREADABLE as error:
                skipped.append(error_text(error))
        best = max(offers, key=lambda offer: offer.iteration, default=Offer())
        if best.path:
            best = replace(best, size=os.path.getsize(best.path), checksum=checksum_of(best.path))
        return replace(best, skipped=skipped)

    def _receive(self, chain: List[int], chosen: Offer) -> str:
        """Pass the file along a chain of ranks; return its path on the ranks that received it."""
        arrival: Optional[Arrival] = None
        source: Optional[BinaryIO] = None
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

    def _connect(self, logger: MMLogger, resumed: bool) -> Optional[CopyReceiver]:
        """Start this machine's receiver, and on rank 0 the sender. Collective.

        A machine that cannot receive copies causes a warning, not an error.
        """
        nodes, first = sorted(self._leaders), self._channel.ranks[0]
        writer = next(node for node in nodes if self._leaders[node] == first)
        neighbor = neighbor_of(writer, nodes)
        keeper = None if neighbor is None else self._leaders[neighbor]
        receiver, answer = self._start_receiver(resumed) if self._leads() else (None, None)
        # By rank: the address of the machine's receiver, the text of an error, or None.
        answers = self._exchange(answer)
        if self._channel.rank != first:
            return receiver
        if keeper is None:
            logger.warning(
                'neighbor copy: there is no other machine, so checkpoints are only on '
                f'the disk of {self._hosts[first]}.'
            )
            return None
        address = answers[keeper]
        if isinstance(address, str):
            logger.warning(
                f'neighbor copy: {self._hosts[keeper]} cannot take copies ({address}), '
                f'so checkpoints are only on the disk of {self._hosts[first]}.'
            )
        else:
            # The next checkpoint makes what the other machines received at the start obsolete.
            outdated: List[Address] = [
                answers[rank]
                for rank in self._leaders.values()
                if rank != keeper and isinstance(answers[rank], list)
            ]
            self._sender = CopySender(self._hosts[keeper], address, logger, outdated)
        return receiver

    def _start_receiver(self, resumed: bool) -> Tuple[Optional[CopyReceiver], Union[Address, str]]:
        """Return this machine's receiver, or None, and its address or the text of its error."""
        if resumed:
            self._store.remove_stale()
        else:
            self._store.clear()
        try:
            receiver = CopyReceiver(self._store)
        except OSError as error:
            # Rank 0 logs the error.
            return None, error_text(error)
        return receiver, receiver.address


def _make_offer(choice: Choice, location: str, name: str) -> Offer:
    assert choice.path is not None
    return Offer(
        choice.path,
        location,
        name,
        choice.iteration or 0,
        seed=choice.seed,
        virtual_ranks=choice.virtual_ranks,
        fast=choice.fast,
    )
