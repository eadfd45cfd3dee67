"""Least memory that a training needs, from which MapSage decides whether a model fits a device.

Activations are not counted, because they depend on the batch and the model's code.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator

import torch
from torch import nn

# Number of tensors of a parameter's size that an optimizer stores per parameter, with default
# options (from the classes' `_init_group` in torch.optim).
_STATES = {
    'SGD': 0,
    'ASGD': 1,
    'Adagrad': 1,
    'RMSprop': 1,
    'Rprop': 2,
    'Adadelta': 2,
    'Adam': 2,
    'AdamW': 2,
    'Adamax': 2,
    'NAdam': 2,
    'RAdam': 2,
    'SparseAdam': 2,
    'Adafactor': 0,
    'Lion': 1,
}
# Other optimizers are mostly variants of Adam.
_UNKNOWN = 2
# Options with which the optimizer stores one more tensor per parameter.
_OPTIONS = {'momentum': ('SGD', 'RMSprop'), 'centered': ('RMSprop',), 'amsgrad': ('Adam', 'AdamW')}


def estimate_training_bytes(model: nn.Module, optim_wrapper_cfg: object = None) -> int:
    """Return the bytes of parameters, gradients, optimizer state and buffers. Pure.

    This is a lower bound: activations, autocast's copies and a moving average of the weights need
    more. Shared parameters count once; frozen ones have neither gradient nor state.

    Args:
        model: The model, on any device.
        optim_wrapper_cfg: ``optim_wrapper`` of a config, a built wrapper or optimizer, or several
            in a dict (the optimizer with the most state counts for every parameter); None for a
            model that is only tested.
    """
    stored = sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    if optim_wrapper_cfg is None:
        return stored
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return stored + trained * (1 + max(_optimizer_states(optim_wrapper_cfg), default=_UNKNOWN))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_states(wrapper: object) -> Iterator[int]:
    optimizer = (
        wrapper.get('optimizer')
        if isinstance(wrapper, dict)
        else (getattr(wrapper, 'optimizer', wrapper))
    )
    if isinstance(optimizer, dict):
        kind = optimizer.get('type', '')
        yield _states(kind if isinstance(kind, str) else kind.__name__, optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield _states(type(optimizer).__name__, optimizer.defaults)
    elif isinstance(wrapper, dict):
        # One wrapper for each part of the model, and other settings.
        for value in wrapper.values():
            if isinstance(value, dict) or hasattr(value, 'optimizer'):
                yield from _optimizer_states(value)


def _states(name: str, options: Dict[str, Any]) -> int:
    extra = sum(1 for option, kinds in _OPTIONS.items() if name in kinds and options.get(option))
    return _STATES.get(name, _UNKNOWN) + extra
