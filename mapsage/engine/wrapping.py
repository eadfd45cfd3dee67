"""How the model of a run is wrapped, decided in one place.

:func:`wrap_model` chooses among five ways: the wrapper that the model already has, several devices
of one process, one device, the wrapper of a run extension, and the ranks' own data parallelism.
The choice needs the strategy and the virtual ranks of the run, which are settled here too, because
they depend on the model's size and layers. The wrappers themselves are in ``mapsage/distributed/wrappers/``.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import re
from typing import Any, Callable, Dict, Mapping, Optional, Union

import torch
from mmengine.logging import MMLogger
from mmengine.model import convert_sync_batchnorm, is_model_wrapper, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapsage.accelerator import Accelerator
from mapsage.distributed import (
    RankError,
    Strategy,
    local_rank,
    resolve_reduction,
    resolve_strategy,
)
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.distributed.wrappers import (
    MMDistributedDataParallel,
    VirtualDataParallel,
    place_module,
)
from mapsage.distributed.wrappers.batch_counts import gives_counts, names_of_counters
from mapsage.distributed.wrappers.placement import has_sync_batchnorm

from .checkpoints.resume import ResumeError
from .compiled_parts import CompileError, check_parts
from .env_cfg import ConfigError, short_name
from .extensions.resume import choose_for_all_ranks
from .extensions.virtual_ranks import log_virtual_ranks, settle_ranks_of_run
from .run_extension import EngineRun
from .training_memory import estimate_training_bytes

WrapperConfig = Optional[Mapping[str, Any]]

_DDP_OPTIONS = list(inspect.signature(DistributedDataParallel).parameters)[1:]


def wrap_model(
    run: EngineRun,
    wrapper_cfg: WrapperConfig,
    model: nn.Module,
    keep: Callable[[WrapperConfig, nn.Module], nn.Module],
) -> nn.Module:
    """Return a model in the wrapper with which the run trains and tests it.

    Sets the strategy and the virtual ranks of the run. What rules out a training, but not a test,
    is handed to :meth:`EngineRun.rule_out_training`.

    Args:
        run: The run; its ranks have met.
        wrapper_cfg: ``model_wrapper_cfg`` of the config, if there is one.
        model: Model, plain or wrapped by the user.
        keep: MMEngine's ``wrap_model``, which checks a model that is already wrapped.

    Raises:
        ConfigError: If the wrapper does not exist, has no such option, or cannot work here.
        StrategyError: If the model cannot be distributed as ``env_cfg`` demands.
    """
    if is_model_wrapper(model):
        _take_processes_as_virtual_ranks(run, model)
        wrapper = keep(wrapper_cfg, model)
    else:
        wrapper = _wrap_plain_model(run, wrapper_cfg, model)
    run.rule_out_training(
        training_obstacle(
            wrapper, run.env.reduction, run.cfg.get('compile'), run.accelerator, run.world_size
        )
    )
    return wrapper


def _wrap_plain_model(run: EngineRun, wrapper_cfg: WrapperConfig, model: nn.Module) -> nn.Module:
    run.strategy = choose_strategy(run, estimate_training_bytes(model, run.optim_wrapper))
    run.logger.info(f'strategy {run.strategy.name}: {run.strategy.reason}')
    run.computes_sync_bn = run.accelerator.supports.sync_bn and has_sync_batchnorm(model)
    _settle_virtual_ranks(run)
    if run.strategy.name == MODEL_PARALLEL:
        wrapper = copy.deepcopy(dict(wrapper_cfg or {}))
        if short_name(wrapper.get('type')) != 'MMModelParallel':
            # The wrapper of the config is for several processes.
            wrapper = dict(type='MMModelParallel')
        return MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))
    if not run.distributed and run.virtual_ranks.one_each:
        return place_module(revert_sync_batchnorm(model), run.accelerator, 0)
    if run.cfg.get('sync_bn') and run.accelerator.supports.sync_bn:
        model = convert_sync_batchnorm(model, run.cfg.sync_bn)
    for extension in run.extensions:
        wrapped = extension.wrap_model(run, model)
        if wrapped is not None:
            return wrapped
    return wrap_for_ranks(
        model,
        wrapper_cfg,
        run.cfg.get('find_unused_parameters', False),
        run.accelerator,
        run.virtual_ranks,
        run.distributed,
        run.env.reduction,
    )


def _take_processes_as_virtual_ranks(run: EngineRun, model: nn.Module) -> None:
    """Give every process one virtual rank, since a user's wrapper knows processes only."""
    processes, configured = run.world_size, run.env.virtual_ranks
    run.virtual_ranks = VirtualRanks(processes, processes)
    if configured not in (None, processes):
        run.rule_out_training(
            VirtualRanksError(
                f'env_cfg.virtual_ranks={configured} with {processes} process(es) and a model that is '
                f'wrapped already ({type(model).__name__}): expected a plain model, which is wrapped '
                f'for them.'
            )
        )


