"""The plan of which part of a model goes to which device; nothing is moved here."""
from __future__ import annotations

import difflib
import itertools
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from torch import nn

from mapsage.errors import UserError

# Modules that pass a value from child to child although they are not containers; all others stay
# whole.
_CHAINS = ('SwinBlockSequence',)
# Backbones whose forward adds or concatenates the results of their children.
_WHOLE_BACKBONES = ('CGNet', 'DDRNet', 'ICNet', 'PIDNet',
                    'STDCContextPathNet')


class DeviceMapError(UserError, ValueError):
    """A ``device_map`` does not fit the model or the devices."""

    on_every_rank = True


@dataclass(frozen=True)
class Unit:
    """A part of a model that stays on a single device.

    Attributes:
        name: Path of the module.
        sizes: Size of its parameters in bytes by ``id``, and 0 for each buffer. Tensors held
            directly by a module that is cut belong to the first unit in it.
        parents: Paths of such modules, whose direct tensors are in ``sizes``.
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
        sizes = {key: size for each in module.modules()
                 for key, size in _direct_sizes(each).items()}
        return [Unit(name, sizes)] if sizes else []
    units = [unit for child_name, child in module.named_children()
             if not isinstance(child, BaseDataPreprocessor)
             for unit in _units(child, f'{name}.{child_name}' if name else child_name)]
    if direct and not units:
        return [Unit(name, direct)]
    if direct:
        units[0] = replace(units[0], sizes={**direct, **units[0].sizes},
                           parents=(name, *units[0].parents))
    return units


def _is_chain(module: nn.Module, name: str) -> bool:
    kind = type(module)
    if name in ('', 'backbone'):
        return kind.__name__ not in _WHOLE_BACKBONES
    return is_container(module) or kind.__name__ in _CHAINS \
        or (isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward)


def is_container(module: nn.Module) -> bool:
    """Return whether ``module`` only holds children and is never called itself."""
    return (isinstance(module, (nn.ModuleList, nn.ModuleDict))
            and type(module).forward is nn.Module.forward)


def _direct_sizes(module: nn.Module) -> Dict[int, int]:
    parameters = {id(each): each.numel() * each.element_size()
                  for each in module._parameters.values() if each is not None}
    return {**parameters, **{id(each): 0 for each in module._buffers.values() if each is not None}}


def partition(sizes: Sequence[int], parts: int) -> List[int]:
    """Cut a sequence into at most ``parts`` runs so that the largest is as small as possible. Pure.

    Among such cuts it chooses the most even one, with the smallest sum of squares.

    Args:
        sizes: Sizes of the items, not negative.
        parts: Largest number of runs, at least 1.

    Returns:
        Index of the run of each item, from 0, never decreasing.
    """
    ends = [0, *itertools.accumulate(sizes)]
    limit = _smallest_limit(ends, parts)
    infinite = (ends[-1] + 1) ** 2
    # costs[i]: the smallest sum of squares over the first i items, cut into the parts so far
    costs = [0] + [infinite] * len(sizes)
    cuts: List[List[int]] = []
    for _ in range(parts):
        begins = [bisect_left(ends, end - limit) for end in ends]
        best = [min(range(begin, i + 1), key=lambda j: costs[j] + (ends[i] - ends[j]) ** 2)
                for i, begin in enumerate(begins)]
        costs = [costs[j] + (ends[i] - ends[j]) ** 2 for i, j in enumerate(best)]
        cuts.append(best)
    owner = [0] * len(sizes)
    end = len(sizes)
    for part in reversed(range(parts)):
        begin = cuts[part][end]
        owner[begin:end] = [part] * (end - begin)
        end = begin
    return owner


def _smallest_limit(ends: Sequence[int], parts: int) -> int:
    low, high = max((end - begin for begin, end in zip(ends, ends[1:])), default=0), ends[-1]
    while low < high:
        limit = (low + high) // 2
        if _parts_needed(ends, limit) <= parts:
            high = limit
        else:
            low = limit + 1
    return low


def _parts_needed(ends: Sequence[int], limit: int) -> int:
    needed, begin = 1, 0
    for previous, end in zip(ends, ends[1:]):
        if end - begin > limit:
            needed, begin = needed + 1, previous
    return needed


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
    owners = partition([sum(_union(units[i] for i in group).values()) for group in groups],
                       device_count)
    index = {i: owner for group, owner in zip(groups, owners) for i in group}
    # Owners of empty devices are skipped, so that device 0 is always the first in use.
    used = {owner: rank for rank, owner in enumerate(sorted(set(index.values())))}
    placed: Dict[str, int] = {}
    for i, unit in enumerate(units):
        for name in (*unit.parents, unit.name):
            placed[name] = used[index[i]]
    return placed


def _union(units: Iterable[Unit]) -> Dict[int, int]:
    return {key: size for unit in units for key, size in unit.sizes.items()}


def _tied_groups(units: Sequence[Unit]) -> List[List[int]]:
    groups: List[Tuple[FrozenSet[int], List[int]]] = []
    for i, unit in enumerate(units):
        keys, members = frozenset(unit.sizes), [i]
        apart = []
        for group in groups:
            if group[0] & keys:
                keys, members = keys | group[0], group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (keys, members)]
    return sorted((sorted(members) for _, members in groups), key=lambda members: members[0])


def resolve_device_map(model: nn.Module, device_map: Mapping[str, Any],
                       devices: Sequence[torch.device]) -> Dict[str, torch.device]:
    """Return the device of every module that ``device_map`` covers.

    Args:
        model: Model to place. Its data preprocessor goes to the device of the model's first part,
            unless it is named.
        device_map: Mapping from the path of a module (``''`` for the model) to a device, given as
            an index into ``devices`` or as one of them; the longest matching path decides.
        devices: Devices that may be used.

    Raises:
        DeviceMapError: If a path does not lead to a module, a tensor is not covered, a device is
            not one of ``devices``, or a shared parameter would be on two devices.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix in device_map:
        _check_prefix(prefix, modules)
    chosen = {prefix: _find_device(prefix, value, devices) for prefix, value in device_map.items()}
    places: Dict[str, torch.device] = {}
    for name in modules:
        decisive = _longest_prefix(name, chosen)
        if decisive is not None:
            places[name] = chosen[decisive]
    owners = tensor_owners(model)
    uncovered = [name for name in owners if name not in places]
    if uncovered:
        raise DeviceMapError(
            f"device_map gives no device to {len(uncovered)} module(s) with parameters or buffers: "
            f"{', '.join(uncovered[:5])}{', ...' if len(uncovered) > 5 else ''}. Add their paths, "
            f"or '' for all that is not named.")
    _check_ties(modules, owners, places)
    places.update({name: chosen.get(name, places[owners[0]]) for name, module in modules.items()
                   if owners and isinstance(module, BaseDataPreprocessor)})
    return places


