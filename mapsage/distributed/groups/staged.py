"""A process group that sends accelerator tensors through host memory over gloo.

It is for devices without a backend of their own. A gloo group that is given an XLA tensor returns
without an error and without reducing it, so on such devices *every* collective of the default group
goes through :class:`StagedProcessGroup`: CPU tensors go directly to gloo, the others are copied.
"""
from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence, Union

import torch
import torch.distributed as dist

from mapsage.accelerator import AcceleratorError, current_accelerator
from mapsage.distributed.store import LockedStore, silent_ranks
from mapsage.errors import UserError

BACKEND = 'staged'

Tensors = Union[torch.Tensor, List[torch.Tensor]]

# How long ranks whose collective failed wait to learn for which others it failed, in seconds.
_ROLL_CALL_SECONDS = 3

# In torch 1.10, Python cannot subclass ProcessGroup, and a device has no backend of its own.
SUPPORTED = 'devices' in dist.Backend.register_backend.__code__.co_varnames
_Base: Any = dist.ProcessGroup if SUPPORTED else object


class CollectiveError(UserError, RuntimeError):
    """A collective did not complete, since a rank did not come or has ended.

    Attributes:
        ranks: Ranks of the group that did not come; empty when they are not known.
    """

    final = False

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class StagedProcessGroup(_Base):
    """Gloo with a copy to host memory before and back after each collective.

    Every collective of accelerator tensors is complete when the call returns; those of CPU tensors
    keep gloo's own asynchronous work. Before a copy the accelerator is flushed, so that a lazy
    device runs its graph once and not for every tensor. A collective of accelerator tensors that
    does not complete raises :class:`CollectiveError`, which names the ranks that did not come.

    Args:
        store: Rendezvous store of this group.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        timeout: Time that a collective may wait for the other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._store, self._timeout = LockedStore(store), timeout
        self._collectives = 0

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group that takes tensors of ``device``.

        batch_isend_irecv of torch 2.14 asks any group for it, and the base class has none.
        """
        return self._gloo if device.type == 'cpu' else self

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of ``dtype`` are sent."""
        return dtype

    def before_collective(self, number: int) -> None:
        """Hook for subclasses, before this rank's ``number``-th device collective, from 1."""

    def allreduce(self, tensors: Tensors, opts: Optional[Any] = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Optional[Any] = None) -> Any:
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
        works = [self._in_place([tensor], lambda host: self._gloo.allreduce(host, plain))
                 for tensor in _as_list(tensors)]
        for work in works:
            work.wait()
        return _done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda host: self._gloo.reduce(host, opts))

    def allgather(self, outputs: List[List[torch.Tensor]], inputs: Tensors,
                  opts: Optional[Any] = None) -> Any:
        return self._out_of_place(outputs, inputs, self._gloo.allgather)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor,
                        opts: Optional[Any] = None) -> Any:
        # Only the number of elements is agreed on: SyncBatchNorm gathers into a tensor of one row.
        parts = [part.view_as(tensor) for part in output.view(-1).chunk(self.size())]
        return self._out_of_place([parts], [tensor], self._gloo.allgather)

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def gather(self, outputs: List[List[torch.Tensor]], inputs: Tensors, opts: Any) -> Any:
        return self._out_of_place(outputs, inputs, lambda o, i: self._gloo.gather(o, i, opts))

    def scatter(self, outputs: Tensors, inputs: List[List[torch.Tensor]], opts: Any) -> Any:
        return self._out_of_place(outputs, inputs, lambda o, i: self._gloo.scatter(o, i, opts))

    def reduce_scatter(self, outputs: Tensors, inputs: List[List[torch.Tensor]],
                       opts: Any) -> Any:
        # Not every gloo has reduce_scatter; an all-reduce gives the same numbers.
        for output, parts in zip(_as_list(outputs), inputs):
            whole = torch.stack([part.detach().reshape(-1) for part in parts])
            plain = dist.AllreduceOptions()
            plain.reduceOp = opts.reduceOp
            self.allreduce([whole], plain).wait()
            output.copy_(whole[self.rank()].view_as(output))
        return _done(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self.reduce_scatter([output], [list(tensor.reshape(-1).chunk(self.size()))],
                                   opts)

    reduce_scatter_single = _reduce_scatter_base  # its name from torch 2.13 on

    def alltoall_base(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: List[int],
                      input_sizes: List[int], opts: Optional[Any] = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        return self._out_of_place(
            [output], [tensor],
            lambda o, i: self._gloo.alltoall_base(o[0], i[0], output_sizes, input_sizes, opts))

    def alltoall(self, outputs: List[torch.Tensor], inputs: List[torch.Tensor],
                 opts: Optional[Any] = None) -> Any:
        sizes_out = [t.numel() for t in outputs]
        sizes_in = [t.numel() for t in inputs]
        received = torch.empty(sum(sizes_out), dtype=self.wire_dtype(outputs[0].dtype))
        sent = torch.cat([t.detach().reshape(-1) for t in self._to_host(inputs)])
        self.alltoall_base(received, sent, sizes_out, sizes_in).wait()
        for output, part in zip(outputs, received.split(sizes_out)):
            output.copy_(part.view(output.shape))
        return _done(outputs)

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> Any:
        return self._gloo.send(_on_cpu(tensors), destination, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        return self._gloo.recv(_on_cpu(tensors), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._gloo.recv_anysource(_on_cpu(tensors), tag)

    def barrier(self, opts: Optional[Any] = None) -> Any:
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        if any(not tensor.is_cpu for tensor in tensors):
            current_accelerator().flush()
        return [tensor if tensor.is_cpu else tensor.detach().cpu().to(self.wire_dtype(tensor.dtype))
                for tensor in tensors]

    def _complete(self, start: Callable[[], Any]) -> None:
        self._collectives += 1
        self.before_collective(self._collectives)
        try:
            start().wait()
        except RuntimeError as error:
            raise self._roll_call(error) from error

    def _roll_call(self, error: RuntimeError) -> CollectiveError:
        """Return an error that names the missing ranks: those that do not report a failure too."""
        number = self._collectives
        missing: List[int] = []
        try:
            missing = silent_ranks(self._store, f'broken/{number}', self.rank(), self.size(),
                                   _ROLL_CALL_SECONDS)
            who = f'rank(s) {missing} did not come to it' if missing else 'every rank came to it'
        except RuntimeError as lost:  # the process that keeps the store has ended
            who = f'and which rank is missing cannot be asked ({lost})'
        return CollectiveError(
            f'collective {number} of accelerator tensors did not complete within '
            f'{self._timeout.total_seconds():g} s on rank {self.rank()}: {who}. {error}', missing)

    def _in_place(self, tensors: Any, collective: Callable[[List[torch.Tensor]], Any]) -> Any:
        tensors = _as_list(tensors)
        host = self._to_host(tensors)
        if all(tensor.is_cpu for tensor in tensors):
            return collective(host)
        self._complete(lambda: collective(host))
        _copy_back(tensors, host)
        return _done(tensors)

    def _out_of_place(self, outputs: Any, inputs: Any,
                      collective: Callable[[Any, Any], Any]) -> Any:
        outputs, inputs = _as_list(outputs), _as_list(inputs)
        if all(tensor.is_cpu for tensor in _flat(outputs) + _flat(inputs)):
            return collective(outputs, inputs)
        # empty_like of an XLA tensor has no memory that gloo can write to
        host_outputs = _map(
            outputs, lambda t: torch.empty(t.shape, dtype=self.wire_dtype(t.dtype)))
        host_flat = iter(self._to_host(_flat(inputs)))
        host_inputs = _map(inputs, lambda _: next(host_flat))
        self._complete(lambda: collective(host_outputs, host_inputs))
        _copy_back(_flat(outputs), _flat(host_outputs))
        return _done(outputs)


def register_staged_backend(device_type: str, name: str = BACKEND,
                            kind: Callable[..., StagedProcessGroup] = StagedProcessGroup) -> None:
    """Register ``kind`` with torch.distributed as the backend ``name`` of one device type.

    Raises:
        AcceleratorError: If this torch cannot have a process group written in Python.
    """
    if not SUPPORTED:
        raise AcceleratorError(
            f'torch {torch.__version__} cannot stage collectives of {device_type!r} tensors '
            f"through host memory: it needs torch>=2.0, or the vendor's own backend.")
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, kind, devices=[device_type])


def _as_list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _on_cpu(tensors: Tensors) -> List[torch.Tensor]:
    # A blocking receive would deadlock where the peer posts its receive before its send.
    listed = _as_list(tensors)
    if any(not tensor.is_cpu for tensor in listed):
        raise AcceleratorError(
            f'send and recv of {listed[0].device.type} tensors are not staged: send `tensor.cpu()` '
            f'and receive into a CPU tensor.')
    return listed


def _flat(tensors: Any) -> List[torch.Tensor]:
    return [t for item in tensors for t in (item if isinstance(item, (list, tuple)) else [item])]


def _map(tensors: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return [[convert(t) for t in item] if isinstance(item, (list, tuple)) else convert(item)
            for item in tensors]


def _copy_back(tensors: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, copy in zip(tensors, host):
            if not tensor.is_cpu:
                tensor.copy_(copy)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)