def choose_resumed_checkpoint(run: EngineRun) -> None:
    """Choose the checkpoint of a training that is resumed; an error rules out the training."""
    try:
        if run._resume and run.resume_choice is None and run._train_loop is not None:
            run.resume_choice = choose_for_all_ranks(run)
    except (ResumeError, RankError, OSError) as error:
        run.rule_out_training(error)


def _settle_virtual_ranks(run: EngineRun) -> None:
    """Settle the virtual ranks; an error rules out the training. A test needs none."""
    try:
        run.virtual_ranks = settle_ranks_of_run(run)
        log_virtual_ranks(run)
    except VirtualRanksError as error:
        run.virtual_ranks = VirtualRanks(run.world_size, run.world_size)
        run.rule_out_training(error)


def choose_strategy(run: EngineRun, needed_bytes: Optional[int] = None) -> Strategy:
    """Return how a run is spread over processes and devices.

    Args:
        run: The run; its accelerator is chosen.
        needed_bytes: Least memory of a training; None while the model is not built.

    Raises:
        StrategyError: If ``use_model_parallel`` cannot be obeyed, or the launcher's variables do
            not fit the launcher.
    """
    # MMModelParallel may be given other devices than the accelerator's, such as the CPU.
    devices = (run.cfg.get('model_wrapper_cfg') or {}).get('devices')
    count = len(devices) if devices else run.accelerator.device_count()
    return resolve_strategy(
        run.env.use_model_parallel,
        os.environ,
        count,
        launcher=run.launcher,
        needed_bytes=needed_bytes,
        device_bytes=None if needed_bytes is None else run.accelerator.memory_total(),
    )


def wrap_for_ranks(
    model: nn.Module,
    wrapper_cfg: WrapperConfig,
    find_unused_parameters: bool,
    accelerator: Accelerator,
    ranks: VirtualRanks,
    distributed: bool,
    reduction: Optional[str],
) -> nn.Module:
    """Return a plain model in the wrapper that sums the gradients of all ranks.

    Args:
        model: Plain model.
        wrapper_cfg: ``model_wrapper_cfg`` of the config. None stands for
            MMDistributedDataParallel.
        find_unused_parameters: Argument of the wrapper without a ``wrapper_cfg``.
        accelerator: Accelerator that holds the model.
        ranks: Virtual ranks of the run and their processes.
        distributed: Whether there is more than one process.
        reduction: ``env_cfg.reduction``.

    Raises:
        ConfigError: If the wrapper does not exist, has no such option, or cannot work here.
    """
    wrapper: Dict[str, Any] = (
        copy.deepcopy(dict(wrapper_cfg))
        if wrapper_cfg
        else dict(broadcast_buffers=False, find_unused_parameters=find_unused_parameters)
    )
    wrapper.setdefault('type', 'MMDistributedDataParallel')
    defaults: Dict[str, Any] = dict(module=model)
    if short_name(wrapper['type']) == 'MMDistributedDataParallel':
        # MapSage's class of this name, also if the config names MMEngine's.
        wrapper['type'] = 'MMDistributedDataParallel'
        native = distributed and uses_native_group(accelerator)
        chosen = _choose_reduction(reduction, accelerator, ranks, distributed, native)
        ddp_takes_no_hook = accelerator.lazy or native
        if not ranks.one_each or (chosen == 'ordered' and ddp_takes_no_hook):
            wrapper['type'] = 'VirtualDataParallel'
            defaults.update(virtual_ranks=ranks, reduction=chosen)
        elif not native:
            defaults.update(reduction=chosen)
    else:
        _check_type(wrapper['type'], accelerator)
        # As under MMEngine, a wrapper is given the model on the device of its rank.
        defaults.update(module=place_module(model, accelerator, local_rank()))
    try:
        return MODEL_WRAPPERS.build(wrapper, default_args=defaults)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in wrapper:
            raise
        near = difflib.get_close_matches(unknown[1], _DDP_OPTIONS, 1)
        raise ConfigError(
            f'model_wrapper_cfg.{unknown[1]}={wrapper[unknown[1]]!r}: '
            f'{short_name(wrapper["type"])} of torch {torch.__version__} has no such option. '
            + (f'Did you mean {near[0]!r}?' if near else 'Remove it.')
        ) from error


