"""Fused optimizers, ``optimizer=dict(fused=True)``: where torch has them, and only correctly.

Torch's fused kernels for the CPU walk over the memory of a parameter, its gradient and its averages
at once, without a look at their layouts. Where these differ, such as a gradient that was added up
over ranks or averages from a checkpoint beside a weight with channels last, they silently mix up
the elements (torch 2.13; those of CUDA raise an error).
"""
from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, List, Optional, Tuple

import torch
from mmengine.registry import OPTIMIZERS

from mapsage.accelerator import Accelerator, current_accelerator


def why_not_fused(kind: Any, accelerator: Accelerator) -> Optional[str]:
    """Return why optimizers of a class cannot be fused on an accelerator, or None if they can."""
    if not _takes_fused(kind):
        return f'torch {torch.__version__} has no fused {kind.__name__}'
    if not accelerator.supports.fused_optimizer:
        return f'torch {torch.__version__} has no fused optimizers for {accelerator.name}'
    return None


@functools.lru_cache(maxsize=None)
def _takes_fused(kind: Any) -> bool:
    return 'fused' in inspect.signature(kind).parameters


def without_missing_fusion(config: Any, accelerator: Accelerator) -> Tuple[Any, List[str]]:
    """Return ``optim_wrapper`` of a config without ``fused=True`` where there is none.

    Args:
        config: Config of one optimizer wrapper or of several by name. It is not changed.
        accelerator: Accelerator that carries out the steps.

    Returns:
        The config, and a sentence for the log about each optimizer that was changed.
    """
    if not isinstance(config, dict):
        return config, []
    config, notes = copy.copy(config), []
    for key, value in config.items():
        if key != 'optimizer' and isinstance(value, dict) and 'optimizer' in value:
            config[key], more = without_missing_fusion(value, accelerator)
            notes += more
    optimizer = config.get('optimizer')
    if not isinstance(optimizer, dict) or not optimizer.get('fused'):
        return config, notes
    named = optimizer.get('type')
    kind = OPTIMIZERS.get(named) if isinstance(named, str) else named
    reason = why_not_fused(kind, accelerator) if isinstance(kind, type) else None
    if reason is not None:
        config['optimizer'] = {key: value for key, value in optimizer.items() if key != 'fused'}
        notes.append(f'optimizer.fused=True has no effect: {reason}. The steps are the same, by '
                     f'other kernels.')
    return config, notes


def watch_fused_steps(wrapper: Any) -> Any:
    """Have each optimizer of an ``OptimWrapper`` or ``OptimWrapperDict`` prepare fused steps.

    A checkpoint brings its own settings, so that any optimizer may become a fused one.

    Returns:
        ``wrapper``.
    """
    for each in getattr(wrapper, 'optim_wrappers', {'': wrapper}).values():
        optimizer: Any = getattr(each, 'optimizer', None)
        if 'fused' in getattr(optimizer, 'defaults', ()):  # since torch 2.0, as the hook
            optimizer.register_step_pre_hook(lambda optimizer, *_: prepare_fused_step(optimizer))
    return wrapper


def prepare_fused_step(optimizer: torch.optim.Optimizer) -> None:
    """Lay out gradients and averages as their parameters, where a fused step will read them.

    Where there is no fused step, as after a move of the run to another kind of device, a plain one
    takes its place.
    """
    groups = [group for group in optimizer.param_groups if group.get('fused')]
    if groups and why_not_fused(type(optimizer), current_accelerator()) is not None:
        for group in groups:
            group['fused'] = None
        return
    for group in groups:
        for parameter in group['params']:
            if parameter.grad is None:
                continue
            if not _alike(parameter.grad, parameter):
                parameter.grad = _laid_out(parameter.grad, parameter)
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape \
                        and not _alike(value, parameter):
                    state[name] = _laid_out(value, parameter)


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.stride() == other.stride() or all(
        each.is_contiguous() for each in (tensor, other)) or tensor.dim() == 4 and all(
            each.is_contiguous(memory_format=torch.channels_last) for each in (tensor, other))


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype,
                               device=tensor.device).copy_(tensor.detach())
