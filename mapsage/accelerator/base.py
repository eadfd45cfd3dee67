"""What MapSage asks of a device stack. One subclass a file; nothing else imports a vendor."""
from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Optional

import torch
from torch import nn


class AcceleratorError(ValueError):
    """An accelerator was asked for that cannot be used, or its software is broken."""


@dataclass(frozen=True)
class Supports:
    """What a device stack can do.

    Attributes:
        sync_bn: ``torch.nn.SyncBatchNorm`` computes on the device.
        float64: 64-bit floats keep their precision on the device.
        int64: 64-bit integers keep their range on the device.
        compile: ``torch.compile`` has a backend for the device.
        fused_optimizer: ``torch.optim`` accepts ``fused=True`` on the device.
    """

    sync_bn: bool = False
    float64: bool = True
    int64: bool = True
    compile: bool = False
    fused_optimizer: bool = False


class Accelerator(abc.ABC):
    """One device stack, seen from one process.

    Attributes:
        name: The name used in ``env_cfg.accelerator``.
        device_type: The type part of the PyTorch device string, for example ``'cuda'``.
        communication: The native ``torch.distributed`` backend of the device, or ``'staged'``
            when its tensors must go through host memory.
        lazy: Operations are recorded and run at :meth:`flush`.
        supports: What the stack can do.
        amp_dtype: The autocast dtype used when a config does not name one.
        simulated: The devices are a stand-in; nothing measured on them is the vendor's.
        native_group: :attr:`communication` is a library of the vendor's beside torch.distributed,
            with a process group and a DDP of its own, and no backend of torch.distributed.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    communication: ClassVar[str]
    lazy: ClassVar[bool] = False
    supports: ClassVar[Supports] = Supports()
    amp_dtype: ClassVar[torch.dtype] = torch.bfloat16
    simulated: ClassVar[bool] = False
    native_group: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def why_unavailable(cls) -> Optional[str]:
        """Return why the stack cannot be used here, or None when it can.

        Raises:
            AcceleratorError: If the vendor's software is installed but broken; the message holds
                the vendor's own.
        """

    @abc.abstractmethod
    def device_count(self) -> int:
        """Return how many devices this process can see."""

    @abc.abstractmethod
    def device(self, local_rank: int = 0) -> torch.device:
        """Return the device of the process with this rank on its node.

        Raises:
            AcceleratorError: If there is no such device.
        """

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Make :meth:`device` of ``local_rank`` the current device of this process."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the current device has run."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the CPU generator and the current device's from ``seed`` (0 <= seed < 2**32)."""

    def flush(self) -> None:
        """Run what a lazy device has recorded. Nothing to do elsewhere."""
        return

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Run ``optimizer.step(**kwargs)``, in the vendor's way where it has one."""
        optimizer.step(**kwargs)

    def init_native_group(self, init_method: str, rank: int, world_size: int,
                          timeout: timedelta) -> None:
        """Start the vendor's own process group. Collective; only where :attr:`native_group`.

        Args:
            init_method: Where the ranks meet, ``'tcp://host:port'``; rank 0 serves there.
            rank: The rank of this process.
            world_size: The number of ranks.
            timeout: How long to wait for the other ranks.

        Raises:
            AcceleratorError: If the group cannot be started, with the vendor's own message.
        """
        raise NotImplementedError(f'{self.name} has no process group of its own')

    def data_parallel(self, module: nn.Module, local_rank: int, **options: Any) -> nn.Module:
        """Wrap ``module`` in the vendor's own DDP; only where :attr:`native_group`.

        Args:
            module: The model, on this rank's device.
            local_rank: The rank of this process on its node.
            **options: Options of torch's DDP.

        Returns:
            A wrapper with ``.module`` and ``.no_sync()`` that averages gradients over the ranks in
            the backward pass. Its ranks may hold other weights than rank 0's.

        Raises:
            AcceleratorError: If the vendor's DDP lacks one of ``options``.
        """
        raise NotImplementedError(f'{self.name} has no DDP of its own')

    def autocast(self, dtype: Optional[torch.dtype] = None) -> AbstractContextManager:
        """Return a context in which eligible operations run in ``dtype``.

        Args:
            dtype: ``torch.bfloat16`` or ``torch.float16``; :attr:`amp_dtype` when None.
        """
        return torch.autocast(self.device_type, dtype=dtype or self.amp_dtype)

    def grad_scaler(self, dtype: Optional[torch.dtype] = None, **kwargs: Any) -> Any:
        """Return a gradient scaler for training in ``dtype``.

        It is disabled, so that its methods pass through, unless ``dtype`` is float16: bfloat16
        has the exponent range of float32 and needs no scaling.

        Args:
            dtype: The autocast dtype; :attr:`amp_dtype` when None.
            **kwargs: Arguments of ``torch.amp.GradScaler``.
        """
        enabled = (dtype or self.amp_dtype) == torch.float16
        if hasattr(getattr(torch, 'amp', None), 'GradScaler'):  # torch 2.3
            return torch.amp.GradScaler(self.device_type, enabled=enabled, **kwargs)
        return torch.cuda.amp.GradScaler(enabled=enabled, **kwargs)

    def memory_allocated(self) -> Optional[int]:
        """Return the bytes held on the current device, or None when the stack cannot tell."""
        return None

    def max_memory_allocated(self) -> Optional[int]:
        """Return the peak of :meth:`memory_allocated` in bytes, or None if unknown."""
        return None

    def memory_total(self) -> Optional[int]:
        """Return the bytes the current device can hold, or None when the stack cannot tell."""
        return None

    def describe(self) -> str:
        """Return one line for the log: name, devices and communication."""
        path = ('through host memory over gloo' if self.communication == 'staged' else
                f'over {self.communication}')
        kind = 'simulated device(s)' if self.simulated else 'device(s)'
        return f'{self.name} ({self.device_count()} {kind}, gradients {path})'

    def _check_local_rank(self, local_rank: int) -> None:
        count = self.device_count()
        if not 0 <= local_rank < count:
            raise AcceleratorError(
                f'local rank {local_rank} has no {self.name} device: this node shows {count} '
                f'device(s). Start at most {count} rank(s) per node (NPROC_PER_NODE={count}), '
                f'or make more devices visible.')
