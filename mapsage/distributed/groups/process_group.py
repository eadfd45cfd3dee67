"""Starts torch.distributed with a backend for CPU tensors and a backend for device tensors.

CPU tensors always travel over gloo. Device tensors use the vendor's library, or gloo through host
memory (``staged.py``) if the vendor has none. Call :func:`init_process_group` after the launcher's
variables are set (``apply_launcher_environment``).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import socket
import sys
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Iterator, List, Sequence, Union

import torch
import torch.distributed as dist

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.base.errors import UserError
from mapsage.distributed.descriptors import check_descriptors
from mapsage.distributed.host_address import keep_on_loopback, reachable_host
from mapsage.distributed.job_store import private_store, shared_store
from mapsage.distributed.launcher import local_rank
from mapsage_launcher.stop_request import StoppedEarly

from .staged import BACKEND as STAGED
from .staged import SUPPORTED as PER_DEVICE_BACKENDS
from .staged import register_staged_backend

# Without ``dist_cfg.timeout``, MMEngine uses torch's default for gloo, which is this value.
DEFAULT_TIMEOUT_SECONDS = 1800
# Three years, which datetime.timedelta and gloo accept.
_MAX_TIMEOUT_SECONDS = 10**8
# How much longer a backend waits that would end the process without naming a rank
# (``Accelerator.silent_backend``). A roll call takes up to 33 s, and backend_watch.py begins it.
SILENT_BACKEND_EXTRA_SECONDS = 60
# Numbers of the default groups of this process; equal on all ranks.
_groups = itertools.count()


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
        native = f'cpu:gloo,{accelerator.device_type}:{accelerator.communication}'
        staged = f'cpu:gloo,{accelerator.device_type}:{STAGED}'
        forms = {
            'auto': native,
            accelerator.communication: native,
            STAGED: staged,
            'gloo': staged,
            native: native,
            staged: staged,
        }
    if backend not in forms:
        raise BackendError(
            f'backend {backend!r} cannot be used on accelerator {accelerator.name!r}: expected one '
            f'of {", ".join(usable_backends(accelerator))}. Set '
            f"env_cfg.dist_cfg.backend='auto' to let MapSage choose."
        )
    return forms[backend]


def init_process_group(
    accelerator: Accelerator,
    backend: str = 'auto',
    timeout: Union[int, float] = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Initialize the default process group from the environment and select this rank's device.

    CPU tensors (flags, counts, objects, metrics) always travel over gloo. Device tensors travel
    over the accelerator's native backend, or through host memory without one. If the native backend
    is outside torch.distributed, this starts it as well, and the default group takes CPU tensors
    only.

    Args:
        accelerator: Accelerator in use.
        backend: Name of the backend, see :func:`resolve_backend`.
        timeout: Seconds a collective may wait for the other ranks.

    Raises:
        BackendError: If the accelerator cannot use ``backend``, or ``timeout`` is not a positive
            number of seconds.
        AcceleratorError: If there are more ranks than devices on this node, or the native group
            cannot be started.
        DescriptorLimitError: If this process may not open a connection to each rank.
        AddressError: If all ranks are on one machine and its loopback interface is down.
        PrivateStoreError: If rank 0 does not come, or this machine allows no private store.
    """
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not 0 < timeout <= _MAX_TIMEOUT_SECONDS
    ):
        raise BackendError(
            f'dist_cfg.timeout must be a positive number of seconds, at most '
            f'{_MAX_TIMEOUT_SECONDS}, got {timeout!r}.'
        )
    resolved = resolve_backend(accelerator, backend)
    select_device(accelerator)
    native = accelerator.native_group and not resolved.endswith(STAGED)
    if resolved.endswith(STAGED):
        register_staged_backend(accelerator.device_type)
    elif native:
        # gloo without a device type: the default group never gets device tensors, which gloo may
        # return unreduced.
        resolved = 'gloo'
    elif accelerator.simulated:
        accelerator.register_backend()
    elif not PER_DEVICE_BACKENDS:
        # In torch < 2.0 a group has a single backend. MMEngine then sends CPU tensors over nccl.
        resolved = resolved.rsplit(':', 1)[-1]
    # The simulated eccl is over gloo, too.
    meshes = ('gloo' in resolved) + (STAGED in resolved or accelerator.simulated)
    check_descriptors(int(os.environ.get('WORLD_SIZE', '1')), meshes)
    keep_on_loopback(os.environ)
    store = private_store(timeout) or shared_store(timeout)
    # A number in the prefix, because keys of an earlier default group may still be in the store.
    dist.init_process_group(
        resolved,
        timeout=_backend_timeout(accelerator, resolved, timeout),
        store=dist.PrefixStore(f'mapsage/group/{next(_groups)}', store),
        rank=int(os.environ['RANK']),
        world_size=int(os.environ['WORLD_SIZE']),
    )
    _limit_gloo(accelerator, dist.distributed_c10d._get_default_group(), timeout)
    atexit.register(_destroy_at_clean_exit, accelerator)
    if native:
        _init_native_group(accelerator, timedelta(seconds=timeout))


