"""How a plain model is wrapped for the ranks of a run, and what a wrapper cannot do."""
from __future__ import annotations

import copy
from typing import Any, Dict, Mapping, Optional

from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed import resolve_reduction
from mapsage.distributed.groups.process_group import uses_native_group
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.wrappers.batch_counts import gives_counts, names_of_counters

from .compiled_parts import CompileError, check_parts
from .virtual_settings import short_name


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
    return MODEL_WRAPPERS.build(wrapper, default_args=defaults)


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
