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
from typing import Any, Iterator, List, NamedTuple, Sequence, Set

import torch
import torch.distributed as dist

from mapsage.distributed.channels.channel import RankLostError
from mapsage.distributed.channels.missing_ranks import describe_missing
from mapsage.distributed.channels.open_channels import global_ranks, roll_call
from mapsage.distributed.channels.roll_call import Lane
from mapsage.distributed.descriptors import DescriptorLimitError

from .launcher_notes import end_process

_POLL_SECONDS = 1.0


_watched: Set[str] = set()  # types of devices that a thread watches


class BackendLane(Lane):
    """The collectives of a process group on a device, as the lane of a roll call.

    Args:
        name: Name of the lane; equal on all ranks.
        ranks: Global ranks, in group order.
        group: Name of the process group. The group itself is not kept, because one that outlives
            destroy_process_group may abort the process at its end.
        device_type: Type of the device.
    """

    def __init__(self, name: str, ranks: Sequence[int], group: str, device_type: str) -> None:
        self._group, self._device_type = group, device_type
        super().__init__(name, ranks)

    @property
    def entered(self) -> int:  # type: ignore[override]
        """Number of collectives that this rank has started; 0 once the group is destroyed."""
        return next((int(found.backend._get_sequence_number_for_group())
                     for found in _groups(self._device_type) if found.name == self._group), 0)

    @entered.setter
    def entered(self, value: int) -> None:
        pass  # the backend counts


class _Group(NamedTuple):
    """A process group with a backend that can tell whether it has failed."""

    name: str
    ranks: List[int]
    backend: Any
    error: str


def watch_backends(device_type: str) -> None:
    """Watch the groups of this process that carry tensors of a device, those made later included.

    Nothing is watched where the backend cannot tell that it has failed, as in old versions of
    PyTorch. Backends over gloo, such as the staged one, raise in the caller and never fail here.

    Args:
        device_type: Type in the PyTorch device string, such as ``'cuda'``.
    """
    if device_type != 'cpu' and device_type not in _watched and any(_groups(device_type)):
        _watched.add(device_type)
        threading.Thread(target=_watch, args=(device_type, ), daemon=True,
                         name='mapsage backend watch').start()


def _groups(device_type: str) -> Iterator[_Group]:
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map) if hasattr(c10d, '_world') else []:
        try:
            backend = group._get_backend(torch.device(device_type))
            if hasattr(backend, 'get_error'):
                yield _Group(c10d._pg_names[group], global_ranks(group), backend,
                             backend.get_error().name)
        except RuntimeError:  # it takes no tensors of this device, or does not say how it is
            continue
        except KeyError:  # another thread has just destroyed it
            continue


def _watch(device_type: str) -> None:
    try:
        while dist.is_initialized():
            _check_groups(device_type)
            time.sleep(_POLL_SECONDS)
    except DescriptorLimitError:  # the main thread needs connections too, and reports it
        pass
    finally:
        _watched.discard(device_type)


def _check_groups(device_type: str) -> None:
    for name, ranks, _, error in _groups(device_type):
        # Every rank opens the lane, so that it can answer when another one calls.
        lane = roll_call().open(f'backend/{name}', ranks, BackendLane, name, device_type)
        if error != 'SUCCESS':
            end_process(_lost(lane, error))


def _lost(lane: Lane, what: str) -> RankLostError:
    """Return the error that names the ranks for which a collective has waited in vain."""
    roll = roll_call()
    started = lane.entered
    roll.alarm(lane, {})
    (missing, advice), ranks = describe_missing(roll.find_missing(lane), roll.rank)
    return RankLostError(
        f'rank {roll.rank} waited in collective {started} of its device backend and {missing} '
        f'({what}). {advice}', ranks)