def new_group(ranks: Sequence[int], accelerator: Accelerator, timeout: float) -> dist.ProcessGroup:
    """Make a process group with the backends of the default group. Collective over all ranks.

    Args:
        ranks: Global ranks of the group.
        accelerator: Accelerator in use.
        timeout: Seconds a collective may wait for the other ranks.

    Returns:
        The group; ``dist.GroupMember.NON_GROUP_MEMBER`` on ranks outside of it.
    """
    group = dist.new_group(
        list(ranks), timeout=_backend_timeout(accelerator, dist.get_backend(), timeout)
    )
    if dist.get_rank() in ranks:
        _limit_gloo(accelerator, group, timeout)
    return group


def _is_silent(accelerator: Accelerator, backend: str) -> bool:
    return accelerator.silent_backend and STAGED not in backend


def _backend_timeout(accelerator: Accelerator, backend: str, timeout: float) -> timedelta:
    extra = SILENT_BACKEND_EXTRA_SECONDS if _is_silent(accelerator, backend) else 0
    return timedelta(seconds=timeout + extra)


def _limit_gloo(accelerator: Accelerator, group: dist.ProcessGroup, timeout: float) -> None:
    """Give the CPU tensors of a group their own timeout, if the device's backend waits longer."""
    if _is_silent(accelerator, dist.get_backend(group)):
        gloo: Any = group._get_backend(torch.device('cpu'))
        gloo._set_default_timeout(timedelta(seconds=timeout))


def uses_native_group(accelerator: Accelerator) -> bool:
    """Return whether gradients go over the vendor's process group outside torch.distributed."""
    return accelerator.native_group and STAGED not in dist.get_backend()


def _init_native_group(accelerator: Accelerator, timeout: timedelta) -> None:
    # The vendor's library needs another port than torch for its store, which rank 0 chooses.
    address = ['']
    if dist.get_rank() == 0:
        host = reachable_host()
        with socket.create_server(
            (host, 0), family=(socket.AF_INET6 if ':' in host else socket.AF_INET)
        ) as probe:
            port = probe.getsockname()[1]
        address = [f'tcp://[{host}]:{port}' if ':' in host else f'tcp://{host}:{port}']
    dist.broadcast_object_list(address, src=0)
    accelerator.init_native_group(address[0], dist.get_rank(), dist.get_world_size(), timeout)


def select_device(accelerator: Accelerator) -> None:
    """Select the device whose index is the local rank in the launcher's variables.

    Raises:
        AcceleratorError: If more ranks were started on this node than it has devices.
    """
    check_ranks_fit(accelerator, int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
    accelerator.set_device(local_rank())


def check_ranks_fit(accelerator: Accelerator, local_world_size: int) -> None:
    """Raise AcceleratorError on every rank if a node has fewer devices than ranks.

    CPU processes share their device, and under PJRT every process has its own client. A mask may
    show each rank a single card (Slurm's ``--gpus-per-task=1``, MIG). Whether these are different
    cards is checked by :func:`~mapsage.distributed.device_checks.check_own_cards`.
    """
    if accelerator.device_type == 'cpu' or accelerator.name == 'xla':
        return
    count = accelerator.device_count()
    if local_world_size > count and not accelerator.one_card_a_rank():
        raise AcceleratorError(
            f'{local_world_size} ranks were started on this node and accelerator '
            f'{accelerator.name!r} shows {count} device(s) (torch {torch.__version__}). Start at '
            f'most one rank per device (NPROC_PER_NODE={count}), or give each rank one card of its '
            f'own in {" or ".join(accelerator.masks) or "its device mask"}.'
        )


_interrupted = False


@contextmanager
def kept_when_interrupted() -> Iterator[None]:
    """Do not destroy the process group at the end of the process if the block raises an error.

    After an error or Ctrl-C a collective may still be under way. Destroying the group would wait
    for it, perhaps forever, and NCCL must not be destroyed while it is in use. The interpreter
    remembers only errors that end it, so a script that catches the error needs this block.
    """
    global _interrupted
    try:
        yield
    # All ranks have completed their last collective.
    except StoppedEarly:
        raise
    except BaseException:
        _interrupted = True
        raise


def _destroy_at_clean_exit(accelerator: Accelerator) -> None:
    # If gloo's threads still run when the interpreter ends, they sometimes abort the process.
    if dist.is_initialized() and not _interrupted and not hasattr(sys, 'last_type'):
        if accelerator.silent_backend:
            _keep_backends(accelerator.device_type)
        # A wrapper in a reference cycle would keep the group alive.
        gc.collect()
        dist.destroy_process_group()


def _keep_backends(device_type: str) -> None:
    """Let the backends of a device live until the process has ended.

    The destructor of ``ProcessGroupECCL`` aborts the process if ``ecclCommDestroy`` fails, after a
    run whose results are all written (C10D_ECCL_ASSERT of torch_gcu 2.10). So no destructor runs.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        # A group without a backend for the device raises RuntimeError.
        with suppress(RuntimeError):
            ctypes.pythonapi.Py_IncRef(
                ctypes.py_object(group._get_backend(torch.device(device_type)))
            )
