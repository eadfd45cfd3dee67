"""What the ranks of several nodes do when they have met: compare themselves, and watch each other.

Nothing happens on one node that stays alone.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from mmengine.config import Config

from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.nodes.heartbeat import (
    NodePlace,
    WatchSockets,
    has_heartbeat,
    node_place,
    start_heartbeat,
)
from mapsage.distributed.nodes.launcher_notes import note_met
from mapsage.errors import UserError
from mapsage.version import __version__
from mapsage_launcher.nodes.elastic import ELASTIC_VARIABLE

from .checkpoints.neighbor.copies import asks_for_copies
from .loading.dataset_parts import innermost

_SHOWN = 4  # keys of a config, and machines, that an error names
_COMPARED_SAMPLES = 64  # of the training data
_FOLDER_SECONDS = 5.0  # a shared disk may show a new file a little later elsewhere
# What may differ between nodes without another result.
_OWN_KEYS = ('work_dir', 'resume', 'load_from', 'launcher')


class NodesDifferError(UserError, ValueError):
    """The nodes of a job do not run the same code or config, or see different data."""

    on_every_rank = True


def meet_nodes(cfg: Config, work_dir: str, heartbeat_timeout: float) -> str:
    """Compare code and config of all nodes, and start the heartbeat between them. Collective.

    Args:
        cfg: Config of the run.
        work_dir: Folder of the run, which exists.
        heartbeat_timeout: Seconds without a sign after which a node is lost; 0 for no heartbeat.

    Returns:
        A warning for the log where a node does not see the work dir of rank 0; else empty.

    Raises:
        NodesDifferError: On every rank, naming the machines and what differs.
        RankLostError: Naming the ranks that did not come.
    """
    place = node_place()
    channel = open_channel()
    # one rank: a process by itself inside an allocation of several nodes
    alone = place is None or place.nodes == 1 or len(channel.ranks) == 1
    if place is None or (alone and ELASTIC_VARIABLE not in os.environ):
        return ''
    # a process may build several Runners
    beats = heartbeat_timeout > 0 and sys.platform == 'linux' and not has_heartbeat()
    sockets = WatchSockets() if beats and local_rank() == 0 else None
    mine = dict(node=place.node, host=socket.gethostname(),
                settings=own_settings(cfg) if local_rank() == 0 else None,
                watch=sockets.facts if sockets else None)
    texts = channel.gather_texts(json.dumps(mine))
    every = {rank: json.loads(text) for rank, text in zip(channel.ranks, texts)}
    differing = different_settings({_name(each): each['settings']
                                    for each in every.values() if each['settings']})
    if differing:
        raise NodesDifferError(differing)
    if beats:
        _watch_each_other(place, every, channel.rank, sockets, heartbeat_timeout)
    note_met()
    return _unseen_folder(work_dir, every, asks_for_copies(cfg))


def _name(each: Mapping[str, Any]) -> str:
    return f"{each['host']} (node {each['node']})"


def _unseen_folder(work_dir: str, every: Mapping[int, Mapping[str, Any]], copied: bool) -> str:
    """Return a warning about nodes that do not see the work dir of rank 0. Collective."""
    channel = open_channel()
    token, first = '', channel.rank == channel.ranks[0]
    if first:
        token = f'.seen-{os.urandom(8).hex()}'
        with contextlib.suppress(OSError):  # nobody sees it then
            Path(work_dir, token).touch()
    token = channel.gather_texts(token)[0]
    deadline = time.monotonic() + _FOLDER_SECONDS
    # a list of the folder is never one that a network file system remembers
    while not _holds(work_dir, token) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers = channel.gather_texts('' if _holds(work_dir, token) else 'no')
    if first:
        with contextlib.suppress(OSError):
            Path(work_dir, token).unlink()
    blind = sorted({_name(every[rank]) for rank, answer in zip(channel.ranks, answers) if answer})
    if not blind:
        return ''
    return (f"the work dir {work_dir} of {_name(every[channel.ranks[0]])}, where checkpoints are "
            f"written, is not the folder of that name on {', '.join(blind[:_SHOWN])}"
            f"{'' if len(blind) <= _SHOWN else f' and {len(blind) - _SHOWN} more'}: " + (
                'the newest checkpoint is therefore kept in the memory of another machine as well '
                '(neighbor_copy=True).' if copied else
                'if that machine is lost, or another one becomes the first, its checkpoints are '
                'not found and the training starts anew. Use a work dir on a disk that all '
                'machines share, or CheckpointHook(neighbor_copy=True).'))


def _holds(folder: str, name: str) -> bool:
    try:
        return name in os.listdir(folder)
    except OSError:  # a network disk that does not answer
        return False


def compare_data(dataset: Any) -> None:
    """Compare the training data of all nodes. Collective where there are several.

    Args:
        dataset: Dataset of the training.

    Raises:
        NodesDifferError: On every rank, naming the machines and what differs.
        RankLostError: Naming the ranks that did not come.
    """
    place = node_place()
    if place is None or place.nodes == 1:
        return
    mine = dict(node=place.node, host=socket.gethostname(),
                data=describe_data(dataset) if local_rank() == 0 else None)
    every = [json.loads(text) for text in open_channel().gather_texts(json.dumps(mine))]
    data = {_name(each): dict(each['data'], config={}) for each in every if each['data']}
    differing = different_settings(data)
    if differing:
        raise NodesDifferError(differing)


def describe_data(dataset: Any) -> Dict[str, Any]:
    """Return how many samples a dataset has, and a digest of names and sizes of some files."""
    if not hasattr(dataset, '__len__'):
        return {}
    count, digest, files = len(dataset), hashlib.blake2b(digest_size=4), 0
    for number in range(_COMPARED_SAMPLES if count else 0):
        inner, index = innermost(dataset, number * count // _COMPARED_SAMPLES)
        info = inner.get_data_info(index) if hasattr(inner, 'get_data_info') else None
        for key in ('img_path', 'seg_map_path'):
            path = (info or {}).get(key)
            if isinstance(path, str) and os.path.isfile(path):
                files += 1
                digest.update(f'{os.path.basename(path)} {os.path.getsize(path)}\n'.encode())
    return {'training samples': count, **({} if not files else {
        f'names and sizes of {files} training files': digest.hexdigest()})}


def _watch_each_other(place: NodePlace, every: Dict[int, Dict[str, Any]], rank: int,
                      sockets: Optional[WatchSockets], timeout: float) -> None:
    hosts = {each['node']: each['host'] for each in every.values()}
    ranks: Dict[int, List[int]] = {}
    for other, each in every.items():
        ranks.setdefault(each['node'], []).append(other)
    watches = {each['node']: each['watch'] for each in every.values() if each['watch']}
    if set(watches) != set(hosts):  # such as that a node's first rank only encodes
        warnings.warn('no heartbeat between the nodes: on some, no rank of the training has local '
                      'rank 0.', stacklevel=2)
        return
    if any(each['host'] != hosts[each['node']] for each in every.values()):
        warnings.warn('no heartbeat between the nodes: the launcher gives several hosts the same '
                      'node number.', stacklevel=2)
        return
    if sockets is not None:
        sockets.start(place.node, hosts, ranks, watches[min(hosts)]['address'], timeout)
    start_heartbeat(watches[place.node]['local'], rank, timeout)


def own_settings(cfg: Config) -> Dict[str, Any]:
    """Return what must be equal on all nodes: digests, numbers and the entries of the config."""
    # Only an elastic job counts on equal numbers of ranks; encoders are not counted among them.
    compares_ranks = ELASTIC_VARIABLE in os.environ and ENCODERS_VARIABLE not in os.environ
    ranks = {'ranks_per_node': os.environ.get('LOCAL_WORLD_SIZE', '1')} if compares_ranks else {}
    return dict(
        mapsage=f'{__version__} {code_digest()}', torch=torch.__version__,
        python=platform.python_version(), resume=bool(cfg.get('resume')), **ranks,
        config={key: value for key, value in flat_config(cfg).items()
                if key.split('.')[0] not in _OWN_KEYS})


def code_digest(folder: Optional[Path] = None) -> str:
    """Return a digest of the Python files of MapSage and its launcher, 8 hexadecimal digits.

    What a wheel has in .mim is left out: in a checkout it lies elsewhere.
    """
    package = Path(__file__).resolve().parents[1]
    sources = [package, package.with_name('mapsage_launcher')] if folder is None else [folder]
    digest = hashlib.blake2b(digest_size=4)
    for source in sources:
        for path in sorted(source.rglob('*.py')):
            name = path.relative_to(source)
            if name.parts[0] != '.mim':
                digest.update(str(name).encode() + b'\0' + path.read_bytes())
    return digest.hexdigest()


def flat_config(cfg: Mapping[str, Any]) -> Dict[str, str]:
    """Return the entries of a config by their path, as texts that are equal on all machines."""
    found: Dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        parts: Sequence[Tuple[Any, Any]] = (
            list(value.items()) if isinstance(value, Mapping) else
            list(enumerate(value)) if isinstance(value, (list, tuple)) else
            list(enumerate(sorted(value, key=repr))) if isinstance(value, (set, frozenset)) else [])
        for key, part in parts:
            walk(part, f'{path}.{key}' if path else str(key))
        if not parts:  # functions and classes by their name: an address is each process's own
            text = str(getattr(value, '__qualname__', None) or (
                repr(value) if type(value).__repr__ is not object.__repr__
                else type(value).__qualname__))
            found[path] = re.sub(' at 0x[0-9a-f]+', '', text)

    walk(cfg.to_dict() if isinstance(cfg, Config) else cfg, '')
    return found


def different_settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return in what the nodes differ, in words; empty if in nothing. Pure.

    Args:
        settings: What :func:`own_settings` returns, by name of the node.
    """
    lines = []
    flat = {name: {**{key: str(value) for key, value in each.items() if key != 'config'},
                   **{f'config {key}': value for key, value in each['config'].items()}}
            for name, each in settings.items()}
    keys = sorted({key for each in flat.values() for key in each})
    different = [key for key in keys if len({each.get(key) for each in flat.values()}) > 1]
    for key in different[:_SHOWN]:
        held: Dict[Optional[str], List[str]] = {}
        for name, each in flat.items():
            held.setdefault(each.get(key), []).append(name)
        lines.append(f'  {key}: ' + '; '.join(
            f"{'not set' if value is None else value[:200]} on {', '.join(names[:_SHOWN])}"
            + (f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else '')
            for value, names in held.items()))
    if not lines:
        return ''
    if len(different) > _SHOWN:
        lines.append(f'  and {len(different) - _SHOWN} more')
    paths = any('/' in str(each.get(key)) for key in different if key.startswith('config ')
                for each in flat.values())
    return '\n'.join(['the machines of this job differ, so that their ranks would not train the '
                      'same:', *lines, 'Start all with the same version of the code, the same '
                      'config and the same number of ranks.'
                      + (' Where the data lie in different places, give them one path on all '
                         'machines, such as a symbolic link.' if paths else '')])
