"""Plans which modules of a model go to which device. Nothing is moved here.

A model can only be cut between modules that pass a value from one to the next, so the planner knows
which modules those are (:func:`find_units`). ``device_map`` is a mapping from the path of a module
to a device, in which the longest matching path decides; a config has it, or :func:`automatic_map`
computes it. `model_parallel.py` carries the plan out.
"""

from __future__ import annotations

import difflib
import itertools
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from torch import nn

from mapsage.base.errors import UserError

# Modules that pass a value from child to child although they are not containers. All other modules
# that are not containers stay whole.
_CHAINS = ('SwinBlockSequence',)
# Backbones whose forward adds or concatenates the results of their children.
_WHOLE_BACKBONES = ('CGNet', 'DDRNet', 'ICNet', 'PIDNet', 'STDCContextPathNet')


class DeviceMapError(UserError, ValueError):
    """A ``device_map`` does not fit the model or the devices."""

    on_every_rank = True


@dataclass(frozen=True)
class Unit:
    """A part of a model that stays on a single device.

    Attributes:
        name: Path of the module.
        sizes: ``id`` of a tensor -> bytes of a parameter, or 0 for a buffer. The direct tensors of
            a module that is cut belong to the first unit in that module.
        parents: Paths of the cut modules that have direct tensors in ``sizes``.
    """

    name: str
    sizes: Mapping[int, int]
    parents: Tuple[str, ...] = ()


def find_units(model: nn.Module) -> List[Unit]:
    """Return the parts of ``model`` that may be on different devices, in registration order.

    A module can be cut between its children only if it passes a value from one to the next. If it
    adds the outputs of two children, these would be on two devices. The modules that are cut are
    the model itself, its ``backbone``, and containers (``Sequential``, ``ModuleList``) directly in
    them; residual blocks, transformer layers, necks and heads stay whole. For ``EncoderDecoder``
    the registration order is the forward order.
    """
    return _units(model, '')


def _units(module: nn.Module, name: str) -> List[Unit]:
    direct = _direct_sizes(module)
    if not _is_chain(module, name):
        sizes = {
            key: size for child in module.modules() for key, size in _direct_sizes(child).items()
        }
        return [Unit(name, sizes)] if sizes else []
    units = [
        unit
        for child_name, child in module.named_children()
        if not isinstance(child, BaseDataPreprocessor)
        for unit in _units(child, f'{name}.{child_name}' if name else child_name)
    ]
    if direct and not units:
        return [Unit(name, direct)]
    if direct:
        units[0] = replace(
            units[0], sizes={**direct, **units[0].sizes}, parents=(name, *units[0].parents)
        )
    return units


def _is_chain(module: nn.Module, name: str) -> bool:
    kind = type(module)
    if name in ('', 'backbone'):
        return kind.__name__ not in _WHOLE_BACKBONES
    return (
        is_container(module)
        or kind.__name__ in _CHAINS
        or (isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward)
    )


