"""The ``eccl`` backend of the simulated GCU: gloo behind the limits and faults of the real one.

It makes a program fail on a machine without GCUs where it would fail with them. Collectives are
asynchronous and never report a dead peer (``eccl_stream.py``). The quirks of a version of the
vendor's software are in ``mapsage/extras/simulator/profiles.py``, the other settings in
``settings.py`` there.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.distributed as dist

from mapsage.distributed.groups.staged import register_staged_backend
from mapsage.extras.simulator import device_module
from mapsage.extras.simulator.accelerator import SimAccelerator
from mapsage.extras.simulator.profiles import Wire64
from mapsage.extras.simulator.settings import SimulatorSettings

from .eccl_stream import Call, EcclStream, EcclWork, Watchdog, poison

Tensors = Sequence[torch.Tensor]

# Gloo's own timeout, which the watchdog must precede.
_FOREVER = timedelta(days=365)
_SUM = dist.ReduceOp.SUM
_WIDE = (torch.int64, torch.float64)
_BITWISE = ('BAND', 'BOR', 'BXOR')


def register_simulated_backend(accelerator: SimAccelerator) -> None:
    """Register the native backend of a simulated accelerator."""
    settings = accelerator.settings

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(store, rank, size, timeout, settings)

    register_staged_backend(accelerator.device_type, accelerator.communication, create)


class SimulatedGroup(dist.ProcessGroup):
    """A process group with gloo for CPU tensors and the simulated eccl for device tensors.

    Real groups are made by torch (``cpu:gloo,gcu:eccl``). Torch takes a backend in Python only as a
    whole group, so this class does the same.

    Args:
        store: Rendezvous store of the group.
        rank: Rank of this process in the group.
        size: Number of ranks.
        timeout: Time that a collective may take.
        settings: Settings of the simulated cards.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        settings: SimulatorSettings,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # Any, because torch's type hints of this class differ between versions.
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._eccl = SimulatedEccl(store, rank, size, timeout, settings)

    def getBackendName(self) -> str:
        return 'custom'

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == 'cpu' else self._eccl

    def barrier(self, opts: Optional[Any] = None) -> dist.Work:
        """Wait for all ranks, over gloo unless the options name a card."""
        opts = opts or dist.BarrierOptions()
        on_card = bool(opts.device_ids) or getattr(opts.device, 'type', 'cpu') != 'cpu'
        return (self._eccl if on_card else self._gloo).barrier(opts)  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Do nothing: ``ProcessGroupECCL`` ends its communicators in its destructor."""


def _dispatched(name: str) -> Callable[..., dist.Work]:
    def operation(group: SimulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        tensor = _first_tensor(args)
        backend = group._get_backend(tensor.device)
        return getattr(backend, name)(*args, **kwargs)  # type: ignore[no-any-return]

    return operation


for _name in (
    'allreduce',
    'allreduce_coalesced',
    'broadcast',
    'reduce',
    'allgather',
    '_allgather_base',
    'allgather_coalesced',
    'gather',
    'scatter',
    'reduce_scatter',
    '_reduce_scatter_base',
    'alltoall',
    'alltoall_base',
    'send',
    'recv',
    'recv_anysource',
):
    setattr(SimulatedGroup, _name, _dispatched(_name))
# Names of two methods in torch 2.13 and later.
setattr(SimulatedGroup, 'all_gather_single', _dispatched('_allgather_base'))  # noqa: B010
setattr(SimulatedGroup, 'reduce_scatter_single', _dispatched('_reduce_scatter_base'))  # noqa: B010


class SimulatedEccl:
    """Collectives of device tensors as eccl runs them, on copies in host memory.

    The methods have the names and arguments of torch's ``ProcessGroup``. They return at once, and
    the results are in the outputs after :meth:`EcclWork.wait`.

    Args:
        store: Rendezvous store of the group.
        rank: Rank of this process in the group.
        size: Number of ranks.
        timeout: Time after which the watchdog ends the process.
        settings: Settings of the simulated cards.
    """

    supports_coalescing = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        settings: SimulatorSettings,
    ) -> None:
        # Any, because torch's type hints of this class differ between versions.
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore('eccl', store), rank, size, _FOREVER
        )
        self._rank, self._size = rank, size
        self._settings, self._profile = settings, settings.profile
        self._watchdog = Watchdog(rank, timeout)
        self._stream = self._watchdog.open_stream('eccl stream')
        # Each pair of ranks has a communicator for itself, by the rank of the peer.
        self._pairs: Dict[int, EcclStream] = {}
        self._count = 0
        self._traffic: Set[Tuple[str, str, str]] = set()
        device_module.on_synchronize(self._watchdog.wait_until_idle)

    def __del__(self) -> None:
        device_module.off_synchronize(self._watchdog.wait_until_idle)
        if self._settings.aborting_destroy:
            os.write(
                2,
                b'ECCL assertion failed in ecclCommDestroy (simulated fault: MAPSAGE_SIM_FAULTS)\n',
            )
            os.abort()
        self._watchdog.close()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has started."""
        return self._count

    def allreduce(self, tensors: Tensors, opts: Optional[Any] = None) -> dist.Work:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Optional[Any] = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        hosts, divisor = self._copies(tensors), self._divisor(tensors, opts.reduceOp)
        plain = dist.AllreduceOptions()
        plain.reduceOp = _wire_operation(tensors, opts.reduceOp)
        return self._launch(
            'ALLREDUCE',
            tensors,
            tensors,
            lambda: [self._gloo.allreduce([host], plain) for host in hosts],
            self._write(tensors, hosts, divisor),
            tensors,
            reduces=True,
        )

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        hosts, divisor = self._copies(tensors), self._divisor(tensors, opts.reduceOp)
        plain = dist.ReduceOptions()
        plain.reduceOp = _wire_operation(tensors, opts.reduceOp)
        plain.rootRank, plain.rootTensor = opts.rootRank, opts.rootTensor
        outputs = tensors if opts.rootRank == self._rank else []
        return self._launch(
            'REDUCE',
            tensors,
            outputs,
            lambda: [self._gloo.reduce(hosts, plain)],
            self._write(outputs, hosts, divisor),
            tensors,
            reduces=True,
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Optional[Any] = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        sent = _flatten(inputs)
        wholes = [
            torch.stack([chunk.reshape(-1) for chunk in self._copies(chunks)]) for chunks in inputs
        ]
        plain = dist.AllreduceOptions()
        plain.reduceOp = _wire_operation(sent, opts.reduceOp)
        return self._launch(
            'REDUCE_SCATTER',
            sent,
            outputs,
            lambda: [self._gloo.allreduce([whole], plain) for whole in wholes],
            self._write(
                outputs, [whole[self._rank] for whole in wholes], self._divisor(sent, opts.reduceOp)
            ),
            outputs,
            reduces=True,
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Optional[Any] = None
    ) -> dist.Work:
        _check_contiguous([tensor])
        return self.reduce_scatter([output], [list(tensor.view(-1).chunk(self._size))], opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        hosts = self._copies(tensors)
        outputs = [] if opts.rootRank == self._rank else tensors
        return self._launch(
            'BROADCAST',
            tensors,
            outputs,
            lambda: [self._gloo.broadcast(hosts, opts)],
            self._write(outputs, hosts),
            tensors,
        )

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Optional[Any] = None
    ) -> dist.Work:
        hosts, gathered = self._copies(inputs), [self._copies(row) for row in outputs]
        return self._launch(
            'ALLGATHER',
            inputs,
            _flatten(outputs),
            lambda: [self._gloo.allgather(gathered, hosts)],
            self._write(_flatten(outputs), _flatten(gathered)),
            outputs,
        )

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Optional[Any] = None
    ) -> dist.Work:
        _check_contiguous([output])
        # Shapes may differ, only the number of elements fits.
        chunks = [chunk.view_as(tensor) for chunk in output.view(-1).chunk(self._size)]
        return self.allgather([chunks], [tensor])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        hosts, gathered = self._copies(inputs), [self._copies(row) for row in outputs]
        written = _flatten(outputs) if self._profile.gather_fills_outputs else []
        return self._launch(
            'GATHER',
            inputs,
            written,
            lambda: [self._gloo.gather(gathered, hosts, opts)],
            self._write(written, _flatten(gathered)),
            outputs,
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        scattered, hosts = self._copies(outputs), [self._copies(row) for row in inputs]
        written = outputs if self._profile.gather_fills_outputs else []
        return self._launch(
            'SCATTER',
            [*_flatten(inputs), *outputs],
            written,
            lambda: [self._gloo.scatter(scattered, hosts, opts)],
            self._write(written, scattered),
            outputs,
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
        opts: Optional[Any] = None,
    ) -> dist.Work:
        [sent], [received] = self._copies([tensor]), self._copies([output])
        options = dist.AllToAllOptions()
        return self._launch(
            'ALLTOALL_BASE',
            [tensor],
            [output],
            lambda: [self._gloo.alltoall_base(received, sent, output_sizes, input_sizes, options)],
            self._write([output], [received]),
            [output],
            contiguous=False,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Optional[Any] = None) -> dist.Work:
        sizes = [tensor.numel() for tensor in outputs]
        sent = torch.cat([host.reshape(-1) for host in self._copies(inputs)])
        received = torch.cat([host.reshape(-1) for host in self._copies(outputs)])
        options = dist.AllToAllOptions()
        return self._launch(
            'ALLTOALL',
            inputs,
            outputs,
            lambda: [
                self._gloo.alltoall_base(
                    received, sent, sizes, [tensor.numel() for tensor in inputs], options
                )
            ],
            self._write(outputs, received.split(sizes)),
            outputs,
            contiguous=False,
        )

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        hosts = self._copies(tensors)
        work = self._gloo.send(hosts, destination, tag)
        return self._launch(
            'SEND',
            tensors,
            [],
            lambda: [work],
            lambda: None,
            tensors,
            contiguous=False,
            peer=destination,
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        hosts = self._copies(tensors)
        work = self._gloo.recv(hosts, source, tag)
        return self._launch(
            'RECV',
            [],
            tensors,
            lambda: [work],
            self._write(tensors, hosts),
            tensors,
            contiguous=False,
            peer=source,
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        raise RuntimeError('ProcessGroupECCL does not support recvAnysource')

    def allgather_coalesced(self, *_: object) -> dist.Work:
        raise RuntimeError('ProcessGroupECCL does not support allgather_coalesced')

    def barrier(self, opts: Optional[Any] = None) -> dist.Work:
        """Reduce one uint8 on the card that eccl would choose, and wait for it."""
        ids = list(opts.device_ids or []) if opts is not None else []
        index = ids[0] if ids else self._rank % device_module.device_count()
        with device_module.device(index):
            return self.allreduce([torch.empty(1, dtype=torch.uint8, device=f'gcu:{index}')])

    def _launch(
        self,
        name: str,
        inputs: Tensors,
        outputs: Tensors,
        start: Callable[[], List[dist.Work]],
        deliver: Callable[[], None],
        result: object,
        *,
        reduces: bool = False,
        contiguous: bool = True,
        peer: Optional[int] = None,
    ) -> dist.Work:
        """Check the tensors of a collective, queue it, and return its work.

        Args:
            name: Name of the operation.
            inputs: Device tensors that are sent.
            outputs: Device tensors that receive a result.
            start: Function that starts gloo's collective of the copies.
            deliver: Function that writes the results.
            result: Value of the work's future.
            reduces: Whether the tensors are added or compared.
            contiguous: Whether tensors that are not contiguous are refused.
            peer: Rank of the other end of a message; None for a collective.
        """
        tensors = [*inputs, *outputs]
        if contiguous:
            _check_contiguous(tensors)
        for tensor in tensors:
            self._check(tensor, reduces)
        self._count += 1
        self._record(name, tensors)
        poison(outputs)
        if self._count == self._settings.stalled_collective:
            start = _stall
        work = EcclWork(Call(name, inputs, outputs, start, deliver, result), self._count)
        stream = self._stream
        if peer is not None:
            if peer not in self._pairs:
                self._pairs[peer] = self._watchdog.open_stream(f'eccl stream of rank {peer}')
            stream = self._pairs[peer]
        stream.submit(work)
        return work

    def _check(self, tensor: torch.Tensor, reduces: bool) -> None:
        """Raise what ``ProcessGroupECCL`` raises for a tensor that it does not take."""
        if tensor.device.index != device_module.current_device():
            raise RuntimeError(
                f'a collective of a tensor on {tensor.device} while gcu:'
                f'{device_module.current_device()} is the current device of this thread: eccl '
                f'would do nothing. Call torch.gcu.set_device() first.'
            )
        if str(tensor.dtype).rpartition('.')[2] in self._profile.unmapped_dtypes:
            raise TypeError(
                f'Input tensor data type is not supported for ECCL process group: {tensor.dtype}'
            )
        if reduces and tensor.dtype in _WIDE and self._profile.wire_64 is Wire64.REDUCTIONS_REFUSED:
            raise dist.DistBackendError(
                'ECCL error in: torch_gcu/csrc/distributed/ProcessGroupECCL.cpp, invalid argument '
                '(run with ECCL_DEBUG=WARN for details), ECCL version 3.6.3.11\n'
                'ecclInvalidArgument: Invalid value for an argument.'
            )

    def _divisor(self, tensors: Tensors, operation: Any) -> int:
        """Check the operation of a reduction; return the number to divide the sum by."""
        if any(operation == getattr(dist.ReduceOp, name) for name in _BITWISE):
            raise ValueError('Cannot use ReduceOp.BAND, BOR or BXOR with ECCL')
        if operation != dist.ReduceOp.AVG:
            return 1
        if any(tensor.dtype == torch.bool for tensor in tensors):
            raise TypeError('Cannot use ReduceOp.AVG with Boolean inputs')
        return self._size

    def _copies(self, tensors: Tensors) -> List[torch.Tensor]:
        """Return copies in host memory, in the dtypes in which the tensors travel."""
        narrow = {torch.float64: torch.float32, torch.bool: torch.uint8}
        if self._profile.wire_64 is Wire64.NARROWED:
            narrow[torch.int64] = torch.int32
        if self._profile.wire_64 is Wire64.REDUCTIONS_REFUSED:
            del narrow[torch.float64]
        return [
            tensor.detach().cpu().to(narrow.get(tensor.dtype, tensor.dtype)).contiguous()
            for tensor in tensors
        ]

    def _write(
        self, outputs: Tensors, hosts: Sequence[torch.Tensor], divisor: int = 1
    ) -> Callable[[], None]:
        """Return the function that writes host results into device tensors."""
        if (
            any(tensor.dtype == torch.int64 for tensor in outputs)
            and self._profile.wire_64 is Wire64.FIRST_HALF
        ):
            before = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in outputs])
            return lambda: _write_first_half(outputs, hosts, before)

        def write() -> None:
            for output, host in zip(outputs, hosts):
                # The dtype of the card's division, as in eccl's AVG.
                output.copy_(
                    (host if divisor == 1 else (host / divisor).to(host.dtype)).view_as(output)
                )

        return write

    def _record(self, name: str, tensors: Tensors) -> None:
        """Write an operation, its dtype and its caller into the folder of the traffic, once."""
        folder = self._settings.traffic_folder
        if not folder:
            return
        entry = (name, str(tensors[0].dtype).rpartition('.')[2], _caller())
        if entry not in self._traffic:
            self._traffic.add(entry)
            with Path(folder, f'{os.getpid()}.jsonl').open('a', encoding='utf-8') as file:
                file.write(json.dumps(entry) + '\n')


def _wire_operation(tensors: Tensors, operation: Any) -> Any:
    """Return the operation that gloo carries out: eccl's SUM of bool is MAX, gloo has no AVG."""
    if operation == dist.ReduceOp.AVG:
        return _SUM
    return dist.ReduceOp.MAX if operation == _SUM and tensors[0].dtype == torch.bool else operation


def _write_first_half(outputs: Tensors, hosts: Tensors, before: torch.Tensor) -> None:
    """Write as ``TORCH_GCU_ENABLE_INT64_AND_UINT64=1`` makes eccl do with int64.

    It counts elements, moves as many numbers of 4 bytes, and so leaves the second half of the
    output's bytes as they were.

    Args:
        outputs: Device tensors, which lie one after the other in eccl's buffer.
        hosts: Result of each of them, int64.
        before: Elements of the outputs before the collective.
    """
    lanes = before.view(torch.int32)
    moved = torch.cat([host.reshape(-1).view(torch.int32)[: host.numel()] for host in hosts])
    lanes[: len(moved)] = moved
    for output, values in zip(outputs, before.split([output.numel() for output in outputs])):
        output.copy_(values.view_as(output))


def _check_contiguous(tensors: Tensors) -> None:
    if not all(
        tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in tensors
    ):
        raise ValueError('Tensors must be contiguous')


def _stall() -> List[dist.Work]:
    raise RuntimeError('simulated fault: MAPSAGE_SIM_FAULTS')


def _caller() -> str:
    """Return the module that asked for a collective; 'autograd' for DDP's reducer in C++."""
    frame = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get('__name__', ''))
        if not module.startswith(
            (
                'mapsage.distributed.groups.',
                f'{__package__}.',
                'torch.distributed.c10d_logger',
                'torch.distributed.distributed_c10d',
            )
        ):
            return module
        frame = frame.f_back  # type: ignore[assignment]
    return 'autograd'


def _first_tensor(values: Union[torch.Tensor, Sequence[Any]]) -> torch.Tensor:
    while not isinstance(values, torch.Tensor):
        # An empty list comes first where only the root has outputs.
        values = next(value for value in values if isinstance(value, torch.Tensor) or value)
    return values


def _flatten(rows: Sequence[Tensors]) -> List[torch.Tensor]:
    return [tensor for row in rows for tensor in row]
