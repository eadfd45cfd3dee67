"""Start torch.distributed so that gradients and control traffic each have a working path."""
from __future__ import annotations

import atexit
import gc
import itertools
import os
import socket
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import Iterator, List, Union

import torch
import torch.distributed as dist

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.distributed.descriptors import check_descriptors
from mapsage.distributed.host_address import keep_on_loopback, reachable_host
from mapsage.distributed.job_store import private_store, shared_store
from mapsage.distributed.launcher import local_rank
from mapsage.errors import UserError
from mapsage_launcher.stop_request import StoppedEarly

from .simulated_eccl import register_simulated_backend
from .staged import BACKEND as STAGED
from .staged import SUPPORTED as PER_DEVICE_BACKENDS
from .staged import register_staged_backend

# MMEngine's default for a missing ``dist_cfg.timeout`` is torch's own; this is that value.
DEFAULT_TIMEOUT_SECONDS = 1800
_MAX_TIMEOUT_SECONDS = 10**8  # three years; datetime.timedelta and gloo take that
_groups = itertools.count()  # default groups of this process; equal on all ranks


class BackendError(UserError, ValueError):
    """A backend or timeout that cannot be used."""


def usable_backends(accelerator: Accelerator) -> List[str]:
    """Return the values of ``dist_cfg.backend`` that work with ``accelerator``, best first."""
    if accelerator.device_type == 'cpu':
        return ['auto', 'gloo']
    return list(dict.fromkeys(['auto', accelerator.communication, STAGED, 'gloo']))


def resolve_backend(accelerator: Accelerator, backend: str = 'auto') -> str:
    """Return the backend string to hand to ``torch.distributed.init_process_group``. Pure.

    Args:
        accelerator: Accelerator in use.
        backend: Name of the backend: one of :func:`usable_backends`, or the string that this
            function would return. ``'gloo'`` on an accelerator means ``'staged'``: gloo itself
            never gets a device tensor.

    Raises:
        BackendError: If the accelerator cannot use ``backend``.
    """
    if accelerator.device_type == 'cpu':
        forms = {'auto': 'gloo', 'gloo': 'gloo', 'cpu:gloo': 'gloo'}
    else:
        def composite(device_backend: str) -> str:
            return f'cpu:gloo,{accelerator.device_type}:{device_backend}'

        native = accelerator.communication
        forms = {'auto': composite(native), native: composite(native),
                 STAGED: composite(STAGED), 'gloo': composite(STAGED)}
        forms.update({composite(native): composite(native), composite(STAGED): composite(STAGED)})
    if backend not in forms:
        raise BackendError(
            f'backend {backend!r} cannot be used on accelerator {accelerator.name!r}: expected one '
            f"of {', '.join(usable_backends(accelerator))}. Set "
            f"env_cfg.dist_cfg.backend='auto' to let MapSage choose.")
    return forms[backend]


