"""Name the rank at fault where a native backend gives up a collective.

The library of a card watches its collectives on a thread of its own. When one exceeds its timeout,
the main thread waits inside the driver and gets no exception: the process ends by SIGABRT, and
nobody learns for whom it has waited. So a thread here notices first, in one of two ways:

- It asks every group once a second whether it has failed (NCCL, whose process ends up to a minute
  later).
- eccl does not answer that question (``Accelerator.silent_backend``), and its timeout is therefore
  longer than ``env_cfg.dist_cfg.timeout``. The thread looks whether the main thread has stood at
  one instruction for that time, and then whether the card is idle. If not, a collective is stuck.

Then a roll call compares how many collectives every rank has started. Ranks that have started
fewer, or that do not answer, are those the others wait for.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Iterator, List, NamedTuple, Sequence, Set, Tuple

import torch
import torch.distributed as dist

from mapsage.accelerator import Accelerator
from mapsage.distributed.channels.channel import RankLostError
from mapsage.distributed.channels.open_channels import global_ranks, roll_call
from mapsage.distributed.channels.roll_call import Lane
from mapsage.distributed.descriptors import DescriptorLimitError
from mapsage.distributed.groups.staged import StagedProcessGroup
from mapsage.distributed.launcher import local_rank
from mapsage.distributed.lost_ranks import describe_missing

from .launcher_notes import end_process

_POLL_SECONDS = 1.0
# A card without a collective that is stuck is idle within this time: its other work is short.
_IDLE_SECONDS = 5.0

# Types of devices that a thread watches.
_watched: Set[str] = set()


class BackendLane(Lane):
    """The collectives of a process group on a device, as the lane of a roll call.

    Args:
        name: Name of the lane; equal on all ranks.
        ranks: Global ranks, in group order.
        group: Name of the process group. The group itself is not kept, because one that outlives
            destroy_process_group may abort the process at its end.
        device_type: Type of the device.
    """

    stuck_together = True

    def __init__(self, name: str, ranks: Sequence[int], group: str, device_type: str) -> None:
        self._group, self._device_type = group, device_type
        super().__init__(name, ranks)

    @property
    def entered(self) -> int:  # type: ignore[override]
        """Number of collectives that this rank has started; 0 once the group is destroyed."""
        return next(
            (
                int(group.backend._get_sequence_number_for_group())
                for group in _groups(self._device_type)
                if group.name == self._group
            ),
            0,
        )

    @entered.setter
    def entered(self, value: int) -> None:
        # The backend counts.
        pass


class _Group(NamedTuple):
    """A process group with a backend that counts its collectives.

    Attributes:
        name: Name of the group.
        ranks: Global ranks, in group order.
        backend: Its backend for the device.
        error: What the backend says about itself: ``'SUCCESS'``, the name of an error, or
            ``'SILENT'`` if it does not say.
    """

    name: str
    ranks: List[int]
    backend: Any
    error: str


def watch_backends(accelerator: Accelerator, timeout: float) -> None:
    """Watch the groups of this process that carry tensors of a device, those made later included.

    Nothing is watched where the backend cannot tell that it has failed, as in old versions of
    PyTorch, unless it is known to be silent. Backends over gloo, such as the staged one, raise in
    the caller and never fail here.

    Args:
        accelerator: Accelerator in use.
        timeout: Seconds a collective may wait for the other ranks.
    """
    device_type = accelerator.device_type
    groups = [
        group
        for group in _groups(device_type)
        if accelerator.silent_backend or group.error != 'SILENT'
    ]
    if device_type == 'cpu' or device_type in _watched or not groups:
        return
    _watched.add(device_type)
    threading.Thread(
        target=_watch, args=(accelerator, timeout), daemon=True, name='mapsage backend watch'
    ).start()


class MainThread:
    """How long the main thread has stood at one instruction, which a wait in native code does.

    Time in which this process did not run does not count.
    """

    def __init__(self) -> None:
        self._position: Tuple[int, int] = (0, 0)
        self._seconds, self._last_look = 0.0, time.monotonic()

    def still_seconds(self) -> float:
        """Return the time in seconds. Call it about once a second, from another thread."""
        now = time.monotonic()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        position = (id(frame), frame.f_lasti if frame is not None else 0)
        elapsed = min(now - self._last_look, 2 * _POLL_SECONDS)
        self._seconds = self._seconds + elapsed if position == self._position else 0.0
        self._position, self._last_look = position, now
        return self._seconds

    def moved(self) -> None:
        """Begin to count anew."""
        self._seconds = 0.0


def _groups(device_type: str) -> Iterator[_Group]:
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map) if hasattr(c10d, '_world') else []:
        try:
            backend = group._get_backend(torch.device(device_type))
            if isinstance(backend, StagedProcessGroup):
                continue
            yield _Group(c10d._pg_names[group], global_ranks(group), backend, _error(backend))
        # The group takes no tensors of this device.
        except RuntimeError:
            continue
        # Another thread has just destroyed it.
        except KeyError:
            continue


def _error(backend: Any) -> str:
    try:
        return str(backend.get_error().name) if hasattr(backend, 'get_error') else 'SILENT'
    # "Backend eccl does not support getError"
    except RuntimeError:
        return 'SILENT'


def _watch(accelerator: Accelerator, timeout: float) -> None:
    main_thread = MainThread()
    try:
        while dist.is_initialized():
            lanes = _lanes(accelerator.device_type)
            if accelerator.silent_backend and main_thread.still_seconds() >= timeout:
                if not _is_idle(accelerator):
                    end_process(_name_missing(lanes, timeout))
                main_thread.moved()
            time.sleep(_POLL_SECONDS)
    # The main thread needs connections too, and reports it.
    except DescriptorLimitError:
        pass
    finally:
        _watched.discard(accelerator.device_type)


def _lanes(device_type: str) -> List[Lane]:
    """Return the lanes of all groups; end the process if one of them says that it has failed."""
    lanes = []
    for name, ranks, _, error in _groups(device_type):
        # Every rank opens the lane, so that it can answer when another one calls.
        lane = roll_call().open(f'backend/{name}', ranks, BackendLane, name, device_type)
        if error not in ('SUCCESS', 'SILENT'):
            end_process(_lost(lane, error))
        lanes.append(lane)
    return lanes


def _is_idle(accelerator: Accelerator) -> bool:
    """Return whether the card of this rank has done all its work."""

    def wait() -> None:
        # The current device is a property of the thread.
        accelerator.set_device(local_rank())
        accelerator.synchronize()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(_IDLE_SECONDS)
    return not thread.is_alive()


def _name_missing(lanes: Sequence[Lane], timeout: float) -> RankLostError:
    """Return the error about the first group that misses ranks, or about a card that hangs."""
    for lane in lanes:
        error = _lost(lane, f'the card has not ended it within {timeout:g} s')
        if error.ranks:
            return error
    started = max((lane.entered for lane in lanes), default=0)
    return RankLostError(
        f'rank {dist.get_rank()} waited in collective {started} of its device backend, which every '
        f'rank has started and its card has not ended within {timeout:g} s. A card or a link '
        f'between cards hangs, or the ranks have started different collectives: test the cards '
        f"with scripts/doctor.sh, and look at the vendor's log."
    )


def _lost(lane: Lane, symptom: str) -> RankLostError:
    """Return the error that names the ranks for which a collective has waited in vain."""
    roll = roll_call()
    started = lane.entered
    roll.alarm(lane, {})
    (missing, advice), ranks = describe_missing(roll.find_missing(lane), roll.rank)
    return RankLostError(
        f'rank {roll.rank} waited in collective {started} of its device backend and {missing} '
        f'({symptom}). {advice}',
        ranks,
    )
