"""Decides how a run is spread over processes and devices, from the config and the launcher.

The decision is pure and is taken once, before any process group exists. The usual trap is variables
of a launcher that are left over in a shell: see ``Strategy.stale_variables``.
docs/reference/config.md has a table of all cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Optional, Tuple

from mapsage.base.errors import UserError
from mapsage_launcher.shipped import script

from .launcher import launcher_environment

SINGLE_DEVICE = 'single_device'
DISTRIBUTED_DATA_PARALLEL = 'distributed_data_parallel'
MODEL_PARALLEL = 'model_parallel_single_process'

# Variables that torchrun sets for its ranks
# (torch/distributed/elastic/agent/server/local_elastic_agent.py). If they are left over in a shell,
# a single process would take itself for one rank of several.
LAUNCHER_VARIABLES = (
    'RANK',
    'WORLD_SIZE',
    'LOCAL_RANK',
    'LOCAL_WORLD_SIZE',
    'MASTER_ADDR',
    'MASTER_PORT',
    'GROUP_RANK',
    'GROUP_WORLD_SIZE',
    'ROLE_RANK',
    'ROLE_WORLD_SIZE',
    'ROLE_NAME',
    'TORCHELASTIC_RUN_ID',
    'TORCHELASTIC_USE_AGENT_STORE',
    'TORCHELASTIC_RESTART_COUNT',
    'TORCHELASTIC_MAX_RESTARTS',
)


class StrategyError(UserError, ValueError):
    """The requested strategy does not suit the launcher or the devices."""

    on_every_rank = True


@dataclass(frozen=True)
class Strategy:
    """How a run is spread over processes and devices.

    Attributes:
        name: Name of the strategy: ``'single_device'``, ``'distributed_data_parallel'`` or
            ``'model_parallel_single_process'``.
        stale_variables: Launcher variables that the launcher of this run has not set. They must be
            removed before any code reads them.
        reason: Reason for the choice, as one line for the log.
    """

    name: str
    stale_variables: Tuple[str, ...]
    reason: str


def resolve_strategy(
    use_model_parallel: Optional[bool],
    environ: Mapping[str, str],
    device_count: int,
    *,
    launcher: str = 'none',
    needed_bytes: Optional[int] = None,
    device_bytes: Optional[int] = None,
) -> Strategy:
    """Return the training strategy. Pure.

    Args:
        use_model_parallel: Setting of the config. True and False are followed, or raise an error.
            None chooses model parallelism in one process if there are two or more devices, no
            launcher, and the model does not fit on one device. Otherwise the launcher decides.
        environ: Environment of the process.
        device_count: Number of devices that this process sees.
        launcher: Launcher that started this process according to the command line: ``'none'``,
            ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        needed_bytes: Least memory for training the model on a device; None while unknown.
        device_bytes: Memory of one device; None if unknown.

    Raises:
        StrategyError: If the setting cannot be followed, the launcher's variables are incomplete,
            or torchrun started several processes with ``--launcher none``.
    """
    if not (use_model_parallel is None or isinstance(use_model_parallel, bool)):
        raise StrategyError(
            f'use_model_parallel must be True, False or None, got {use_model_parallel!r}.'
        )
    if device_count < 1:
        raise StrategyError(
            f'no device is visible (device count {device_count}). Choose another '
            f'accelerator, for example accelerator=cpu, or make one visible.'
        )
    if launcher != 'none':
        return _resolve_launched(use_model_parallel, environ, device_count, launcher)
    _refuse_forgotten_launcher(environ)
    stale = _stale_variables(environ)
    if use_model_parallel:
        return Strategy(MODEL_PARALLEL, stale, _describe_model_parallel(device_count))
    memory = _describe_memory(needed_bytes, device_bytes)
    too_big = needed_bytes is not None and device_bytes is not None and needed_bytes > device_bytes
    if use_model_parallel is None and too_big and device_count > 1:
        return Strategy(
            MODEL_PARALLEL, stale, f'{memory}; no launcher, so {device_count} devices share it'
        )
    reason = (
        'no launcher: one process on one device'
        if use_model_parallel is None
        else 'no launcher and use_model_parallel=False: one process on one device'
    )
    if device_count > 1:
        reason += f' of {device_count} (`{script("start_8card_training")}` trains on all)'
    if memory:
        reason += f'; {memory}'
    if too_big:
        reason += ', so it will run out of it'
    return Strategy(SINGLE_DEVICE, stale, reason)


def _resolve_launched(
    use_model_parallel: Optional[bool], environ: Mapping[str, str], device_count: int, launcher: str
) -> Strategy:
    """Return the strategy of a process that a launcher started."""
    try:
        # Only the number of processes matters here, so the first host's name is not resolved.
        variables = launcher_environment(launcher, environ, lambda hosts: hosts)
    except ValueError as error:
        raise StrategyError(str(error)) from error
    size = variables['WORLD_SIZE']
    world_size = int(size) if size.isdecimal() else 0
    if world_size < 1:
        raise StrategyError(
            f'launcher {launcher!r} says that it started WORLD_SIZE={size!r} '
            f'processes: expected 1 or more. Start with it again, or use '
            f'--launcher none for one process.'
        )
    if use_model_parallel and world_size > 1:
        raise StrategyError(
            f'use_model_parallel=True (or model_wrapper_cfg of type MMModelParallel) works in one '
            f'process, and launcher {launcher!r} started {world_size}. Start one (python '
            f'tools/train.py CONFIG) to spread the model over the devices of this machine, or set '
            f'env_cfg.use_model_parallel=None to train data-parallel.'
        )
    if use_model_parallel:
        return Strategy(MODEL_PARALLEL, (), _describe_model_parallel(device_count))
    return Strategy(
        DISTRIBUTED_DATA_PARALLEL,
        (),
        f'launcher {launcher} started {world_size} process(es): each trains the whole '
        f'model on a device of its own',
    )


def _describe_model_parallel(device_count: int) -> str:
    """Return the reason of use_model_parallel=True; StrategyError if there is a single device."""
    if device_count < 2:
        raise StrategyError(
            f'use_model_parallel=True needs two or more devices in one process, and {device_count} '
            f'is visible. Make more visible (CUDA_VISIBLE_DEVICES, TOPS_VISIBLE_DEVICES, '
            f'--accelerator), or set env_cfg.use_model_parallel=None.'
        )
    return f'use_model_parallel=True: {device_count} devices share the model in one process'


def _refuse_forgotten_launcher(environ: Mapping[str, str]) -> None:
    """Raise StrategyError if several processes were started, with ``--launcher none``."""
    world_size = environ.get('WORLD_SIZE', '')
    # torchrun sets its run id in its ranks only, so a shell rarely exports one. The pods of
    # Kubeflow's PyTorchJob have no LOCAL_RANK, which leftovers of torchrun have.
    if 'TORCHELASTIC_RUN_ID' in environ:
        engine, leftover = 'torchrun', 'TORCHELASTIC_RUN_ID'
    elif 'KUBERNETES_SERVICE_HOST' in environ and 'LOCAL_RANK' not in environ:
        engine, leftover = 'a job of Kubernetes', 'WORLD_SIZE'
    else:
        return
    if world_size.isdecimal() and int(world_size) > 1:
        raise StrategyError(
            f'{engine} started {world_size} processes (this is rank {environ.get("RANK", "?")}) '
            f'with --launcher none: each would train a model and write it into the same work dir. '
            f'Add --launcher pytorch. If this shell only inherited the variables, '
            f'unset {leftover}.'
        )


def _stale_variables(environ: Mapping[str, str]) -> Tuple[str, ...]:
    """Return the launcher variables to remove before a single process starts."""
    present: List[str] = [name for name in LAUNCHER_VARIABLES if name in environ]
    # MMSegmentation's tools/train.py sets LOCAL_RANK=0, which is right in a single process.
    if present == ['LOCAL_RANK'] and environ['LOCAL_RANK'] == '0':
        return ()
    return tuple(present)


def _describe_memory(needed_bytes: Optional[int], device_bytes: Optional[int]) -> str:
    """Return a text on the memory of the model and the device; '' while the need is unknown."""
    if needed_bytes is None:
        return ''
    available = (
        'memory of a device unknown'
        if device_bytes is None
        else f'a device has {format_bytes(device_bytes)}'
    )
    return f'the model needs {format_bytes(needed_bytes)} or more, {available}'


def format_bytes(count: int) -> str:
    """Return a number of bytes as a text in MiB or GiB."""
    return f'{count / 2**20:.1f} MiB' if count < 2**30 else f'{count / 2**30:.2f} GiB'
