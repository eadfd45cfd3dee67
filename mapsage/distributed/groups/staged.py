"""A process group that sends accelerator tensors through host memory over gloo.

Some devices have no communication library. If a gloo group gets an XLA tensor, it returns without
an error and without reducing the tensor. So on such devices *every* collective of the default group
goes through :class:`StagedProcessGroup`, which copies device tensors and passes CPU tensors on.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, Collection, List, Optional, Sequence, TypeVar, Union, cast

import torch
import torch.distributed as dist

from mapsage.accelerator import AcceleratorError, current_accelerator
from mapsage.base.errors import UserError
from mapsage.distributed.lost_ranks import Finding, Record, Report
from mapsage.distributed.store import LockedStore

BACKEND = 'staged'

Tensors = Union[torch.Tensor, List[torch.Tensor]]

# How an all-gather or a scatter nests its tensors: one tensor, or a list of tensors, per entry.
_Item = TypeVar('_Item')
_Nested = Sequence[Union[torch.Tensor, Sequence[torch.Tensor]]]

# In torch 1.10, Python cannot subclass ProcessGroup, and a group has one backend for all devices.
SUPPORTED = 'devices' in dist.Backend.register_backend.__code__.co_varnames
_Base: Any = dist.ProcessGroup if SUPPORTED else object


class CollectiveError(UserError, RuntimeError):
    """A collective did not complete, because a rank did not enter it or has ended.

    Attributes:
        ranks: Ranks of the group that did not come; empty when they are not known.
    """

    final = False

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class StagedProcessGroup(_Base):
    """Gloo with a copy to host memory before each collective, and a copy back after it.

    A collective of accelerator tensors is complete when the call returns. A collective of CPU
    tensors returns gloo's asynchronous work. Before a copy the accelerator is flushed, so that a
    lazy device runs its graph once, not once per tensor. A collective of accelerator tensors that
    does not complete raises :class:`CollectiveError`, which names the missing ranks.

    The methods have the names and arguments of torch's ``ProcessGroup``.

    Args:
        store: Rendezvous store of this group.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        timeout: Time that a collective may wait for the other ranks.

    Attributes:
        collective_timeout: The argument ``timeout``.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Any, because torch's type hints of this class differ between versions.
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._store, self.collective_timeout = LockedStore(store), timeout
        self._collectives = 0

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> object:
        """Return the group that takes tensors of ``device``.

        ``batch_isend_irecv`` of torch 2.14 calls this method, which the base class lacks.
        """
        return self._gloo if device.type == 'cpu' else self

    def allreduce(self, tensors: Tensors, opts: Optional[object] = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts))

    def allreduce_coalesced(
        self, tensors: Tensors, opts: Optional[dist.AllreduceOptions] = None
    ) -> dist.Work:
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
        works = [
            self._in_place([tensor], lambda host: self._gloo.allreduce(host, plain))
            for tensor in _as_list(tensors)
        ]
        for work in works:
            work.wait()
        return _done(tensors)

    def broadcast(self, tensors: Tensors, opts: object) -> dist.Work:
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

    def reduce(self, tensors: Tensors, opts: object) -> dist.Work:
        return self._in_place(tensors, lambda host: self._gloo.reduce(host, opts))

    def allgather(
        self, outputs: List[List[torch.Tensor]], inputs: Tensors, opts: Optional[object] = None
    ) -> dist.Work:
        return self._out_of_place(outputs, inputs, self._gloo.allgather)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Optional[object] = None
    ) -> dist.Work:
        # Shapes may differ, only the number of elements fits: SyncBatchNorm gathers into one row.
        chunks = [chunk.view_as(tensor) for chunk in output.view(-1).chunk(self.size())]
        return self._out_of_place([chunks], [tensor], self._gloo.allgather)

    # Name of the method in torch 2.13 and later.
    all_gather_single = _allgather_base

    def gather(self, outputs: List[List[torch.Tensor]], inputs: Tensors, opts: object) -> dist.Work:
        return self._out_of_place(outputs, inputs, lambda o, i: self._gloo.gather(o, i, opts))

    def scatter(
        self, outputs: Tensors, inputs: List[List[torch.Tensor]], opts: object
    ) -> dist.Work:
        return self._out_of_place(outputs, inputs, lambda o, i: self._gloo.scatter(o, i, opts))

    def reduce_scatter(
        self, outputs: Tensors, inputs: List[List[torch.Tensor]], opts: dist.ReduceScatterOptions
    ) -> dist.Work:
        # Some versions of gloo lack reduce_scatter; an all-reduce gives the same numbers.
        for output, chunks in zip(_as_list(outputs), inputs):
            whole = torch.stack([chunk.detach().reshape(-1) for chunk in chunks])
            plain = dist.AllreduceOptions()
            plain.reduceOp = opts.reduceOp
            self.allreduce([whole], plain).wait()
            output.copy_(whole[self.rank()].view_as(output))
        return _done(outputs)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: dist.ReduceScatterOptions
    ) -> dist.Work:
        return self.reduce_scatter([output], [list(tensor.reshape(-1).chunk(self.size()))], opts)

    # Name of the method in torch 2.13 and later.
    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: List[int],
        input_sizes: List[int],
        opts: Optional[object] = None,
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._out_of_place(
            [output],
            [tensor],
            lambda o, i: self._gloo.alltoall_base(o[0], i[0], output_sizes, input_sizes, opts),
        )

    def alltoall(
        self, outputs: List[torch.Tensor], inputs: List[torch.Tensor], opts: Optional[object] = None
    ) -> dist.Work:
        sizes_out = [t.numel() for t in outputs]
        sizes_in = [t.numel() for t in inputs]
        received = torch.empty(sum(sizes_out), dtype=outputs[0].dtype)
        sent = torch.cat([t.detach().reshape(-1) for t in self._to_host(inputs)])
        self.alltoall_base(received, sent, sizes_out, sizes_in).wait()
        for output, chunk in zip(outputs, received.split(sizes_out)):
            output.copy_(chunk.view(output.shape))
        return _done(outputs)

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        return self._gloo.send(_on_cpu(tensors), destination, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._gloo.recv(_on_cpu(tensors), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._gloo.recv_anysource(_on_cpu(tensors), tag)

    def barrier(self, opts: Optional[object] = None) -> dist.Work:
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        if any(not tensor.is_cpu for tensor in tensors):
            current_accelerator().flush()
        return [tensor if tensor.is_cpu else tensor.detach().cpu() for tensor in tensors]

    def _complete(self, start: Callable[[], Any]) -> None:
        """Start a collective of host copies and wait for it; CollectiveError if it fails."""
        self._collectives += 1
        try:
            start().wait()
        except RuntimeError as error:
            raise self._roll_call(error) from error

    def _roll_call(self, error: RuntimeError) -> CollectiveError:
        """Return an error that names the missing ranks, which do not report this failure."""
        number, ranks = self._collectives, range(self.size())
        record = Record(self._store, f'broken/{number}', self.rank(), ranks)
        missing: List[int] = []

        def find_silent(reports: Collection[int]) -> Finding:
            return Finding([rank for rank in ranks if rank not in reports], {})

        try:
            record.file(Report())
            missing = (record.settle(find_silent) or find_silent(record.reports())).ranks
            culprits = (
                f'rank(s) {missing} did not come to it' if missing else 'every rank came to it'
            )
        # The process that keeps the store has ended.
        except RuntimeError as lost:
            culprits = f'the missing ranks are unknown, since the store does not answer ({lost})'
        return CollectiveError(
            f'collective {number} of accelerator tensors did not complete within '
            f'{self.collective_timeout.total_seconds():g} s on rank {self.rank()}: {culprits}. '
            f'{error}',
            missing,
        )

    def _in_place(
        self, in_and_out: Tensors, collective: Callable[[List[torch.Tensor]], Any]
    ) -> dist.Work:
        """Run a collective that changes its tensors, such as an all-reduce."""
        tensors = _as_list(in_and_out)
        host = self._to_host(tensors)
        if all(tensor.is_cpu for tensor in tensors):
            return collective(host)
        self._complete(lambda: collective(host))
        _copy_back(tensors, host)
        return _done(tensors)

    def _out_of_place(
        self,
        outputs: Union[torch.Tensor, _Nested],
        inputs: Union[torch.Tensor, _Nested],
        collective: Callable[[Any, Any], dist.Work],
    ) -> dist.Work:
        """Run a collective that reads some tensors and writes others, such as an all-gather."""
        targets, sources = _as_list(outputs), _as_list(inputs)
        if all(tensor.is_cpu for tensor in _flatten(targets) + _flatten(sources)):
            return collective(targets, sources)
        # Not empty_like(), which makes an XLA tensor without memory that gloo could write to.
        host_outputs = _map(targets, lambda t: torch.empty(t.shape, dtype=t.dtype))
        host_flat = iter(self._to_host(_flatten(sources)))
        host_inputs = _map(sources, lambda _: next(host_flat))
        self._complete(lambda: collective(host_outputs, host_inputs))
        _copy_back(_flatten(targets), _flatten(host_outputs))
        return _done(targets)


def register_staged_backend(
    device_type: str,
    name: str = BACKEND,
    kind: Callable[..., dist.ProcessGroup] = StagedProcessGroup,
) -> None:
    """Register ``kind`` with torch.distributed as the backend ``name`` of one device type.

    Raises:
        AcceleratorError: If this version of torch has no process groups written in Python.
    """
    if not SUPPORTED:
        raise AcceleratorError(
            f'torch {torch.__version__} cannot stage collectives of {device_type!r} tensors '
            f"through host memory: it needs torch>=2.0, or the vendor's own backend."
        )
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, kind, devices=[device_type])


def _as_list(tensors: Union[torch.Tensor, Sequence[_Item]]) -> Sequence[_Item]:
    """Return a list as it is, and a single tensor in a list."""
    return [cast(_Item, tensors)] if isinstance(tensors, torch.Tensor) else tensors


def _on_cpu(tensors: Tensors) -> List[torch.Tensor]:
    """Return the tensors in a list; AcceleratorError if one of them is not in host memory.

    A staged receive would have to block. It would deadlock with a peer that also receives before it
    sends.
    """
    listed = list(_as_list(tensors))
    if any(not tensor.is_cpu for tensor in listed):
        raise AcceleratorError(
            f'send and recv of {listed[0].device.type} tensors are not staged: send `tensor.cpu()` '
            f'and receive into a CPU tensor.'
        )
    return listed


def _flatten(tensors: _Nested) -> List[torch.Tensor]:
    return [t for item in tensors for t in ([item] if isinstance(item, torch.Tensor) else item)]


def _map(tensors: _Nested, convert: Callable[[torch.Tensor], torch.Tensor]) -> _Nested:
    return [
        convert(item) if isinstance(item, torch.Tensor) else [convert(t) for t in item]
        for item in tensors
    ]


def _copy_back(tensors: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, copy in zip(tensors, host):
            if not tensor.is_cpu:
                tensor.copy_(copy)


def _done(result: object) -> dist.Work:
    """Return work that is complete and has this result."""
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)
