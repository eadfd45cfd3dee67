"""Lines for the log about a run that deviates from its config. Pure.

Two deviations are reported: settings of the optimizer and its schedulers that a resumed checkpoint
replaced, and a learning-rate warm-up that is longer than the run. `engine/runner.py` logs the
lines.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple, TypeVar, Union

import numpy as np
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict, _ParamScheduler
from mmengine.optim.scheduler import ConstantParamScheduler, LinearParamScheduler

Schedulers = Union[Sequence[_ParamScheduler], Mapping[str, Sequence[_ParamScheduler]]]
T = TypeVar('T')

# Entries of a parameter group that are not settings of a config, or change with every step.
_NOT_SETTINGS = {
    'params',
    'param_names',
    'lr',
    'initial_lr',
    'momentum',
    'initial_momentum',
    'betas',
    'initial_betas',
}
_MAX_SHOWN = 8
# MMEngine's default of a scheduler's ``end``.
_ENDLESS = 10**9


def settings_of(
    optim_wrapper: Union[OptimWrapper, OptimWrapperDict], param_schedulers: Schedulers
) -> Dict[str, Any]:
    """Return the hyperparameters of optimizers and schedulers that a checkpoint may replace.

    Args:
        optim_wrapper: Built ``OptimWrapper`` or ``OptimWrapperDict``.
        param_schedulers: Built schedulers: a list, or a dict of lists.

    Returns:
        Values by name, such as ``{'lr': 0.01, 'param_scheduler[0].end': 1500}``. If the parameter
        groups of an optimizer differ, the value is a list with one element per group.
    """
    settings: Dict[str, Any] = {}
    for prefix, wrapper in _with_prefixes(optim_wrapper):
        groups = wrapper.optimizer.param_groups
        names = [name for group in groups for name in group if name not in _NOT_SETTINGS]
        for name in ['lr', 'momentum', 'betas', *names]:
            # A scheduler changes the value and keeps the config's one as initial_<name>. For Adam's
            # momentum it changes the betas.
            values = [
                group.get(f'initial_{name}', group[name])
                for group in groups
                if name in group and not (name == 'betas' and 'initial_momentum' in group)
            ]
            if values:
                settings[f'{prefix}{name}'] = values[0] if _all_equal(values) else values
    for prefix, schedulers in _with_prefixes(param_schedulers or []):
        for number, scheduler in enumerate(schedulers):
            state = scheduler.state_dict()
            for name in sorted(_argument_names(type(scheduler)) & set(state)):
                settings[f'{prefix}param_scheduler[{number}].{name}'] = state[name]
    return settings


def kept_settings(config_settings: Dict[str, Any], run_settings: Dict[str, Any]) -> str:
    """Return a line about settings of the config that the checkpoint has replaced.

    Args:
        config_settings: :func:`settings_of` before the checkpoint was loaded.
        run_settings: :func:`settings_of` afterwards.

    Returns:
        The line; empty if nothing differs.
    """
    replaced = [
        f'{name} {run_settings[name]} (not {value})'
        for name, value in config_settings.items()
        if name in run_settings and not _all_equal([value, run_settings[name]])
    ]
    if not replaced:
        return ''
    more = f' and {len(replaced) - _MAX_SHOWN} more' if len(replaced) > _MAX_SHOWN else ''
    return (
        f"the run continues with its checkpoint's {', '.join(replaced[:_MAX_SHOWN])}{more}: as "
        f'under MMEngine, a resumed optimizer and its schedulers keep their settings, whatever '
        f'the config or --cfg-options say. To train with other ones, start a run with '
        f'load_from=<checkpoint> and another work dir.'
    )


def long_warm_ups(param_schedulers: Schedulers, max_iters: int, max_epochs: int) -> List[str]:
    """Return a line for each learning-rate warm-up that ends only after the end of the run.

    Args:
        param_schedulers: Built schedulers: a list, or a dict of lists.
        max_iters: Iterations of the run.
        max_epochs: Epochs of the run.
    """
    return [
        line
        for _, schedulers in _with_prefixes(param_schedulers or [])
        for scheduler in schedulers
        for line in _long_warm_up(scheduler, max_iters, max_epochs)
    ]


def _long_warm_up(scheduler: _ParamScheduler, max_iters: int, max_epochs: int) -> Iterator[str]:
    unit, limit = ('epoch', max_epochs) if scheduler.by_epoch else ('iteration', max_iters)
    if scheduler.param_name != 'lr' or not scheduler.begin < limit < scheduler.end:
        return
    if isinstance(scheduler, LinearParamScheduler):
        if scheduler.start_factor >= scheduler.end_factor:
            return
        done = (limit - 1 - scheduler.begin) / max(1, scheduler.total_iters)
        factor = scheduler.start_factor + done * (scheduler.end_factor - scheduler.start_factor)
    elif isinstance(scheduler, ConstantParamScheduler) and scheduler.end < _ENDLESS:
        factor = scheduler.factor
    else:
        return
    rate = max(scheduler.base_values, default=0)
    yield (
        f'{type(scheduler).__name__} warms the learning rate up until {unit} {scheduler.end}, '
        f'but the run ends at {unit} {limit}: its rate reaches {rate * factor:.2g} and never '
        f'the {rate:.2g} of the config. Shorten the warm-up (param_scheduler, end) or train '
        f'longer (train_cfg).'
    )


def _with_prefixes(value: Union[T, Mapping[str, T]]) -> List[Tuple[str, T]]:
    """Return the entries of a mapping, each with a prefix such as ``'generator.'``.

    Any other value is returned as a single entry with an empty prefix.
    """
    if isinstance(value, (Mapping, OptimWrapperDict)):
        return [(f'{name}.', element) for name, element in value.items()]
    return [('', value)]


def _argument_names(kind: type) -> Set[str]:
    """Return the names of all arguments of a class and its bases."""
    return {
        name
        for base in kind.__mro__
        if '__init__' in vars(base)
        for name in inspect.signature(vars(base)['__init__']).parameters
    } - {'self', 'optimizer', 'last_step', 'verbose'}


def _all_equal(values: Sequence[object]) -> bool:
    return all(_to_plain(value) == _to_plain(values[0]) for value in values)


def _to_plain(value: Any) -> object:
    """Return ``value`` so that a list equals the tuple with the same elements."""
    # Arrays and tensors have no single truth value.
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        value = value.tolist()
    return tuple(map(_to_plain, value)) if isinstance(value, (list, tuple)) else value