def tensor_owners(model: nn.Module) -> List[str]:
    """Return the paths of the modules that hold tensors directly, in order.

    Data preprocessors are left out, because any part may receive their batch.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    within = {id(each) for module in modules.values() if isinstance(module, BaseDataPreprocessor)
              for each in module.modules()}
    return [name for name, module in modules.items()
            if _direct_sizes(module) and id(module) not in within]


def _longest_prefix(name: str, prefixes: Mapping[str, Any]) -> Optional[str]:
    while name not in prefixes:
        if not name:
            return None
        name = name.rpartition('.')[0]
    return name


def _check_prefix(prefix: str, modules: Mapping[str, nn.Module]) -> None:
    if prefix in modules:
        return
    near = difflib.get_close_matches(str(prefix), list(modules), 1)
    top = ', '.join(name for name in modules if name and '.' not in name)
    raise DeviceMapError(
        f'device_map names {prefix!r}, which is no module of the model.'
        + (f' Did you mean {near[0]!r}?' if near else '')
        + f" Expected paths of modules such as {top}, or '' for all that is not named.")


def _find_device(prefix: str, value: Any, devices: Sequence[torch.device]) -> torch.device:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(devices):
        return devices[value]
    if isinstance(value, (str, torch.device)):
        for device in devices:
            if str(device) == str(value):
                return device
    raise DeviceMapError(
        f'device_map[{prefix!r}] is {value!r}: expected an index from 0 to {len(devices) - 1}, or '
        f"one of {', '.join(map(str, devices))}.")


def _check_ties(modules: Mapping[str, nn.Module], owners: Sequence[str],
                places: Mapping[str, torch.device]) -> None:
    homes: Dict[int, str] = {}
    for name in owners:
        for key in _direct_sizes(modules[name]):
            other = homes.setdefault(key, name)
            if places[other] != places[name]:
                raise DeviceMapError(
                    f'{other!r} and {name!r} share a tensor, and device_map puts them on '
                    f'{places[other]} and {places[name]}: give both the same device.')
