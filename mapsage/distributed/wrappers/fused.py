"""Correct steps of fused optimizers, ``optimizer=dict(fused=True)``, where torch has them.

Torch's fused kernels for the CPU walk over the memory of a parameter, its gradient and its averages
at once and ignore their strides. If a weight has its channels last, and its gradient (summed over
ranks) or its averages (from a checkpoint) have not, these kernels silently mix up the elements, and
the CUDA kernels raise an error (torch 2.13). :func:`watch_fused_steps` prevents both.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Dict, List, Mapping, Optional, Tuple, TypeVar

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS

from mapsage.accelerator import Accelerator, current_accelerator

_Config = TypeVar('_Config')


def why_not_fused(kind: type, accelerator: Accelerator) -> Optional[str]:
    """Return why optimizers of a class cannot be fused on an accelerator, or None if they can."""
    if not _takes(kind, 'fused'):
        return f'torch {torch.__version__} has no fused {kind.__name__}'
    if not accelerator.supports.fused_optimizer:
        return f'torch {torch.__version__} has no fused optimizers for {accelerator.name}'
    return None


@functools.lru_cache(maxsize=None)
def _takes(kind: type, argument: str) -> bool:
    return argument in inspect.signature(kind).parameters


# Optimizers whose fused steps compute the same formula on a card, see torch's documentation.
_FUSED_BY_DEFAULT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# Arguments that choose the kernels of a step.
_CHOICES = {'fused', 'foreach', 'capturable', 'differentiable'}


def with_default_fusion(config: _Config, accelerator: Accelerator) -> _Config:
    """Return ``optim_wrapper`` of a config with ``fused=True`` where it says nothing of kernels.

    Args:
        config: As for :func:`without_missing_fusion`.
        accelerator: Accelerator that carries out the steps.
    """
    if not isinstance(config, dict):
        return config
    config = copy.copy(config)
    for key, value in config.items():
        if key != 'optimizer' and isinstance(value, dict) and 'optimizer' in value:
            config[key] = with_default_fusion(value, accelerator)
    optimizer = config.get('optimizer')
    # Wrappers of other packages step in their own way.
    kinds = (None, 'OptimWrapper', 'AmpOptimWrapper')
    if isinstance(optimizer, dict) and config.get('type') in kinds:
        kind = _optimizer_class(optimizer)
        if (
            kind in _FUSED_BY_DEFAULT
            and not _CHOICES & set(optimizer)
            and why_not_fused(kind, accelerator) is None
        ):
            config['optimizer'] = {**optimizer, 'fused': True}
    return config


def _optimizer_class(optimizer: Dict[str, object]) -> object:
    name_or_class = optimizer.get('type')
    return OPTIMIZERS.get(name_or_class) if isinstance(name_or_class, str) else name_or_class


def without_missing_fusion(config: _Config, accelerator: Accelerator) -> Tuple[_Config, List[str]]:
    """Return ``optim_wrapper`` of a config without ``fused=True`` where torch has no such kernels.

    Where steps over lists of tensors are wrong too, it has ``foreach=False``.

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
            config[key], wrapper_notes = without_missing_fusion(value, accelerator)
            notes += wrapper_notes
    optimizer = config.get('optimizer')
    if not isinstance(optimizer, dict):
        return config, notes
    fused = optimizer.get('fused')
    if not fused and accelerator.supports.foreach_optimizer:
        return config, notes
    kind = _optimizer_class(optimizer)
    if not isinstance(kind, type):
        return config, notes
    reason = why_not_fused(kind, accelerator) if fused else None
    if reason is not None:
        config['optimizer'] = {key: value for key, value in optimizer.items() if key != 'fused'}
        notes.append(
            f'optimizer.fused=True has no effect: {reason}. The steps are the same, by '
            f'other kernels.'
        )
    if (
        (not fused or reason is not None)
        and not accelerator.supports.foreach_optimizer
        and _takes(kind, 'foreach')
        and optimizer.get('foreach') is not False
    ):
        config['optimizer'] = {**config['optimizer'], 'foreach': False}
        notes.append(
            f'optimizer.foreach=False is set, because steps over lists of tensors are '
            f'wrong on this {accelerator.name} device.'
        )
    return config, notes


def watch_fused_steps(wrapper: OptimWrapper) -> OptimWrapper:
    """Prepare the fused steps of all optimizers of a wrapper, see :class:`FusedStepPreparation`.

    Optimizers that are not fused are watched too, because a checkpoint may make them fused.

    Args:
        wrapper: Wrapper of one optimizer, or an ``OptimWrapperDict``.

    Returns:
        ``wrapper``.
    """
    wrappers: Mapping[str, OptimWrapper] = (
        wrapper.optim_wrappers if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    )
    for optim_wrapper in wrappers.values():
        optimizer: object = optim_wrapper.optimizer
        # torch 2.0 introduced both this default and the hook.
        if isinstance(optimizer, torch.optim.Optimizer) and 'fused' in optimizer.defaults:
            optimizer.register_step_pre_hook(FusedStepPreparation())
    return wrapper


class FusedStepPreparation:
    """Gives gradients and averages the layout of their parameters before fused steps.

    torch creates averages in the layout of their parameters. So they are looked at only before the
    first step, after a checkpoint was loaded, and when a parameter's layout has changed: looking at
    all of them took 4.8 ms a step with 150 parameter groups.
    """

    def __init__(self) -> None:
        # What the averages were checked with: the optimizer's state, which `load_state_dict`
        # replaces, and the strides of the parameters.
        self._state: object = None
        self._strides: List[Tuple[int, ...]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Prepare the next step of an optimizer, which is always the same one.

        If this accelerator has no fused step, because the checkpoint comes from another kind of
        device, the optimizer becomes a plain one.
        """
        # MMEngine makes the groups ConfigDicts, which are slow to read.
        groups = [group for group in optimizer.param_groups if dict.get(group, 'fused')]
        if groups and why_not_fused(type(optimizer), current_accelerator()) is not None:
            for group in groups:
                group['fused'] = None
            return
        parameters = [
            parameter
            for group in groups
            for parameter in dict.__getitem__(group, 'params')
            if parameter.grad is not None
        ]
        strides = [parameter.stride() for parameter in parameters]
        for parameter, stride in zip(parameters, strides):
            if parameter.grad.stride() != stride and not _same_layout(parameter.grad, parameter):
                parameter.grad = _copy_in_layout(parameter.grad, parameter)
        if optimizer.state is not self._state or strides != self._strides:
            for parameter in parameters:
                _lay_out_averages(optimizer.state.get(parameter, {}), parameter)
            self._state, self._strides = optimizer.state, strides


def _lay_out_averages(state: Dict[str, object], parameter: torch.Tensor) -> None:
    """Give the averages of a parameter its layout."""
    for name, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == parameter.shape
            and not _same_layout(value, parameter)
        ):
            state[name] = _copy_in_layout(value, parameter)


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether the elements of two tensors of one shape lie in the same order in memory."""
    if first.stride() == second.stride() or (first.is_contiguous() and second.is_contiguous()):
        return True
    return first.dim() == 4 and all(
        tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (first, second)
    )


def _copy_in_layout(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor.detach())
