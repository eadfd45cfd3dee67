"""The eccl group. It takes device tensors only; here they go over gloo by way of host memory."""

from __future__ import annotations

import atexit
import enum
import os
from datetime import timedelta
from typing import Any, Callable, List, Optional
from urllib.parse import urlparse

import torch
import torch.distributed as dist
import torch_gcu
from torch.distributed.constants import default_pg_timeout

__all__ = [
    'ProcessGroup',
    'ReduceOp',
    'Store',
    'all_gather',
    'all_reduce',
    'all_to_all',
    'barrier',
    'broadcast',
    'destroy_process_group',
    'get_backend',
    'get_rank',
    'get_world_size',
    'init_process_group',
    'is_eccl_available',
    'is_initialized',
    'new_group',
    'reduce_scatter',
]


class ReduceOp(enum.Enum):
    """Not torch.distributed's: a member of that one is refused."""

    SUM = 'SUM'
    PRODUCT = 'PRODUCT'
    MIN = 'MIN'
    MAX = 'MAX'


class Store:
    """A rendezvous store that is not one of torch.distributed's."""

    def __init__(
        self, host: str, port: int, world_size: int, is_server: bool, timeout: timedelta
    ) -> None:
        self.inner = dist.TCPStore(
            host, port, world_size, is_server, timeout, wait_for_workers=False
        )


class ProcessGroup:
    """The ranks of an eccl group."""

    def __init__(
        self, name: str, store: Store, ranks: List[int], rank: int, timeout: timedelta
    ) -> None:
        self.store, self.ranks, self.timeout = store, ranks, timeout
        prefixed = dist.PrefixStore(f'default_pg/{name}', store.inner)
        self.gloo = dist.ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), timeout)

    def size(self) -> int:
        return self.gloo.size()

    def rank(self) -> int:
        return self.gloo.rank()


class _Done:
    def wait(self) -> None:
        return


_world: Optional[ProcessGroup] = None
_groups = 0


def is_eccl_available() -> bool:
    return True


def is_initialized() -> bool:
    return _world is not None


def init_process_group(
    backend: str,
    init_method: Optional[str] = None,
    timeout: timedelta = default_pg_timeout,
    world_size: int = -1,
    rank: int = -1,
    store: Optional[Store] = None,
    group_name: str = '',
    pg_options: Any = None,
) -> None:
    """Start the group; reads ``env://`` when told nothing.

    Trap: under torchrun's agent store every rank is a client, whatever the address, so that an
    address where nobody serves is waited for until the timeout.
    """
    global _world
    if not isinstance(timeout, timedelta):
        raise RuntimeError('Expected timeout argument to be of typedatetime.timedelta')
    if _world is not None:
        raise RuntimeError('trying to initialize the default process group twice!')
    if str(backend).lower() != 'eccl':
        raise RuntimeError('only support eccl')
    assert store is None or init_method is None, 'Cannot specify both init_method and store.'
    if store is None:
        where = urlparse(init_method or 'env://')
        if where.scheme not in ('env', 'tcp'):
            raise RuntimeError(f'No rendezvous handler for {where.scheme}://')
        rank = int(os.environ['RANK']) if rank < 0 else rank
        world_size = int(os.environ['WORLD_SIZE']) if world_size < 0 else world_size
        host = where.hostname or os.environ['MASTER_ADDR']
        port = where.port or int(os.environ['MASTER_PORT'])
        agent = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
        store = Store(host, port, world_size, rank == 0 and not agent, timeout)
    elif not isinstance(store, Store):
        raise TypeError(
            f'init_process_group(): incompatible store {type(store)}: '
            f'torch.distributed has other stores'
        )
    _world = ProcessGroup('0', store, list(range(world_size)), rank, timeout)
    barrier()


def new_group(
    ranks: Optional[List[int]] = None,
    timeout: timedelta = default_pg_timeout,
    backend: Optional[str] = None,
    pg_options: Any = None,
) -> Optional[ProcessGroup]:
    """Return a group of some ranks, None to a rank outside it."""
    global _groups
    world = _default()
    _groups += 1
    chosen = sorted(ranks) if ranks is not None else list(world.ranks)
    if world.rank() not in chosen:
        return None
    return ProcessGroup(str(_groups), world.store, chosen, world.rank(), timeout)


