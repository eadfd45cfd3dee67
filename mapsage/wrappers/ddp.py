"""Data parallelism that moves the model to the device before it is wrapped."""
from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.model import revert_sync_batchnorm
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
from mapsage.distributed.ordered_sum import carries
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.errors import UserError

from .batch_counts import BatchCounts

# Large enough for a single bucket. On a lazy device every bucket ends a graph, and dividing the
# backward pass into more graphs costs more time than the overlap saves.
_LAZY_BUCKET_MIB = 4096
# torch 2.13 renamed broadcast_buffers of DDP, which MMEngine's configs use.
_HAS_FORWARD_SYNC = 'forward_sync_buffers' in inspect.signature(DistributedDataParallel).parameters


class PlacementError(UserError, RuntimeError):
    """A parameter or buffer is not on the device of its rank."""


@MODEL_WRAPPERS.register_module()
class NativeDataParallel(nn.Module):
    """The DDP of an accelerator's vendor with the interface of ``MMDistributedDataParallel``.

    It serves accelerators whose collectives are not part of torch.distributed. Arguments, checks
    and errors are those of :class:`MMDistributedDataParallel`, whose constructor returns this class
    there. The parameters and buffers of rank 0 reach the other ranks over gloo.

    Raises:
        ValueError: If ``reduction`` is ``'ordered'``, which a vendor's DDP cannot do.
    """

    val_step = _MMDistributedDataParallel.val_step
    test_step = _MMDistributedDataParallel.test_step
    _run_forward = _MMDistributedDataParallel._run_forward

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None,
                 detect_anomalous_params: bool = False, reduction: Optional[str] = None,
                 **kwargs: Any) -> None:
        super().__init__()
        self.detect_anomalous_params = detect_anomalous_params
        accelerator = current_accelerator()
        if resolve_reduction(reduction, accelerator) == 'ordered':
            raise ValueError(
                f"reduction='ordered' with the DDP of the vendor of {accelerator.name}, which adds "
                f"gradients in an order of its own: expected 'native' or None. MapSageRunner takes "
                f"VirtualDataParallel where env_cfg.reduction='ordered' is set.")
        this_rank = local_rank()
        _warn_ignored(accelerator, this_rank, device_ids=device_ids, output_device=output_device)
        module = place_module(module, accelerator, this_rank)
        start = _weights_of_rank_0(module)
        self.data_parallel = accelerator.data_parallel(module, this_rank, **kwargs)
        # After the vendor's constructor, which may have broadcast the weights of another rank.
        with torch.no_grad():
            for name, tensor in _named_tensors(module).items():
                tensor.copy_(start[name])
        accelerator.flush()
        check_equal_weights(module, 'after wrapping')
        self.counts = BatchCounts(module, VirtualRanks(*[dist.get_world_size()] * 2))

    def train_step(self, data: Any, optim_wrapper: Any) -> Dict[str, torch.Tensor]:
        """Train as MMEngine's wrapper; modules that ask get counts of the global batch first."""
        with self.counts.step([data]):
            return _MMDistributedDataParallel.train_step(self, data, optim_wrapper)

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self.data_parallel.module  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
        reduction: Way to add up gradients, ``'ordered'`` or ``'native'``; None for that of the
            backend, see :func:`mapsage.distributed.resolve_reduction`.
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

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None,
                 detect_anomalous_params: bool = False, reduction: Optional[str] = None,
                 **kwargs: Any) -> None:
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
        world = dist.get_world_size(self.process_group)
        self.counts = BatchCounts(self.module, VirtualRanks(world, world), self.process_group)

    def train_step(self, data: Any, optim_wrapper: Any) -> Dict[str, torch.Tensor]:
        """Train as MMEngine's wrapper; modules that ask get counts of the global batch first."""
        with self.counts.step([data]):
            return super().train_step(data, optim_wrapper)

    def _add_in_order(self) -> None:
        """Have gradients added along the tree over the ranks, whatever bucket they are in."""
        group, world = self.process_group, dist.get_world_size(self.process_group)
        means = _BucketMeans(OrderedSum(VirtualRanks(world, world), dist.get_rank(group), group),
                             group)
        # A lambda, because DDP refuses annotations that are text, as all of this file are.
        self.register_comm_hook(None, lambda _, bucket: means.begin(bucket))


