"""How a plain model is wrapped for the ranks of a run, and what a wrapper cannot do."""
from __future__ import annotations

import copy
import difflib
import inspect
import re
from typing import Any, Dict, Mapping, Optional

import torch
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapsage.accelerator import Accelerator
from mapsage.distributed import local_rank, resolve_reduction
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.wrappers.batch_counts import gives_counts, names_of_counters
from mapsage.wrappers.placement import place_module

from .compiled_parts import CompileError, check_parts
from .env_cfg import ConfigError
from .virtual_settings import short_name

_DDP_OPTIONS = list(inspect.signature(DistributedDataParallel).parameters)[1:]


def wrap_for_ranks(model: nn.Module, wrapper_cfg: Optional[Mapping[str, Any]],
                   find_unused_parameters: bool, accelerator: Accelerator, ranks: VirtualRanks,
                   distributed: bool, asked: Optional[str]) -> nn.Module:
    """Return a model in the wrapper that sums the gradients of its ranks.

    Args:
        model: Plain model.
        wrapper_cfg: ``model_wrapper_cfg`` of the config, or None for MMDistributedDataParallel.
        find_unused_parameters: Argument of the wrapper where ``wrapper_cfg`` is None.
        accelerator: Accelerator that holds the model.
        ranks: Virtual ranks of the run and their processes.
        distributed: Whether there is more than one process.
        asked: ``env_cfg.reduction``.

    Raises:
        ConfigError: If the wrapper does not exist, has no such option, or cannot work here.
    """
    wrapper: Dict[str, Any] = copy.deepcopy(dict(wrapper_cfg)) if wrapper_cfg else dict(
        broadcast_buffers=False, find_unused_parameters=find_unused_parameters)
    wrapper.setdefault('type', 'MMDistributedDataParallel')
    defaults: Dict[str, Any] = dict(module=model)
    if short_name(wrapper['type']) == 'MMDistributedDataParallel':
        wrapper['type'] = 'MMDistributedDataParallel'  # never MMEngine's own class
        native = distributed and uses_native_group(accelerator)
        reduction = _reduction(asked, accelerator, ranks, distributed, native)
        if not ranks.one_each or reduction == 'ordered' and (
                accelerator.lazy or native):  # where DDP takes no hook
            wrapper['type'] = 'VirtualDataParallel'
            defaults.update(virtual_ranks=ranks, reduction=reduction)
        elif not native:
            defaults.update(reduction=reduction)
    else:
        _check_type(wrapper['type'], accelerator)
        # As under MMEngine: a wrapper finds the model on the device of its rank.
        defaults.update(module=place_module(model, accelerator, local_rank()))
    try:
        return MODEL_WRAPPERS.build(wrapper, default_args=defaults)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in wrapper:
            raise
        near = difflib.get_close_matches(unknown[1], _DDP_OPTIONS, 1)
        raise ConfigError(
            f"model_wrapper_cfg.{unknown[1]}={wrapper[unknown[1]]!r}: "
            f"{short_name(wrapper['type'])} of torch {torch.__version__} has no such option. "
            + (f'Did you mean {near[0]!r}?' if near else 'Remove it.')) from error


def _check_type(kind: Any, accelerator: Accelerator) -> None:
    """Raise ConfigError if a run on an accelerator cannot use a class of wrappers."""
    wrapper_class = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    name = short_name(kind)
    if name == 'MMFullyShardedDataParallel' or isinstance(wrapper_class, type) and any(
            base.__name__ == 'FullyShardedDataParallel' for base in wrapper_class.__mro__):
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} leaves each rank a part of every weight, and '
            f'checkpoints, resuming and the checks between ranks need whole weights on each. '
            f'Remove it, or set env_cfg.use_model_parallel=True in one process for a model that '
            f'does not fit a device.')
    if wrapper_class is None:
        near = difflib.get_close_matches(name, MODEL_WRAPPERS.module_dict, 1)
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} is not registered in MODEL_WRAPPERS. '
            + (f'Did you mean {near[0]!r}?' if near else
               'Name the module that registers it in custom_imports, or remove model_wrapper_cfg.'))
    if isinstance(wrapper_class, type) and uses_native_group(accelerator) and issubclass(
            wrapper_class, DistributedDataParallel):
        raise ConfigError(
            f'model_wrapper_cfg.type={name!r} adds gradients up over torch.distributed, which '
            f'does not reach the devices of {accelerator.name}. Remove it: '
            f"MMDistributedDataParallel takes the vendor's DDP there.")


def _reduction(asked: Optional[str], accelerator: Accelerator, ranks: VirtualRanks,
               distributed: bool, native: bool) -> str:
    """Return how gradients are added up, and log why."""
    # in one process nothing travels
    chosen = resolve_reduction(asked, accelerator) if distributed else 'ordered'
    if native and not ranks.one_each:
        chosen = 'ordered'  # the vendor's library is reached through its own DDP alone
    MMLogger.get_current_instance().info(
        f'gradients are added up by reduction {chosen!r}' + (
            ', along one tree over the virtual ranks: the same bits on any number of '
            'processes' if chosen == 'ordered' else
            ', the sum of the backend: another number of processes gives other bits (set '
            "env_cfg.reduction='ordered' for the same ones)"))
    return chosen


def training_obstacle(wrapper: nn.Module, asked: Optional[str], compile_setting: Any,
                      accelerator: Accelerator, world_size: int) -> Optional[Exception]:
    """Return the error of a training that a wrapped model cannot carry out as asked, if any.

    Args:
        wrapper: Model as the run wraps it.
        asked: ``env_cfg.reduction``.
        compile_setting: ``compile`` of the config.
        accelerator: Accelerator that holds the model.
        world_size: Number of processes.
    """
    kind = type(wrapper).__name__
    if asked == 'ordered' and is_model_wrapper(wrapper) and (
            getattr(wrapper, 'reduction', None) != 'ordered'):
        return VirtualRanksError(
            f"env_cfg.reduction='ordered' with the model wrapper {kind}, which adds gradients "
            f'up in its own way, or none: expected a plain model and MMDistributedDataParallel '
            f'(or no model_wrapper_cfg). Remove the setting to train with {kind}.')
    names = names_of_counters(wrapper)
    if names and world_size > 1 and not gives_counts(wrapper):
        return VirtualRanksError(
            f"{', '.join(names)} counts over the global batch, and the model wrapper {kind} "
            f'gives it no sums over the ranks: each rank would train with its own counts. '
            f'Expected a plain model and MMDistributedDataParallel (or no model_wrapper_cfg).')
    try:
        check_parts(wrapper, compile_setting, accelerator)
    except CompileError as error:
        return error
    return None