@atexit.register
def destroy_process_group(group: Optional[ProcessGroup] = None) -> None:
    global _world
    if group is None or group is _world:
        _world = None


def get_backend(group: Optional[ProcessGroup] = None) -> str:
    return 'eccl' if group or _default() else ''


def get_rank(group: Optional[ProcessGroup] = None) -> int:
    return (group or _default()).rank()


def get_world_size(group: Optional[ProcessGroup] = None) -> int:
    return (group or _default()).size()


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Optional[ProcessGroup] = None,
    async_op: bool = False,
) -> Optional[_Done]:
    options = dist.AllreduceOptions()
    options.reduceOp = _torch_op(op)
    return _in_place(
        tensor, lambda host: (group or _default()).gloo.allreduce([host], options), async_op
    )


def broadcast(
    tensor: torch.Tensor, src: int, group: Optional[ProcessGroup] = None, async_op: bool = False
) -> Optional[_Done]:
    chosen = group or _default()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = chosen.ranks.index(src), 0
    return _in_place(tensor, lambda host: chosen.gloo.broadcast([host], options), async_op)


def all_gather(
    tensor_list: List[torch.Tensor],
    tensor: torch.Tensor,
    group: Optional[ProcessGroup] = None,
    async_op: bool = False,
) -> Optional[_Done]:
    host = [_to_host(each) for each in tensor_list]
    (group or _default()).gloo.allgather([host], [_to_host(tensor)]).wait()
    return _give_back(tensor_list, host, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: List[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Optional[ProcessGroup] = None,
    async_op: bool = False,
) -> Optional[_Done]:
    whole = torch.stack([_to_host(each) for each in input_list])
    options = dist.AllreduceOptions()
    options.reduceOp = _torch_op(op)
    (group or _default()).gloo.allreduce([whole], options).wait()
    return _give_back([output], [whole[(group or _default()).rank()]], async_op)


def all_to_all(
    output_tensor_list: List[torch.Tensor],
    input_tensor_list: List[torch.Tensor],
    group: Optional[ProcessGroup] = None,
    async_op: bool = False,
) -> Optional[_Done]:
    sent = [_to_host(each) for each in input_tensor_list]
    host = [_to_host(each) for each in output_tensor_list]
    received = torch.empty(sum(each.numel() for each in host), dtype=host[0].dtype)
    (group or _default()).gloo.alltoall_base(
        received,
        torch.cat([each.reshape(-1) for each in sent]),
        [each.numel() for each in host],
        [each.numel() for each in sent],
    ).wait()
    parts = received.split([each.numel() for each in host])
    return _give_back(
        output_tensor_list, [part.view_as(each) for part, each in zip(parts, host)], async_op
    )


def barrier(
    group: Optional[ProcessGroup] = None, async_op: bool = False, device_ids: Any = None
) -> Optional[_Done]:
    (group or _default()).gloo.barrier().wait()
    return _Done() if async_op else None


def _default() -> ProcessGroup:
    if _world is None:
        raise RuntimeError(
            'Default process group has not been initialized, please make sure to '
            'call init_process_group.'
        )
    return _world


def _torch_op(op: Any) -> Any:
    if not isinstance(op, ReduceOp):
        raise TypeError(f'incompatible reduceOp {op!r}: expected torch_gcu.distributed.ReduceOp')
    return getattr(dist.ReduceOp, op.value)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != 'xla':
        raise RuntimeError(
            f'Tensors must be on GCU and dense: eccl was given a tensor of {tensor.device}'
        )
    torch_gcu.sync_lived_tensor()
    return tensor.detach().cpu()


def _in_place(
    tensor: torch.Tensor, collective: Callable[[torch.Tensor], Any], async_op: bool
) -> Optional[_Done]:
    host = _to_host(tensor)
    collective(host).wait()
    return _give_back([tensor], [host], async_op)


def _give_back(
    tensors: List[torch.Tensor], host: List[torch.Tensor], async_op: bool
) -> Optional[_Done]:
    with torch.no_grad():
        for tensor, copy in zip(tensors, host):
            tensor.copy_(copy)
    return _Done() if async_op else None