def _check_type(kind: Union[str, type], accelerator: Accelerator) -> None:
    """Raise ConfigError if a run on this accelerator cannot use a wrapper, named or as a class."""
    wrapper_class = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    name = short_name(kind)
    if (
        name == 'MMFullyShardedDataParallel'
        or isinstance(wrapper_class, type)
        and any(base.__name__ == 'FullyShardedDataParallel' for base in wrapper_class.__mro__)
    ):
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} leaves each rank a part of every weight, and '
            f'checkpoints, resuming and the checks between ranks need whole weights on each. '
            f'Remove it, or set env_cfg.use_model_parallel=True in one process for a model that '
            f'does not fit a device.'
        )
    if wrapper_class is None:
        near = difflib.get_close_matches(name, MODEL_WRAPPERS.module_dict, 1)
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} is not registered in MODEL_WRAPPERS. '
            + (
                f'Did you mean {near[0]!r}?'
                if near
                else 'Name the module that registers it in custom_imports, or remove model_wrapper_cfg.'
            )
        )
    if (
        isinstance(wrapper_class, type)
        and uses_native_group(accelerator)
        and issubclass(wrapper_class, DistributedDataParallel)
    ):
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} adds gradients up over torch.distributed, which '
            f'does not reach the devices of {accelerator.name}. Remove it: '
            f"MMDistributedDataParallel takes the vendor's DDP there."
        )


def _choose_reduction(
    configured: Optional[str],
    accelerator: Accelerator,
    ranks: VirtualRanks,
    distributed: bool,
    native: bool,
) -> str:
    """Return how gradients are added up, and log why."""
    # A single process sends nothing, so the order costs nothing.
    chosen = resolve_reduction(configured, accelerator) if distributed else 'ordered'
    if native and not ranks.one_each:
        # Only the vendor's own DDP reaches the vendor's library, and it has one rank per process.
        chosen = 'ordered'
    MMLogger.get_current_instance().info(
        f'gradients are added up by reduction {chosen!r}'
        + (
            ', along one tree over the virtual ranks: the same bits on any number of processes'
            if chosen == 'ordered'
            else ', the sum of the backend: another number of processes gives other bits (set '
            "env_cfg.reduction='ordered' for the same ones)"
        ),
        extra=dict(for_file=chosen == 'ordered'),
    )
    return chosen


def training_obstacle(
    wrapper: nn.Module,
    reduction: Optional[str],
    compile_setting: object,
    accelerator: Accelerator,
    world_size: int,
) -> Optional[Exception]:
    """Return the error of a training that the wrapped model cannot carry out, or None.

    Args:
        wrapper: Model as the run wraps it.
        reduction: ``env_cfg.reduction``.
        compile_setting: ``compile`` of the config.
        accelerator: Accelerator that holds the model.
        world_size: Number of processes.
    """
    kind = type(wrapper).__name__
    adds_in_order = (
        isinstance(wrapper, (MMDistributedDataParallel, VirtualDataParallel))
        and wrapper.reduction == 'ordered'
    )
    if reduction == 'ordered' and is_model_wrapper(wrapper) and not adds_in_order:
        return VirtualRanksError(
            f"env_cfg.reduction='ordered' with the model wrapper {kind}, which adds gradients "
            f'up in its own way, or none: expected a plain model and MMDistributedDataParallel '
            f'(or no model_wrapper_cfg). Remove the setting to train with {kind}.'
        )
    names = names_of_counters(wrapper)
    if names and world_size > 1 and not gives_counts(wrapper):
        return VirtualRanksError(
            f'{", ".join(names)} counts over the global batch, and the model wrapper {kind} '
            f'gives it no sums over the ranks: each rank would train with its own counts. '
            f'Expected a plain model and MMDistributedDataParallel (or no model_wrapper_cfg).'
        )
    try:
        check_parts(wrapper, compile_setting, accelerator)
    except CompileError as error:
        return error
    return None