def is_container(module: nn.Module) -> bool:
    """Return whether ``module`` only holds children and is never called itself."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def _direct_sizes(module: nn.Module) -> Dict[int, int]:
    sizes = {
        id(parameter): parameter.numel() * parameter.element_size()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    buffers = {id(buffer): 0 for buffer in module._buffers.values() if buffer is not None}
    return {**sizes, **buffers}


def partition(sizes: Sequence[int], max_runs: int) -> List[int]:
    """Cut a sequence into up to ``max_runs`` runs and minimize the size of the largest. Pure.

    Among such cuts it chooses the most even one, with the smallest sum of squares.

    Args:
        sizes: Sizes of the items, not negative.
        max_runs: Largest number of runs, at least 1.

    Returns:
        Index of the run of each item, from 0, never decreasing.
    """
    ends = [0, *itertools.accumulate(sizes)]
    limit = _smallest_limit(ends, max_runs)
    infinite = (ends[-1] + 1) ** 2
    # costs[i]: the smallest sum of squares over the first i items, cut into the runs so far.
    costs = [0] + [infinite] * len(sizes)
    cuts: List[List[int]] = []
    for _ in range(max_runs):
        begins = [bisect_left(ends, end - limit) for end in ends]
        best = [
            min(range(begin, i + 1), key=lambda j: costs[j] + (ends[i] - ends[j]) ** 2)
            for i, begin in enumerate(begins)
        ]
        costs = [costs[j] + (ends[i] - ends[j]) ** 2 for i, j in enumerate(best)]
        cuts.append(best)
    run_of_item = [0] * len(sizes)
    end = len(sizes)
    for run in reversed(range(max_runs)):
        begin = cuts[run][end]
        run_of_item[begin:end] = [run] * (end - begin)
        end = begin
    return run_of_item


def _smallest_limit(ends: Sequence[int], max_runs: int) -> int:
    """Return the smallest possible size of the largest run, by bisection."""
    low, high = max((end - begin for begin, end in zip(ends, ends[1:])), default=0), ends[-1]
    while low < high:
        limit = (low + high) // 2
        if _count_runs(ends, limit) <= max_runs:
            high = limit
        else:
            low = limit + 1
    return low


def _count_runs(ends: Sequence[int], limit: int) -> int:
    """Return the number of runs if each is filled up to ``limit``."""
    runs, begin = 1, 0
    for previous, end in zip(ends, ends[1:]):
        if end - begin > limit:
            runs, begin = runs + 1, previous
    return runs


def automatic_map(model: nn.Module, device_count: int) -> Dict[str, int]:
    """Return a ``device_map`` that spreads the bytes of the parameters evenly.

    The units of :func:`find_units` are cut into ``device_count`` runs by :func:`partition`. Units
    that share a parameter stay together.

    Raises:
        DeviceMapError: If the model has no parameters.
    """
    units = find_units(model)
    if not units:
        raise DeviceMapError(f'{type(model).__name__} has no parameters to split.')
    groups = _tied_groups(units)
    runs = partition(
        [sum(_merged_sizes(units[i] for i in group).values()) for group in groups], device_count
    )
    run_of_unit = {i: run for group, run in zip(groups, runs) for i in group}
    # Empty runs are skipped, so that device 0 is always the first in use.
    device_of_run = {run: device for device, run in enumerate(sorted(set(run_of_unit.values())))}
    return {
        name: device_of_run[run_of_unit[i]]
        for i, unit in enumerate(units)
        for name in (*unit.parents, unit.name)
    }


def _merged_sizes(units: Iterable[Unit]) -> Dict[int, int]:
    return {key: size for unit in units for key, size in unit.sizes.items()}


def _tied_groups(units: Sequence[Unit]) -> List[List[int]]:
    """Return the indices of the units in groups that share no tensor with another group."""
    groups: List[Tuple[FrozenSet[int], List[int]]] = []
    for i, unit in enumerate(units):
        keys, members = frozenset(unit.sizes), [i]
        untied = []
        for group_keys, group_members in groups:
            if group_keys & keys:
                keys, members = keys | group_keys, group_members + members
            else:
                untied.append((group_keys, group_members))
        groups = [*untied, (keys, members)]
    return sorted((sorted(members) for _, members in groups), key=lambda members: members[0])


def resolve_device_map(
    model: nn.Module, device_map: Mapping[str, object], devices: Sequence[torch.device]
) -> Dict[str, torch.device]:
    """Return the device of every module that ``device_map`` covers.

    Args:
        model: Model to place. Its data preprocessor goes to the device of the first module with
            tensors, unless ``device_map`` names the preprocessor.
        device_map: Mapping from the path of a module (``''`` for the model) to a device, given as
            an index into ``devices`` or as one of them; the longest matching path decides.
        devices: Devices that may be used.

    Raises:
        DeviceMapError: If a path does not lead to a module, a tensor is not covered, a device is
            not one of ``devices``, or a shared parameter would be on two devices.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in device_map:
        _check_path(path, modules)
    chosen = {path: _find_device(path, value, devices) for path, value in device_map.items()}
    module_devices: Dict[str, torch.device] = {}
    for name in modules:
        prefix = _longest_prefix(name, chosen)
        if prefix is not None:
            module_devices[name] = chosen[prefix]
    owners = tensor_owners(model)
    uncovered = [name for name in owners if name not in module_devices]
    if uncovered:
        raise DeviceMapError(
            f'device_map gives no device to {len(uncovered)} module(s) with parameters or buffers: '
            f'{", ".join(uncovered[:5])}{", ..." if len(uncovered) > 5 else ""}. Add their paths, '
            f"or '' for all that is not named."
        )
    _check_ties(modules, owners, module_devices)
    if owners:
        first_device = module_devices[owners[0]]
        module_devices.update(
            {
                name: chosen.get(name, first_device)
                for name, module in modules.items()
                if isinstance(module, BaseDataPreprocessor)
            }
        )
    return module_devices


def tensor_owners(model: nn.Module) -> List[str]:
    """Return the paths of the modules that hold tensors directly, in order.

    Data preprocessors are left out, because their batch may go to any device.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    preprocessing = {
        id(child)
        for module in modules.values()
        if isinstance(module, BaseDataPreprocessor)
        for child in module.modules()
    }
    return [
        name
        for name, module in modules.items()
        if _direct_sizes(module) and id(module) not in preprocessing
    ]


def _longest_prefix(name: str, prefixes: Mapping[str, object]) -> Optional[str]:
    while name not in prefixes:
        if not name:
            return None
        name = name.rpartition('.')[0]
    return name


def _check_path(path: str, modules: Mapping[str, nn.Module]) -> None:
    if path in modules:
        return
    near = difflib.get_close_matches(str(path), list(modules), 1)
    top = ', '.join(name for name in modules if name and '.' not in name)
    raise DeviceMapError(
        f'device_map names {path!r}, which is not a module of the model.'
        + (f' Did you mean {near[0]!r}?' if near else '')
        + f" Expected paths of modules such as {top}, or '' for all that is not named."
    )


def _find_device(path: str, value: object, devices: Sequence[torch.device]) -> torch.device:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(devices):
        return devices[value]
    if isinstance(value, (str, torch.device)):
        for device in devices:
            if str(device) == str(value):
                return device
    raise DeviceMapError(
        f'device_map[{path!r}] is {value!r}: expected an index from 0 to {len(devices) - 1}, or '
        f'one of {", ".join(map(str, devices))}.'
    )


def _check_ties(
    modules: Mapping[str, nn.Module],
    owners: Sequence[str],
    module_devices: Mapping[str, torch.device],
) -> None:
    first_owners: Dict[int, str] = {}
    for name in owners:
        for key in _direct_sizes(modules[name]):
            first = first_owners.setdefault(key, name)
            if module_devices[first] != module_devices[name]:
                raise DeviceMapError(
                    f'{first!r} and {name!r} share a tensor, and device_map puts them on '
                    f'{module_devices[first]} and {module_devices[name]}: give both the same '
                    f'device.'
                )