def init_process_group(accelerator: Accelerator, backend: str = 'auto',
                       timeout: Union[int, float] = DEFAULT_TIMEOUT_SECONDS) -> None:
    """Initialize the default process group from the environment and select this rank's device.

    CPU tensors (flags, counts, objects, metrics) always travel over gloo; device tensors over the
    accelerator's native backend, or through host memory where there is none. A native backend
    outside torch.distributed is started as well; the default group then takes CPU tensors only.

    Args:
        accelerator: Accelerator in use.
        backend: Name of the backend, see :func:`resolve_backend`.
        timeout: Seconds a collective may wait for the other ranks.

    Raises:
        BackendError: If the accelerator cannot use ``backend``, or ``timeout`` is no positive
            number of seconds.
        AcceleratorError: If there are more ranks than devices on this node, or the native group
            cannot be started.
        DescriptorLimitError: If this process may not open a connection to each rank.
        AddressError: If the loopback interface of a machine with all ranks is down.
        PrivateStoreError: If rank 0 does not come, or this machine allows no private store.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) \
            or not 0 < timeout <= _MAX_TIMEOUT_SECONDS:
        raise BackendError(f'dist_cfg.timeout must be a positive number of seconds, at most '
                           f'{_MAX_TIMEOUT_SECONDS}, got {timeout!r}.')
    resolved = resolve_backend(accelerator, backend)
    select_device(accelerator)
    native = accelerator.native_group and not resolved.endswith(STAGED)
    if resolved.endswith(STAGED):
        register_staged_backend(accelerator.device_type)
    elif native:
        resolved = 'gloo'  # gloo must never get a device tensor: it may return it unreduced
    elif accelerator.simulated:
        register_simulated_backend(accelerator)
    elif not PER_DEVICE_BACKENDS:
        # torch < 2.0 has one backend a group. MMEngine then sends its CPU tensors through nccl.
        resolved = resolved.rsplit(':', 1)[-1]
    meshes = ('gloo' in resolved) + (STAGED in resolved)
    check_descriptors(int(os.environ.get('WORLD_SIZE', '1')), meshes)
    keep_on_loopback(os.environ)
    store = private_store(timeout) or shared_store(timeout)
    # The keys of a group before it, in the same process, may still be there.
    dist.init_process_group(
        resolved, timeout=timedelta(seconds=timeout),
        store=dist.PrefixStore(f'mapsage/group/{next(_groups)}', store),
        rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))
    atexit.register(_destroy_at_clean_exit)
    if native:
        _init_native_group(accelerator, timedelta(seconds=timeout))


def uses_native_group(accelerator: Accelerator) -> bool:
    """Return whether gradients go over the vendor's process group outside torch.distributed."""
    return accelerator.native_group and STAGED not in dist.get_backend()


def _init_native_group(accelerator: Accelerator, timeout: timedelta) -> None:
    # Two libraries cannot serve their stores on the same port.
    address = ['']
    if dist.get_rank() == 0:
        host = reachable_host()
        with socket.create_server((host, 0), family=(
                socket.AF_INET6 if ':' in host else socket.AF_INET)) as probe:
            port = probe.getsockname()[1]
        address = [f'tcp://[{host}]:{port}' if ':' in host else f'tcp://{host}:{port}']
    dist.broadcast_object_list(address, src=0)
    accelerator.init_native_group(address[0], dist.get_rank(), dist.get_world_size(), timeout)


def select_device(accelerator: Accelerator) -> None:
    """Make this rank's device the current one, as the launcher's variables number it.

    Raises:
        AcceleratorError: If more ranks were started on this node than it has devices.
    """
    check_ranks_fit(accelerator, int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
    accelerator.set_device(local_rank())


def check_ranks_fit(accelerator: Accelerator, local_world_size: int) -> None:
    """Raise AcceleratorError on every rank when a node has fewer devices than ranks.

    CPU processes share their device, and under PJRT every process has its own client. Where a mask
    leaves each rank one card (Slurm's ``--gpus-per-task=1``, MIG), these must be different cards,
    which :func:`~mapsage.distributed.device_checks.check_own_cards` compares.
    """
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        return
    count = accelerator.device_count()
    if local_world_size > count and not accelerator.one_card_a_rank():
        raise AcceleratorError(
            f'{local_world_size} ranks were started on this node and accelerator '
            f'{accelerator.name!r} shows {count} device(s) (torch {torch.__version__}). Start at '
            f'most one rank per device (NPROC_PER_NODE={count}), or give each rank one card of its '
            f"own in {' or '.join(accelerator.masks) or 'its device mask'}.")


_interrupted = False


@contextmanager
def kept_when_interrupted() -> Iterator[None]:
    """Keep the process group at the end of the process if the block does not end by itself.

    After an error or Ctrl-C a collective may still be under way. One that never ends would be
    waited for, and NCCL must not be destroyed while it is used. This covers scripts that catch the
    error, of which the interpreter then knows nothing.
    """
    global _interrupted
    try:
        yield
    except StoppedEarly:  # all ranks are behind their last collective
        raise
    except BaseException:
        _interrupted = True
        raise


def _destroy_at_clean_exit() -> None:
    # If gloo's threads still run when the interpreter ends, they sometimes abort the process.
    if dist.is_initialized() and not _interrupted and not hasattr(sys, 'last_type'):
        gc.collect()  # a wrapper in a reference cycle would keep the group alive
        dist.destroy_process_group()
