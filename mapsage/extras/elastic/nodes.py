"""The nodes of a job, once their ranks have met: they compare themselves and watch each other.

A job on a single node does none of this, unless it is elastic and may grow. A node is a machine
with one launcher; its rank with local rank 0 speaks for the node. What is compared is in
`node_settings.py`, the heartbeat in `heartbeat.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from mmengine.config import Config
from torch.utils.data import Dataset

from mapsage.base.errors import UserError
from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.launcher_notes import note_met
from mapsage.extras.elastic.heartbeat import (
    NodePlace,
    WatchSockets,
    has_heartbeat,
    node_place,
    start_heartbeat,
)
from mapsage_launcher.nodes.elastic import ELASTIC_VARIABLE

from .neighbor.copies import asks_for_copies
from .node_settings import MAX_NAMED, describe_data, describe_settings, different_settings

# Longest wait for a new file to appear on another machine, in seconds. Network disks are late.
_FOLDER_SECONDS = 5.0


class NodesDifferError(UserError, ValueError):
    """The nodes of a job do not run the same code or config, or see different data."""

    on_every_rank = True


@dataclass(frozen=True)
class RankFacts:
    """What a rank sends to all others when they meet, as JSON.

    Attributes:
        node: Number of its node.
        host: Name of its machine.
        settings: Settings of :func:`describe_settings`; None except for local rank 0.
        watch: Addresses of the sockets of the node's watch, from the rank that opened them.
    """

    node: int
    host: str
    settings: Optional[Dict[str, Any]] = None
    watch: Optional[Dict[str, Any]] = None

    @property
    def machine(self) -> str:
        """Name of the machine for messages."""
        return f'{self.host} (node {self.node})'


def meet_nodes(cfg: Config, work_dir: str, heartbeat_timeout: float) -> str:
    """Compare code and config of all nodes, and start the heartbeat between them. Collective.

    Args:
        cfg: Config of the run.
        work_dir: Folder of the run, which exists.
        heartbeat_timeout: Seconds without a sign after which a node is lost; 0 for no heartbeat.

    Returns:
        A warning for the log if a node does not see the work dir of rank 0; otherwise empty.

    Raises:
        NodesDifferError: On every rank, naming the machines and what differs.
        RankLostError: Naming the ranks that did not come.
    """
    node = node_place()
    channel = open_channel()
    # A process outside of the launcher may run inside an allocation of several nodes, as one rank.
    single = node is None or node.nodes == 1 or len(channel.ranks) == 1
    if node is None or (single and ELASTIC_VARIABLE not in os.environ):
        return ''
    # A process may build several Runners; the first one has started the heartbeat.
    watches = heartbeat_timeout > 0 and sys.platform == 'linux' and not has_heartbeat()
    sockets = WatchSockets() if watches and local_rank() == 0 else None
    facts = RankFacts(
        node.node,
        socket.gethostname(),
        describe_settings(cfg) if local_rank() == 0 else None,
        sockets.facts if sockets else None,
    )
    texts = channel.gather_texts(json.dumps(asdict(facts)))
    by_rank = {rank: RankFacts(**json.loads(text)) for rank, text in zip(channel.ranks, texts)}
    difference = different_settings(
        {facts.machine: facts.settings for facts in by_rank.values() if facts.settings}
    )
    if difference:
        raise NodesDifferError(difference)
    if watches:
        _watch_each_other(node, by_rank, channel.rank, sockets, heartbeat_timeout)
    note_met()
    return _warn_of_unseen_folder(work_dir, by_rank, asks_for_copies(cfg))


def _warn_of_unseen_folder(
    work_dir: str, by_rank: Mapping[int, RankFacts], copies_checkpoints: bool
) -> str:
    """Return a warning about nodes that do not see the work dir of rank 0. Collective.

    Rank 0 makes a file with a random name, and all ranks look for it.
    """
    channel = open_channel()
    token, first = '', channel.rank == channel.ranks[0]
    if first:
        token = f'.seen-{os.urandom(8).hex()}'
        # If the folder takes no file, no rank sees it, and the warning names all machines.
        with contextlib.suppress(OSError):
            Path(work_dir, token).touch()
    token = channel.gather_texts(token)[0]
    deadline = time.monotonic() + _FOLDER_SECONDS
    # A network file system may remember that a file was absent, but it does not remember listings.
    while not _lists(work_dir, token) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers = channel.gather_texts('' if _lists(work_dir, token) else 'no')
    if first:
        with contextlib.suppress(OSError):
            Path(work_dir, token).unlink()
    blind = sorted(
        {by_rank[rank].machine for rank, answer in zip(channel.ranks, answers) if answer}
    )
    if not blind:
        return ''
    return (
        f'the work dir {work_dir} of {by_rank[channel.ranks[0]].machine}, where checkpoints '
        f'are written, is not the folder of that name on {", ".join(blind[:MAX_NAMED])}'
        f'{"" if len(blind) <= MAX_NAMED else f" and {len(blind) - MAX_NAMED} more"}: '
        + (
            'the newest checkpoint is therefore also stored in the memory of another machine '
            '(neighbor_copy=True).'
            if copies_checkpoints
            else 'if that machine is lost, or another one becomes the first, its checkpoints are '
            'not found and the training starts over. Use a work dir on a disk that all '
            'machines share, or CheckpointHook(neighbor_copy=True).'
        )
    )


def _lists(folder: str, name: str) -> bool:
    """Return whether a folder lists a file; False if a network disk does not answer."""
    try:
        return name in os.listdir(folder)
    except OSError:
        return False


def compare_data(dataset: Optional[Dataset]) -> None:
    """Compare the training data of all nodes. Collective if there are several.

    Args:
        dataset: Dataset of the training.

    Raises:
        NodesDifferError: On every rank, naming the machines and what differs.
        RankLostError: Naming the ranks that did not come.
    """
    node = node_place()
    if node is None or node.nodes == 1:
        return
    facts = RankFacts(
        node.node, socket.gethostname(), describe_data(dataset) if local_rank() == 0 else None
    )
    texts = open_channel().gather_texts(json.dumps(asdict(facts)))
    gathered = [RankFacts(**json.loads(text)) for text in texts]
    difference = different_settings(
        {facts.machine: dict(facts.settings, config={}) for facts in gathered if facts.settings}
    )
    if difference:
        raise NodesDifferError(difference)


def _watch_each_other(
    this_node: NodePlace,
    by_rank: Mapping[int, RankFacts],
    rank: int,
    sockets: Optional[WatchSockets],
    timeout: float,
) -> None:
    """Start the heartbeat between the nodes, if every node has one name and one watch.

    Args:
        this_node: Node of this process.
        by_rank: Facts of all ranks.
        rank: Rank of this process.
        sockets: Sockets that this process opened for the watch of its node, if it did.
        timeout: Seconds without a sign after which a node is lost.
    """
    hosts = {facts.node: facts.host for facts in by_rank.values()}
    ranks: Dict[int, List[int]] = {}
    for other_rank, facts in by_rank.items():
        ranks.setdefault(facts.node, []).append(other_rank)
    watches = {facts.node: facts.watch for facts in by_rank.values() if facts.watch}
    # A node lacks a watch, for example, if its local rank 0 only encodes.
    if set(watches) != set(hosts):
        warnings.warn(
            'no heartbeat between the nodes: on some, no rank of the training has local rank 0.',
            stacklevel=2,
        )
        return
    if any(facts.host != hosts[facts.node] for facts in by_rank.values()):
        warnings.warn(
            'no heartbeat between the nodes: the launcher gives several hosts the same '
            'node number.',
            stacklevel=2,
        )
        return
    if sockets is not None:
        sockets.start(this_node.node, hosts, ranks, watches[min(hosts)]['address'], timeout)
    start_heartbeat(watches[this_node.node]['local'], rank, timeout)
