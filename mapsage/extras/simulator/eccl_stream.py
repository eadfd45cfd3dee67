"""The asynchronous half of the simulated ``eccl``: its stream, its works and its watchdog.

A collective of the real library is queued and runs later; the output holds no result until the
caller has waited for the work. A dead peer is not noticed: the wait never ends, no signal handler
of Python runs meanwhile, and after the group's timeout the watchdog ends the process by SIGABRT.
Which collectives there are, and which tensors they refuse, is in ``simulated_eccl.py``.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist

# torch_gcu 2.10 looks at its works this often (ProcessGroupECCL.cpp, kWatchdogThreadSleepMillis).
_WATCHDOG_SECONDS = 0.1
# What an output holds until its work was waited for, by the size of an integer in bytes. It fits
# into 32 bits, because the cards keep int64 in them.
_POISON = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A}


class Call(NamedTuple):
    """A collective of device tensors, carried out on copies in host memory.

    Attributes:
        name: Name of the operation as torch spells it, such as ``'ALLREDUCE'``.
        inputs: Device tensors that are sent.
        outputs: Device tensors that receive a result.
        start: Function that starts the collective of the copies and returns gloo's works.
        deliver: Function that writes the results into ``outputs``.
        result: Value of the work's future, as torch's reducer expects it.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    start: Callable[[], List[dist.Work]]
    deliver: Callable[[], None]
    result: object


class EcclWork(dist.Work):
    """The work of one collective: results are in the outputs once :meth:`wait` has returned.

    Args:
        call: The collective.
        number: Number of the collective in its group, from 1.
    """

    def __init__(self, call: Call, number: int) -> None:
        super().__init__()
        self.call, self.number, self.started = call, number, time.monotonic()
        self.landed: torch.futures.Future[None] = torch.futures.Future()
        self._delivering, self._delivered = threading.Lock(), False

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait for the collective, and write its results. Never raises an error of a peer."""
        # C++ code that releases the interpreter: as in a vendor's library, no signal handler runs.
        self.landed.wait()
        self._deliver()
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that is complete when the results are in the outputs."""

        def deliver(_: object) -> object:
            self._deliver()
            return self.call.result

        return self.landed.then(deliver)

    def is_completed(self) -> bool:
        """Return whether the collective has ended; the outputs may not have the results yet."""
        return self.landed.done()

    def is_success(self) -> bool:
        """Raise NotImplementedError, as ``WorkECCL`` does."""
        raise NotImplementedError('WorkECCL::isSuccess() is deprecated')

    def result(self) -> Any:
        """Return the outputs."""
        return list(self.call.outputs)

    def _deliver(self) -> None:
        with self._delivering:
            if not self._delivered:
                self._delivered = True
                with torch.no_grad():
                    self.call.deliver()


class EcclStream:
    """Runs calls one after the other in a thread, as the stream of a communicator does.

    If a call breaks, because a peer has ended, the stream stays in it for ever.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[Optional[EcclWork]] = queue.Queue()
        self.pending: List[EcclWork] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, work: EcclWork) -> None:
        """Queue a work."""
        self.pending.append(work)
        self._queue.put(work)

    def close(self) -> None:
        """Wait for all works, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                return
            try:
                for part in work.call.start():
                    part.wait()
            # A peer has ended, or sent a tensor of another size. The vendor's library says nothing.
            except (RuntimeError, ValueError):
                threading.Event().wait()
            self.pending.remove(work)
            work.landed.set_result(None)


class Watchdog:
    """Ends the process by SIGABRT when a work has not completed within the group's timeout.

    Args:
        rank: Rank of this process in the group.
        timeout: Time that a collective may take.
    """

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self._streams: List[EcclStream] = []
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name='eccl watchdog').start()

    def open_stream(self, name: str) -> EcclStream:
        """Return a new stream, which is watched."""
        stream = EcclStream(name)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Wait for the works of all streams, and end the threads."""
        for stream in self._streams:
            stream.close()
        self._closed.set()

    def wait_until_idle(self) -> None:
        """Wait for all works that are queued now."""
        for work in itertools.chain(*[list(stream.pending) for stream in self._streams]):
            work.landed.wait()

    def _watch(self) -> None:
        limit = self._timeout.total_seconds()
        while not self._closed.wait(_WATCHDOG_SECONDS):
            for stream in self._streams:
                for work in list(stream.pending):
                    seconds = time.monotonic() - work.started
                    if seconds > limit:
                        self._abort(work, seconds)

    def _abort(self, work: EcclWork, seconds: float) -> None:
        def count(tensors: Sequence[torch.Tensor]) -> int:
            return sum(tensor.numel() for tensor in tensors)

        os.write(
            2,
            (
                f'[rank{self._rank}] [Rank {self._rank}] Watchdog caught collective operation timeout: '
                f'WorkECCL(SeqNum={work.number}, OpType={work.call.name}, '
                f'NumelIn={count(work.call.inputs)}, NumelOut={count(work.call.outputs)}, '
                f'Timeout(ms)={self._timeout.total_seconds() * 1000:.0f}) ran for '
                f'{seconds * 1000:.0f} milliseconds before timing out.\n'
            ).encode(),
        )
        os.abort()


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors in a way that code notices which reads them before their results come."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.detach().fill_(float('nan'))
            else:
                tensor.detach().fill_(tensor.dtype == torch.bool or _POISON[tensor.element_size()])
