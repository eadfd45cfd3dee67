"""Streams and events of ``torch.gcu``, with the interface of torch_gcu 2.10.

A simulated device has one stream, and kernels are finished when they are queued. So an event is
complete when it is recorded, and its time is the time of recording. Only collectives are waited
for.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Optional, Type

import torch

from .devices import DeviceLike, current_device, device_index, set_device, synchronize


class Stream(torch.Stream):
    """The stream of a device. ``device`` is the current one by default; ``priority`` is ignored."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Return the stream of a device."""
        # PyTorch restores a stream from its three numbers.
        if 'stream_id' in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(
            cls, device=torch.device('gcu', device_index(device)), priority=priority
        )

    def synchronize(self) -> None:
        """Wait for the collectives under way."""
        synchronize(self.device)

    def wait_event(self, event: torch.Event) -> None:
        """Return at once: the event is complete."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Return at once: the work of the other stream is done."""

    def record_event(self, event: Optional[torch.Event] = None) -> torch.Event:
        """Record ``event``, or a new one, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event


# torch 1.10 imports this file and has no events; the simulator is refused there (load.py).
_EventBase: Any = getattr(torch, 'Event', object)


class Event(_EventBase):
    """A point in the work of a stream.

    Args:
        enable_timing: Whether :meth:`elapsed_time` works.
        blocking: Ignored; the simulator never waits.
        interprocess: Ignored.
    """

    _timed: bool
    _seconds: Optional[float]

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        """Return an event of the current device."""
        event = super().__new__(cls, device='gcu')
        event._timed, event._seconds = enable_timing, None
        return event

    def record(self, stream: Optional[torch.Stream] = None) -> None:
        """Record the event behind the work of ``stream``, the current one by default."""
        super().record(current_stream() if stream is None else stream)
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the collectives under way."""
        synchronize()

    # PyTorch's method takes no subclass as its argument.
    def elapsed_time(self, other: torch.Event) -> float:
        """Return the milliseconds from the recording of this event to the recording of ``other``.

        Raises:
            ValueError: If an event was made without ``enable_timing`` or is not recorded.
        """
        seconds = [
            event._seconds for event in (self, other) if isinstance(event, Event) and event._timed
        ]
        if len(seconds) < 2 or None in seconds:
            raise ValueError(
                'elapsed_time needs two recorded events of torch.gcu with enable_timing=True'
            )
        begin, end = (moment or 0.0 for moment in seconds)
        return (end - begin) * 1000


class StreamContext:
    """A context in which the device of ``stream`` is the current one; None changes nothing."""

    def __init__(self, stream: Optional[torch.Stream]) -> None:
        self._stream = stream
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        if self._stream is not None:
            set_device(self._stream.device)

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        set_device(self._before)


def stream(stream: Optional[torch.Stream]) -> StreamContext:
    """Return :class:`StreamContext` of a stream."""
    return StreamContext(stream)


def set_stream(stream: Optional[torch.Stream]) -> None:
    """Do nothing: every device has one stream."""


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the stream of a device."""
    return Stream(device)


def current_stream(device: DeviceLike = None) -> Stream:
    """Return the stream of a device."""
    return Stream(device)
