"""Name the rank at fault where a native backend gives up a collective.

ProcessGroupNCCL watches its collectives on a thread of its own. When one exceeds its timeout, the
main thread waits inside the driver and gets no exception: the process ends by SIGABRT, up to a
minute later, and nobody learns for whom it has waited. So a thread here asks every group once a
second whether it has failed. If so, a roll call compares how many collectives each rank has
started. Ranks that have started fewer, or that do not answer, are those the others wait for.
"""
from __future__ import annotations

import threading
import time
from typing import Any, Dict, Iterator, NamedTuple

import torch
import torch.distributed as dist

from mapsage.distributed.channels.channel import RankLostError
from mapsage.distributed.channels.group_channel import describe_missing, global_ranks, roll_call
from mapsage.distributed.channels.roll_call import Lane

from .launcher_notes import end_process

_POLL_SECONDS = 1.0


class BackendLane(Lane):
    """The collectives of a native backend, as the lane of a roll call.

    Args:
        name: Name of the lane; equal on all ranks.
        ranks: Global ranks, in group order.
        backend: Backend of a process group, which numbers its collectives.
    """

    def __init__(self, name: str, ranks: Any, backend: Any) -> None:
        super().__init__(name, ranks)
        self._backend = backend

    @property
    def entered(self) -> int:  # type: ignore[override]
        """Number of collectives that this rank has started."""
        return int(self._backend._get_sequence_number_for_group())

    @entered.setter
    def entered(self, value: int) -> None:
        pass  # the backend counts


class _Group(NamedTuple):
    """A process group with a backend that can tell whether it has failed."""

    name: str
    group: Any
    backend: Any


def watch_backends(device_type: str) -> None:
    """Watch the groups of this process that carry tensors of a device, those made later included.

    Nothing is watched where the backend has no ``get_error``, as in old versions of PyTorch.
    Backends over gloo, such as the staged one, raise in the caller and always answer success here.

    Args:
        device_type: Type in the PyTorch device string, such as ``'cuda'``.
    """
    if device_type != 'cpu' and any(_groups(device_type)):
        threading.Thread(target=_watch, args=(device_type, ), daemon=True,
                         name='mapsage backend watch').start()


def _groups(device_type: str) -> Iterator[_Group]:
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map) if hasattr(c10d, '_world') else []:
        try:
            backend = group._get_backend(torch.device(device_type))
        except RuntimeError:  # the group takes no tensors of this device
            continue
        if hasattr(backend, 'get_error'):
            yield _Group(c10d._pg_names[group], group, backend)


def _watch(device_type: str) -> None:
    lanes: Dict[str, Lane] = {}
    while dist.is_initialized():
        for name, group, backend in _groups(device_type):
            if name not in lanes:
                # Every rank opens the lane, so that it can answer when another one calls.
                lanes[name] = roll_call().open(f'backend/{name}', global_ranks(group), BackendLane,
                                               backend)
            error = backend.get_error()
            if error.name != 'SUCCESS':
                end_process(_lost(lanes[name], error.name))
        time.sleep(_POLL_SECONDS)


def _lost(lane: Lane, what: str) -> RankLostError:
    """Return the error that names the ranks for which a collective has waited in vain."""
    roll = roll_call()
    started = lane.entered
    roll.alarm(lane, {})
    (missing, advice), ranks = describe_missing(roll.find_missing(lane), roll.rank)
    return RankLostError(
        f'rank {roll.rank} waited in collective {started} of its device backend and {missing} '
        f'({what}). {advice}', ranks)