class _BucketMeans:
    """The means of DDP's buckets, which are under way while the backward pass goes on.

    No thread is needed: whenever a bucket is full, those before it go one step further.

    Args:
        ordered: Sum over the ranks.
        group: Process group of the ranks; that of all ranks when None.
    """

    def __init__(self, ordered: OrderedSum, group: Any) -> None:
        self._ordered, self._group = ordered, group
        self._under_way: List[Tuple[Any, Any]] = []  # (steps, future), in the order of the buckets

    def begin(self, bucket: Any) -> Any:
        """Return the future mean of a bucket, in its own memory. Collective."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise VirtualRanksError(
                "a gradient is sparse, and reduction='ordered' adds up dense ones alone: set "
                "env_cfg.reduction='native', or sparse=False in the embedding.")
        if bucket.index() == 0:
            self._under_way = []  # of a backward pass that has failed
        # With its device, whoever waits for it on another stream waits for the work on this one.
        # Through host memory the sum is complete when it is set, and XLA has no events to wait for.
        on_device = carries(buffer.device, self._group)
        future: Any = torch.futures.Future(devices=[buffer.device] if on_device else None)
        self._under_way.append((self._ordered.mean_in_steps([buffer], out=buffer), future))
        self._advance()
        while bucket.is_last() and self._under_way:
            self._advance()
        return future

    def _advance(self) -> None:
        under_way, self._under_way = self._under_way, []
        for steps, future in under_way:
            try:
                next(steps)
                self._under_way.append((steps, future))
            except StopIteration as end:
                future.set_result(end.value)


def place_module(module: nn.Module, accelerator: Accelerator, local_rank: int) -> nn.Module:
    """Return ``module`` on this rank's device, without SyncBN if the device lacks it.

    Raises:
        PlacementError: If a parameter or buffer did not reach the device.
    """
    if not accelerator.supports.sync_bn and has_sync_batchnorm(module):
        print_log(
            f'SyncBatchNorm does not compute on {accelerator.name}: every rank normalizes with its '
            f'own statistics (BatchNorm). Small batches may want GroupNorm.',
            logger='current', level=30)
        module = revert_sync_batchnorm(module)
    device = accelerator.device(local_rank)
    shared = _shared_parameters(module)
    module = module.to(device)
    for (owner, name), *others in shared:
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    stray = [f'{name} on {tensor.device}' for name, tensor in _named_tensors(module).items()
             if tensor.device != device and not (device.index is None
                                                 and tensor.device.type == device.type)]
    if stray:
        raise PlacementError(
            f'{len(stray)} tensor(s) of {type(module).__name__} did not reach {device}: '
            f"{', '.join(stray[:3])}. A module that pins its own device or overrides .to() or "
            f'_apply() must leave placement to the caller.')
    return module


def _shared_parameters(module: nn.Module) -> List[List[Tuple[nn.Module, str]]]:
    """Return the owners of each shared parameter, which not every device keeps shared."""
    places: Dict[int, List[Tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [each for each in places.values() if len(each) > 1]


def _named_tensors(module: nn.Module) -> Dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _weights_of_rank_0(module: nn.Module) -> Dict[str, torch.Tensor]:
    """Return rank 0's parameters and buffers in host memory, on every rank. Collective."""
    tensors = _named_tensors(module).items()
    host = {name: tensor.detach().to('cpu', copy=True).contiguous() for name, tensor in tensors}
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in host.items()]
    every: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, layout)
    odd = [rank for rank, other in enumerate(every) if other != every[0]]
    if odd:
        names = sorted({name for name, _, _ in set(every[0]) ^ set(every[odd[0]])})
        raise WeightsDifferError(
            f'rank(s) {odd} built another model than rank 0: {names[:3]} differ in name, shape or '
            f'dtype. Every rank must build the model from the same config and files.')
    broadcast_tensors(host.values())
    return host


def has_sync_batchnorm(module: nn.Module) -> bool:
    """Return whether a module has layers that normalize over all ranks."""
    # By name, because the SyncBatchNorm of mmcv exists only where its ops are compiled.
    return any('SyncBatchNorm' in type(child).__name__ for child in module.modules())


def _warn_ignored(accelerator: Accelerator, local_rank: int, **given: Any) -> None:
    device = accelerator.device(local_rank)
    for option, value in given.items():
        devices: List[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or devices in ([], [local_rank], [device], [str(device)]):
            continue
        print_log(
            f'MMDistributedDataParallel ignores {option}={value!r}: this rank (local rank '
            f'{local_rank}) trains on {device}. Remove it from model_wrapper_cfg.',
            logger='current', level=30)
