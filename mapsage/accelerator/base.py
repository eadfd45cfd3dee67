"""The interface of a device stack.

Each file of this package has one subclass, and no other code imports a vendor's module. What a
stack can do is asked here (`supports`, `lazy`, `native_group`), so that callers need no list of
devices. `resolve.py` chooses the accelerator of a process.
"""

from __future__ import annotations

import abc
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from mapsage.base.errors import UserError


class AcceleratorError(UserError, ValueError):
    """The requested accelerator cannot be used, or its software is broken."""


@dataclass(frozen=True)
class Supports:
    """Capabilities of a device stack.

    Attributes:
        sync_bn: Whether ``torch.nn.SyncBatchNorm`` computes on the device.
        float64: Whether 64-bit floats keep their precision on the device.
        int64: Whether 64-bit integers keep their range on the device.
        compile: Whether ``torch.compile`` has a backend for the device.
        fused_optimizer: Whether ``torch.optim`` accepts ``fused=True`` on the device.
        foreach_optimizer: Whether steps of ``torch.optim`` over lists of tensors are right, which
            is how it computes them by default.
    """

    sync_bn: bool = False
    float64: bool = True
    int64: bool = True
    compile: bool = False
    fused_optimizer: bool = False
    foreach_optimizer: bool = True


class Accelerator(abc.ABC):
    """A device stack, as seen from one process.

    Attributes:
        name: Name used in ``env_cfg.accelerator``.
        device_type: Type in the PyTorch device string, for example ``'cuda'``.
        communication: Name of the native ``torch.distributed`` backend of the device, or
            ``'staged'`` if its tensors must go through host memory.
        lazy: Whether operations are recorded first, and run at :meth:`flush`.
        native_bincount: Whether the device computes ``torch.bincount`` itself. Where it does not,
            the vendor's software copies the tensor to the host and back.
        supports: Capabilities of the stack.
        amp_dtype: Data type of autocast if a config does not name one.
        fast_by_default: Whether channels last and fused optimizers pay on the devices.
        simulated: Whether the devices are simulated, so that no measurement on them says anything
            about the vendor's, and :meth:`register_backend` brings their backend.
        native_group: Whether :attr:`communication` is a separate library of the vendor, with its
            own process group and DDP, instead of a backend of torch.distributed.
        silent_backend: Whether the native backend raises no error for a collective that does not
            complete, also if a peer has ended, and ends the process by SIGABRT after its timeout.
        collectives_of_64_bits: Whether the native backend adds and sends 64-bit numbers whole.
        masks: Names of the environment variables that hide cards from a process. Slurm's
            ``--gpus-per-task=1`` and MIG show each rank one card only, which is device 0 there.
    """

    name: str
    device_type: str
    communication: str
    lazy: ClassVar[bool] = False
    native_bincount: bool = True
    supports: Supports = Supports()
    amp_dtype: torch.dtype = torch.bfloat16
    fast_by_default: bool = False
    simulated: ClassVar[bool] = False
    # Why this process can no longer use cards: set by what has loaded other devices.
    taken: ClassVar[Optional[str]] = None
    native_group: ClassVar[bool] = False
    silent_backend: ClassVar[bool] = False
    collectives_of_64_bits: ClassVar[bool] = True
    masks: Tuple[str, ...] = ()

    @classmethod
    @abc.abstractmethod
    def why_unavailable(cls) -> Optional[str]:
        """Return why the stack cannot be used here, or None if it can.

        Raises:
            AcceleratorError: If the vendor's software is installed but broken; the message quotes
                the vendor's.
        """

    def register_backend(self) -> None:
        """Register the backend of simulated devices with ``torch.distributed``."""
        raise NotImplementedError(f'{self.name} has the backends of PyTorch')

    @abc.abstractmethod
    def device_count(self) -> int:
        """Return the number of devices that this process can see."""

    def card_count(self) -> int:
        """Return the number of cards that this process can see; 0 where ranks share the CPU."""
        return self.device_count()

    @abc.abstractmethod
    def device(self, local_rank: int = 0) -> torch.device:
        """Return the device of the process with the given local rank.

        Raises:
            AcceleratorError: If there is no such device.
        """

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Make the :meth:`device` of ``local_rank`` the current device of this process."""

    def replace_operations(self) -> None:
        """Replace functions of PyTorch that fail on the device, if there are any.

        Called when the accelerator becomes the current one; further calls have no effect.
        """
        return

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the current device has finished."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the generators of the CPU and of all visible devices; 0 <= ``seed`` < 2**32.

        A model that is split over several devices draws on each of them.
        """

    def random_state(self) -> List[torch.Tensor]:
        """Return the states of the CPU's generator and of the current device's, uint8 on the CPU.

        For eager devices. Their module of torch, such as ``torch.cuda``, has ``get_rng_state``.
        """
        states = [torch.get_rng_state()]
        if self.device_type != 'cpu':
            states.append(getattr(torch, self.device_type).get_rng_state().cpu())
        return states

    def set_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Restore what :meth:`random_state` returned, here or on a rank with such a device."""
        torch.set_rng_state(states[0])
        for state in states[1:]:
            getattr(torch, self.device_type).set_rng_state(state)

    def make_deterministic(self) -> Optional[str]:
        """Set what the stack needs for deterministic results; return a line for the log, or None.

        It comes before the first computation on the device.

        Raises:
            AcceleratorError: If the environment rules deterministic results out.
        """
        return None

    def environment_problem(self, environ: Mapping[str, str]) -> Optional[str]:
        """Return why a variable lets the vendor's software fail or compute wrongly, or None.

        Args:
            environ: Environment of the process.
        """
        return None

    def deterministic_obstacle(self, model: nn.Module) -> Optional[str]:
        """Return a warning if layers of a model cannot be trained deterministically, or None.

        Args:
            model: Model that trains after :meth:`make_deterministic`.
        """
        return None

    def set_float32_precision(
        self, matmul: Optional[str], tf32_convolutions: Optional[bool]
    ) -> Optional[str]:
        """Set how precisely the device computes in float32; return a warning, or None.

        Only CUDA has such settings. Elsewhere they have no effect, which the warning says.

        Args:
            matmul: Precision of matrix products, ``'highest'``, ``'high'`` or ``'medium'``; None
                for PyTorch's default.
            tf32_convolutions: Whether convolutions may use TF32; None for PyTorch's default.
        """
        settings = dict(float32_matmul_precision=matmul, cudnn_allow_tf32=tf32_convolutions)
        requested = [
            f'env_cfg.{name}={value!r}' for name, value in settings.items() if value is not None
        ]
        return (
            f'{" and ".join(requested)}: no effect on {self.name}, since only cuda has these '
            f'settings'
            if requested
            else None
        )

    def native_bfloat16(self) -> Optional[bool]:
        """Return whether the device computes in bfloat16 itself; None if that is not known."""
        return None

    def has_16_bit_units(self) -> bool:
        """Return whether the current device is known to multiply 16-bit matrices faster."""
        return False

    def describe_probes(self) -> Optional[str]:
        """Return a line for the log with the capabilities that were tried on the device, or None.

        It needs a usable current device.
        """
        return None

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor on the host, in memory that the device copies from by itself."""
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy a tensor of the device; return a function that returns the copy.

        The function waits until the copy is complete. With streams and events (CUDA), work that was
        queued later is not waited for. Both calls are thread-safe.
        """
        return tensor.cpu

    def fence(self, device: torch.device) -> Callable[[], None]:
        """Return a function that waits until what is queued on a device now has finished."""
        return self.synchronize

    def flush(self) -> None:
        """Run the operations that a lazy device has recorded; do nothing on other devices."""
        return

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Run ``optimizer.step(**kwargs)``, or the function the vendor provides for it."""
        optimizer.step(**kwargs)

    def init_native_group(
        self, init_method: str, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Start the vendor's process group. Collective; only if :attr:`native_group` is set.

        Args:
            init_method: Address ``'tcp://host:port'`` at which the ranks meet; rank 0 listens.
            rank: Rank of this process.
            world_size: Number of ranks.
            timeout: Longest time to wait for the other ranks.

        Raises:
            AcceleratorError: If the group cannot be started; the message quotes the vendor's.
        """
        raise NotImplementedError(f'{self.name} has no native process group')

    def data_parallel(self, module: nn.Module, local_rank: int, **options: Any) -> nn.Module:
        """Wrap ``module`` in the vendor's DDP; only if :attr:`native_group` is set.

        Args:
            module: Model, on this rank's device.
            local_rank: Rank of this process on its node.
            **options: Options of torch's DDP.

        Returns:
            Wrapper with ``.module`` and ``.no_sync()`` that averages gradients over the ranks in
            the backward pass. The weights may still differ between the ranks.

        Raises:
            AcceleratorError: If the vendor's DDP lacks one of ``options``.
        """
        raise NotImplementedError(f'{self.name} has no native DDP')

    def autocast(self, dtype: Optional[torch.dtype] = None) -> AbstractContextManager:
        """Return a context in which eligible operations run in ``dtype``.

        Args:
            dtype: Data type ``torch.bfloat16`` or ``torch.float16``; None for :attr:`amp_dtype`.
        """
        return torch.autocast(self.device_type, dtype=dtype or self.amp_dtype)

    def grad_scaler(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: Any
    ) -> Any:
        """Return a gradient scaler for training in ``dtype``.

        Unless ``dtype`` is float16 the scaler is disabled and does not change anything, because
        bfloat16 has the exponent range of float32 and needs no scaling.

        Args:
            dtype: Data type of autocast; None for :attr:`amp_dtype`.
            enabled: Whether to scale where ``dtype`` needs it.
            **kwargs: Other arguments of ``torch.amp.GradScaler``.
        """
        enabled = enabled and (dtype or self.amp_dtype) == torch.float16
        if hasattr(getattr(torch, 'amp', None), 'GradScaler'):  # torch 2.3
            return torch.amp.GradScaler(self.device_type, enabled=enabled, **kwargs)
        return torch.cuda.amp.GradScaler(enabled=enabled, **kwargs)

    def memory_allocated(self) -> Optional[int]:
        """Return the bytes allocated on the current device, or None if unknown."""
        return None

    def max_memory_allocated(self) -> Optional[int]:
        """Return the peak of :meth:`memory_allocated` in bytes, or None if unknown."""
        return None

    def reset_peak_memory(self) -> None:
        """Reset the peak of :meth:`max_memory_allocated`, where the stack can."""
        return

    def memory_total(self) -> Optional[int]:
        """Return the memory of the current device in bytes, or None if unknown."""
        return None

    def card(self, local_rank: int = 0) -> Optional[str]:
        """Return the vendor's own name of the card of a local rank, whatever masks hide cards.

        None where the stack has no such name.
        """
        return None

    def card_model(self, local_rank: int = 0) -> str:
        """Return the model of the card of a local rank; cards of one model round alike."""
        return self.name

    def software(self) -> Dict[str, str]:
        """Return the versions and settings that affect rounding on the device, by name.

        The versions are of the vendor's libraries and driver, and settings that choose kernels.
        """
        return {}

    def one_card_a_rank(self) -> bool:
        """Return whether a mask leaves this process exactly one card."""
        return any(name in os.environ for name in self.masks) and self.device_count() == 1

    def describe(self) -> str:
        """Return one line for the log: name, devices and communication."""
        path = (
            'through host memory over gloo'
            if self.communication == 'staged'
            else f'over {self.communication}'
        )
        kind = 'simulated device(s)' if self.simulated else 'device(s)'
        return f'{self.name} ({self.device_count()} {kind}, gradients {path})'

    def _index(self, local_rank: int) -> int:
        """Return the index of a local rank's device; AcceleratorError without one."""
        count = self.device_count()
        if os.environ.get('LOCAL_RANK') == str(local_rank) and self.one_card_a_rank():
            return 0
        if not 0 <= local_rank < count:
            raise AcceleratorError(
                f'local rank {local_rank} has no {self.name} device: this node shows {count} '
                f'device(s). Start at most {count} rank(s) per node (NPROC_PER_NODE={count}), '
                f'or make more devices visible.'
            )
        return local_rank
