"""Data parallelism with one virtual rank per process: MMEngine's DDP for every accelerator.

DDP needs the model on the device first, equal weights on all ranks, and, for bit-identical results
on any number of processes, a fixed order of additions; the wrappers here see to all three. A
process that carries out several virtual ranks uses `virtual_parallel.py` instead; the order of the
additions is in ``mapsage/distributed/ordered_sum.py``.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapsage.accelerator import Accelerator, current_accelerator
from mapsage.distributed import (
    OrderedSum,
    WeightsDifferError,
    broadcast_tensors,
    check_equal_weights,
    local_rank,
    resolve_reduction,
)
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.ordered_sum import Steps, carries
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

from .batch_counts import BatchCounts
from .placement import named_tensors, place_module
from .rank_batches import Batch

# Large enough for a single bucket. On a lazy device every bucket ends a graph, and dividing the
# backward pass into more graphs costs more time than the overlap saves.
_LAZY_BUCKET_MIB = 4096
# torch 2.13 renamed broadcast_buffers of DDP, which MMEngine's configs use.
_HAS_FORWARD_SYNC = 'forward_sync_buffers' in inspect.signature(DistributedDataParallel).parameters
_Device = Union[int, str, torch.device]


@MODEL_WRAPPERS.register_module()
class NativeDataParallel(nn.Module):
    """The DDP of an accelerator's vendor with the interface of ``MMDistributedDataParallel``.

    For accelerators whose collectives are not part of torch.distributed: there, the constructor of
    :class:`MMDistributedDataParallel` returns this class, which has the same arguments, checks and
    errors. The parameters and buffers of rank 0 reach the other ranks over gloo.

    Args:
        module, device_ids, output_device, detect_anomalous_params, reduction: As in
            :class:`MMDistributedDataParallel`.

    Raises:
        ValueError: If ``reduction`` is ``'ordered'``, which a vendor's DDP cannot do.
    """

    val_step = _MMDistributedDataParallel.val_step
    test_step = _MMDistributedDataParallel.test_step
    _run_forward = _MMDistributedDataParallel._run_forward

    def __init__(
        self,
        module: nn.Module,
        device_ids: Optional[Sequence[_Device]] = None,
        output_device: Optional[_Device] = None,
        detect_anomalous_params: bool = False,
        reduction: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.detect_anomalous_params = detect_anomalous_params
        accelerator = current_accelerator()
        if resolve_reduction(reduction, accelerator) == 'ordered':
            raise ValueError(
                f"reduction='ordered' with the DDP of the vendor of {accelerator.name}, which adds "
                f"gradients in its own order: expected 'native' or None. MapSageRunner takes "
                f"VirtualDataParallel where env_cfg.reduction='ordered' is set."
            )
        this_rank = local_rank()
        _warn_ignored(accelerator, this_rank, device_ids=device_ids, output_device=output_device)
        module = place_module(module, accelerator, this_rank)
        start = _weights_of_rank_0(module)
        self.data_parallel = accelerator.data_parallel(module, this_rank, **kwargs)
        # After the vendor's constructor, which may have broadcast the weights of another rank.
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                tensor.copy_(start[name])
        accelerator.flush()
        check_equal_weights(module, 'after wrapping')
        world_size = dist.get_world_size()
        self.counts = BatchCounts(module, VirtualRanks(world_size, world_size))

    def train_step(self, data: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Train like MMEngine's wrapper, and give losses their sums over the global batch."""
        with self.counts.step([data]):
            return _MMDistributedDataParallel.train_step(self, data, optim_wrapper)

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self.data_parallel.module  # type: ignore[return-value]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the model; its backward pass averages the gradients over the ranks."""
        return self.data_parallel(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        """Return a context in which backward passes do not average gradients over the ranks."""
        return self.data_parallel.no_sync()  # type: ignore[operator]


@MODEL_WRAPPERS.register_module(name='MMDistributedDataParallel', force=True)
class MMDistributedDataParallel(_MMDistributedDataParallel):
    """MMEngine's wrapper for any accelerator, registered under MMEngine's name.

    It moves the module to the device of this rank, checks that every parameter and buffer arrived,
    replaces SyncBN where the accelerator has none, gives torch's DDP no list of devices (each rank
    has one device, which the tensors show), and checks that all ranks start with equal weights.

    Args:
        module: Model, on any device.
        device_ids: Ignored, with a warning if it names anything but this rank's device; accepted
            because configs and MMEngine pass it.
        output_device: Ignored in the same way.
        detect_anomalous_params: Whether to report parameters that get no gradient, as in MMEngine.
        reduction: Order in which gradients are added up: ``'ordered'`` or ``'native'``. None
            follows the backend, see :func:`mapsage.distributed.resolve_reduction`.
        **kwargs: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        PlacementError: If a parameter or buffer did not reach the device.
        WeightsDifferError: If the weights of the ranks differ after wrapping.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a :class:`NativeDataParallel` if the accelerator has its own DDP."""
        if cls is MMDistributedDataParallel and uses_native_group(current_accelerator()):
            return NativeDataParallel(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        module: nn.Module,
        device_ids: Optional[Sequence[_Device]] = None,
        output_device: Optional[_Device] = None,
        detect_anomalous_params: bool = False,
        reduction: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        accelerator = current_accelerator()
        this_rank = local_rank()
        _warn_ignored(accelerator, this_rank, device_ids=device_ids, output_device=output_device)
        module = place_module(module, accelerator, this_rank)
        if accelerator.lazy:
            kwargs.setdefault('bucket_cap_mb', _LAZY_BUCKET_MIB)
        if 'broadcast_buffers' in kwargs and _HAS_FORWARD_SYNC:
            kwargs['forward_sync_buffers'] = kwargs.pop('broadcast_buffers')
        super().__init__(module, detect_anomalous_params=detect_anomalous_params, **kwargs)
        self.reduction = resolve_reduction(reduction, accelerator, self.process_group)
        if self.reduction == 'ordered':
            self._add_in_order()
        check_equal_weights(self.module, 'after wrapping', self.process_group)
        world_size = dist.get_world_size(self.process_group)
        self.counts = BatchCounts(
            self.module, VirtualRanks(world_size, world_size), self.process_group
        )

    def train_step(self, data: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Train like MMEngine's wrapper, and give losses their sums over the global batch."""
        with self.counts.step([data]):
            return super().train_step(data, optim_wrapper)

    def _add_in_order(self) -> None:
        """Add gradients along the tree over the ranks, so that buckets do not change the bits."""
        group = self.process_group
        world_size = dist.get_world_size(group)
        ordered_sum = OrderedSum(VirtualRanks(world_size, world_size), dist.get_rank(group), group)
        means = _BucketMeans(ordered_sum, group)
        # A lambda, because DDP refuses hooks with annotations that are text, and
        # `from __future__ import annotations` makes all annotations of this file text.
        self.register_comm_hook(None, lambda _, bucket: means.begin(bucket))


class _BucketMeans:
    """Means of DDP's gradient buckets over the ranks, computed during the backward pass.

    No thread is needed: whenever DDP hands over a full bucket, the means of the earlier buckets
    advance by one step.

    Args:
        ordered_sum: Sum over the ranks.
        group: Process group of the ranks; all ranks when None.
    """

    def __init__(self, ordered_sum: OrderedSum, group: Optional[dist.ProcessGroup]) -> None:
        self._ordered_sum, self._group = ordered_sum, group
        # In the order of the buckets.
        self._pending: List[Tuple[Steps, torch.futures.Future]] = []

    def begin(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Return the future mean of a bucket, in the bucket's memory. Collective."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise VirtualRanksError(
                "a gradient is sparse, and reduction='ordered' adds up only dense ones: set "
                "env_cfg.reduction='native', or sparse=False in the embedding."
            )
        if bucket.index() == 0:
            # A failed backward pass may have left means behind.
            self._pending = []
        # A future with a device makes every stream that waits for it wait for the work on the
        # current stream. A sum through host memory is complete when the future is set, and XLA has
        # no events to wait for.
        on_device = carries(buffer.device, self._group)
        future: torch.futures.Future = torch.futures.Future(
            devices=[buffer.device] if on_device else None
        )
        self._pending.append((self._ordered_sum.mean_in_steps([buffer], out=buffer), future))
        self._advance()
        while bucket.is_last() and self._pending:
            self._advance()
        return future

    def _advance(self) -> None:
        pending, self._pending = self._pending, []
        for steps, future in pending:
            try:
                next(steps)
                self._pending.append((steps, future))
            except StopIteration as end:
                future.set_result(end.value)


def _weights_of_rank_0(module: nn.Module) -> Dict[str, torch.Tensor]:
    """Return rank 0's parameters and buffers in host memory, on every rank. Collective."""
    weights = {
        name: tensor.detach().to('cpu', copy=True).contiguous()
        for name, tensor in named_tensors(module).items()
    }
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()]
    layouts: List[List[Tuple[str, Tuple[int, ...], str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(layouts, layout)
    differing = [rank for rank, rank_layout in enumerate(layouts) if rank_layout != layouts[0]]
    if differing:
        names = sorted({name for name, _, _ in set(layouts[0]) ^ set(layouts[differing[0]])})
        raise WeightsDifferError(
            f'rank(s) {differing} built another model than rank 0: {names[:3]} differ in name, '
            f'shape or dtype. Every rank must build the model from the same config and files.'
        )
    broadcast_tensors(weights.values())
    return weights


def _warn_ignored(accelerator: Accelerator, local_rank: int, **options: object) -> None:
    """Warn of options that name another device than the one this rank trains on."""
    device = accelerator.device(local_rank)
    for option, value in options.items():
        devices: List[object] = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or devices in ([], [local_rank], [device], [str(device)]):
            continue
        print_log(
            f'MMDistributedDataParallel ignores {option}={value!r}: this rank (local rank '
            f'{local_rank}) trains on {device}. Remove it from model_wrapper_cfg.',
            logger='current',
            level=30,
        )
