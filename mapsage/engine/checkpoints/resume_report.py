"""What a run does otherwise than its config says: a checkpoint's settings, a long warm-up. Pure."""
from __future__ import annotations

import inspect
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

from mmengine.optim.scheduler import ConstantParamScheduler, LinearParamScheduler

# Entries of a parameter group that are no settings of a config, or change with every step.
_NO_SETTINGS = {'params', 'param_names', 'lr', 'initial_lr', 'momentum', 'initial_momentum',
                'betas', 'initial_betas'}
_SHOWN = 8
_ENDLESS = 10**9  # MMEngine's default of a scheduler's ``end``


def settings_of(optim_wrapper: Any, param_schedulers: Any) -> Dict[str, Any]:
    """Return the hyperparameters of optimizers and schedulers that a checkpoint may replace.

    Args:
        optim_wrapper: Built ``OptimWrapper`` or ``OptimWrapperDict``.
        param_schedulers: Built schedulers: a list, or a dict of lists.

    Returns:
        Values by name; in the order of the optimizer's groups where they differ between these.
    """
    found: Dict[str, Any] = {}
    for prefix, wrapper in _named(optim_wrapper):
        groups = wrapper.optimizer.param_groups
        names = [name for group in groups for name in group if name not in _NO_SETTINGS]
        for name in ['lr', 'momentum', 'betas', *names]:
            # A scheduler changes a value and keeps that of the config as the initial one. For the
            # momentum of Adam it changes the betas.
            values = [group.get(f'initial_{name}', group[name]) for group in groups
                      if name in group and not (name == 'betas' and 'initial_momentum' in group)]
            if values:
                found[f'{prefix}{name}'] = values[0] if _all_equal(values) else values
    for prefix, schedulers in _named(param_schedulers or []):
        for number, scheduler in enumerate(schedulers):
            state = scheduler.state_dict()
            for name in sorted(_arguments(type(scheduler)) & set(state)):
                found[f'{prefix}param_scheduler[{number}].{name}'] = state[name]
    return found


def kept_settings(asked: Dict[str, Any], kept: Dict[str, Any]) -> str:
    """Return a line about settings of the config that the checkpoint has replaced.

    Args:
        asked: :func:`settings_of` before the checkpoint was loaded.
        kept: The same afterwards.

    Returns:
        The line; empty if nothing differs.
    """
    other = [f'{name} {kept[name]} (not {asked[name]})' for name in asked
             if name in kept and not _all_equal([asked[name], kept[name]])]
    if not other:
        return ''
    more = f' and {len(other) - _SHOWN} more' if len(other) > _SHOWN else ''
    return (f"the run goes on with its checkpoint's {', '.join(other[:_SHOWN])}{more}: as under "
            f"MMEngine a resumed optimizer and its schedulers keep their settings, whatever the "
            f"config or --cfg-options say. To train with other ones, start a run with "
            f'load_from=<checkpoint> and another work dir.')


def long_warm_ups(param_schedulers: Any, max_iters: int, max_epochs: int) -> List[str]:
    """Return a line for each warm-up of the learning rate that the run does not live to see end.

    Args:
        param_schedulers: Built schedulers: a list, or a dict of lists.
        max_iters: Iterations of the run.
        max_epochs: Epochs of the run.
    """
    return [line for _, schedulers in _named(param_schedulers or []) for scheduler in schedulers
            for line in _long_warm_up(scheduler, max_iters, max_epochs)]


def _long_warm_up(scheduler: Any, max_iters: int, max_epochs: int) -> Iterator[str]:
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
    yield (f'{type(scheduler).__name__} warms the learning rate up until {unit} {scheduler.end}, '
           f'but the run ends at {unit} {limit}: its rate reaches {rate * factor:.2g} and never '
           f'the {rate:.2g} of the config. Shorten the warm-up (param_scheduler, end) or train '
           f'longer (train_cfg).')


def _named(value: Any) -> List[Tuple[str, Any]]:
    if not hasattr(value, 'items'):
        return [('', value)]
    return [(f'{name}.', each) for name, each in value.items()]


def _arguments(kind: type) -> Set[str]:
    """Return the names of all arguments of a class and its bases."""
    return {name for each in kind.__mro__ if '__init__' in vars(each)
            for name in inspect.signature(vars(each)['__init__']).parameters} - {
                'self', 'optimizer', 'last_step', 'verbose'}


def _all_equal(values: Sequence[Any]) -> bool:
    return all(_plain(value) == _plain(values[0]) for value in values)


def _plain(value: Any) -> Any:
    """Return ``value`` so that a list equals the tuple with the same elements."""
    if hasattr(value, 'tolist'):  # arrays and tensors have no single truth value
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
