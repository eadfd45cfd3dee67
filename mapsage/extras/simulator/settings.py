"""The simulator's settings, read from environment variables. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Dict, FrozenSet, Mapping, Optional, Set, Tuple

from mapsage.accelerator.base import AcceleratorError

from .profiles import DEFAULT, PROFILES, GcuProfile

MAX_DEVICES = 64  # as in backend.cpp
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30}
_FAULTS = ('allocation', 'absent', 'stall', 'destroy')
_S60_CHECKS = ('float64', 'int64', 'sync_bn')
_CHECKS = (*_S60_CHECKS, 'cublas')
_RANDOM_STREAMS = ('cpu', 'device')
_MODEL = 'GCU'
# Operators without a kernel on the S60 line: SyncBN's, and fused optimizers.
_SYNC_BN_OPS = (
    'aten::batch_norm_stats',
    'aten::batch_norm_gather_stats_with_counts',
    'aten::batch_norm_elemt',
    'aten::batch_norm_backward_reduce',
    'aten::batch_norm_backward_elemt',
)
_STRICT_OPS = ('aten::_fused_adamw_', 'aten::_fused_adam_', 'aten::_fused_sgd_')


class SimulatorError(AcceleratorError):
    """A setting of the simulator cannot be read, or the simulator cannot be built."""


@dataclass(frozen=True)
class SimulatorSettings:
    """Settings of the simulated machine, as seen from one rank.

    Attributes:
        cards: Index of the card behind each device that this process can see.
        machine_cards: Number of cards of the machine, with those that a mask hides.
        models: Name of the model of each of these cards.
        memory: Memory of a device in bytes; None for no limit.
        failing_allocation: Number (from 1) of the allocation of this process that fails as on a
            full device; 0 for none.
        absent: Indices of devices that are counted but do not respond.
        stalled_collective: Number (from 1) of the collective of the simulated ``eccl`` that never
            completes; 0 for none.
        aborting_destroy: Whether the end of a group of the simulated ``eccl`` aborts the process.
        traffic_folder: Folder for a list of the collectives of device tensors; '' for no list.
        refuse_float64: Whether float64 operations on a device are errors.
        refuse_wide_int64: Whether int64 results on a device that exceed 32 bits are errors.
        needs_workspace_setting: Whether matrix products refuse to run deterministically unless
            ``CUBLAS_WORKSPACE_CONFIG`` is set, as on CUDA.
        random_streams: Where the devices' random numbers come from: ``'cpu'`` for the CPU's
            generator, ``'device'`` for one generator a device.
        refused_ops: Schema names of operators that have no kernel.
        profile: Version of the vendor's software whose quirks the devices and ``eccl`` have.
    """

    cards: Tuple[int, ...] = tuple(range(8))
    machine_cards: int = 8
    models: Tuple[str, ...] = (_MODEL,) * 8
    memory: Optional[int] = None
    failing_allocation: int = 0
    absent: FrozenSet[int] = frozenset()
    stalled_collective: int = 0
    aborting_destroy: bool = False
    traffic_folder: str = ''
    refuse_float64: bool = False
    refuse_wide_int64: bool = False
    needs_workspace_setting: bool = False
    random_streams: str = 'cpu'
    refused_ops: Tuple[str, ...] = ()
    profile: GcuProfile = PROFILES[DEFAULT]

    @property
    def devices(self) -> int:
        """Number of devices that this process can see."""
        return len(self.cards)


def read_settings(environ: Mapping[str, str]) -> SimulatorSettings:
    """Return the settings in ``environ``.

    - ``MAPSAGE_SIM_DEVICES``: number of cards of the machine, 1 to 64; default 8.
    - ``TOPS_VISIBLE_DEVICES``: list of the cards that this process can see, in its order, as for
      the vendor's driver; default: all.
    - ``MAPSAGE_SIM_MODELS``: name of the cards' model, or a list with one for each card.
    - ``MAPSAGE_SIM_MEMORY``: memory of each device in bytes, or with a unit (``512M``, ``2G``);
      default: no limit.
    - ``MAPSAGE_SIM_FAULTS``: comma-separated list of ``allocation=N`` (the N-th allocation fails),
      ``absent=K`` (device K does not respond), ``stall=N`` (the N-th collective never completes)
      and ``destroy=1`` (the end of a process group aborts the process). Each applies to every rank,
      or with ``@RANK`` appended to one: ``stall=5@2``.
    - ``MAPSAGE_SIM_TRAFFIC``: existing folder in which every process lists the operation, dtype and
      calling module of its collectives of device tensors.
    - ``MAPSAGE_SIM_STRICT``: ``1`` to refuse what the S60 line lacks (``float64,int64,sync_bn`` and
      fused optimizers), or a list of these three, of operator names (``aten::bernoulli_``) and
      ``cublas``, which refuses what CUDA does in deterministic mode.
    - ``MAPSAGE_SIM_RANDOM``: ``cpu`` for the random numbers of a CPU run, the default, or
      ``device`` for a separate generator on each device, as on real cards.
    - ``MAPSAGE_SIM_GCU``: version of the vendor's software, a key of ``PROFILES`` (profiles.py);
      default: ``2.10``.

    Raises:
        SimulatorError: If a setting cannot be read.
    """
    devices = environ.get('MAPSAGE_SIM_DEVICES') or '8'
    if not devices.isdigit() or not 1 <= int(devices) <= MAX_DEVICES:
        raise SimulatorError(
            f'MAPSAGE_SIM_DEVICES={devices!r}: expected a number from 1 to {MAX_DEVICES}.'
        )
    faults: Dict[str, Set[int]] = {name: set() for name in _FAULTS}
    for fault in _split(environ.get('MAPSAGE_SIM_FAULTS')):
        name, number, rank = _fault(fault)
        if rank in (None, environ.get('RANK', '0')):
            faults[name].add(number)
    checks, ops = _strictness(environ.get('MAPSAGE_SIM_STRICT') or '')
    random_streams = environ.get('MAPSAGE_SIM_RANDOM') or 'cpu'
    if random_streams not in _RANDOM_STREAMS:
        raise SimulatorError(
            f'MAPSAGE_SIM_RANDOM={random_streams!r}: expected {" or ".join(_RANDOM_STREAMS)}.'
        )
    cards = _visible(environ.get('TOPS_VISIBLE_DEVICES'), int(devices))
    models = _models(environ.get('MAPSAGE_SIM_MODELS'), int(devices))
    return SimulatorSettings(
        cards=cards,
        machine_cards=int(devices),
        models=tuple(models[card] for card in cards),
        memory=_memory(environ.get('MAPSAGE_SIM_MEMORY')),
        failing_allocation=min(faults['allocation'], default=0),
        absent=frozenset(i for i, card in enumerate(cards) if card in faults['absent']),
        stalled_collective=min(faults['stall'], default=0),
        aborting_destroy=bool(faults['destroy']),
        traffic_folder=environ.get('MAPSAGE_SIM_TRAFFIC') or '',
        refuse_float64='float64' in checks,
        refuse_wide_int64='int64' in checks,
        needs_workspace_setting='cublas' in checks,
        random_streams=random_streams,
        refused_ops=ops,
        profile=_profile(environ.get('MAPSAGE_SIM_GCU') or DEFAULT),
    )


def _split(value: Optional[str]) -> Tuple[str, ...]:
    return tuple(item.strip() for item in (value or '').split(',') if item.strip())


def _visible(mask: Optional[str], count: int) -> Tuple[int, ...]:
    if mask is None:
        return tuple(range(count))
    cards = _split(mask)
    if (
        not cards
        or len(set(cards)) < len(cards)
        or not all(card.isdigit() and int(card) < count for card in cards)
    ):
        raise SimulatorError(
            f'TOPS_VISIBLE_DEVICES={mask!r}: expected different numbers from 0 to {count - 1}, '
            f'because there are {count} simulated cards (MAPSAGE_SIM_DEVICES). Unset it to see '
            f'all.'
        )
    return tuple(int(card) for card in cards)


def _profile(version: str) -> GcuProfile:
    if version not in PROFILES:
        near = difflib.get_close_matches(version, PROFILES, 1)
        raise SimulatorError(
            f'MAPSAGE_SIM_GCU={version!r}: expected a version of torch_gcu that is simulated, '
            f'{", ".join(PROFILES)}.' + (f' Did you mean {near[0]}?' if near else '')
        )
    return PROFILES[version]


def _models(names: Optional[str], count: int) -> Tuple[str, ...]:
    models = _split(names) or (_MODEL,)
    if len(models) not in (1, count):
        raise SimulatorError(
            f'MAPSAGE_SIM_MODELS={names!r}: expected one name, or {count}, one '
            f'for each simulated card (MAPSAGE_SIM_DEVICES).'
        )
    return models if len(models) == count else models * count


def _memory(value: Optional[str]) -> Optional[int]:
    if not value:
        return None
    match = re.match(r'(\d+)([KMG]?)B?$', value.strip(), re.IGNORECASE)
    if not match or int(match.group(1)) == 0:
        raise SimulatorError(
            f'MAPSAGE_SIM_MEMORY={value!r}: expected bytes a device, for example 64M or 2G.'
        )
    return int(match.group(1)) * _UNITS[match.group(2).upper()]


def _fault(fault: str) -> Tuple[str, int, Optional[str]]:
    match = re.match(r'(\w+)=(\d+)(?:@(\d+))?$', fault)
    if not match or match.group(1) not in _FAULTS:
        near = difflib.get_close_matches(fault.split('=')[0], _FAULTS, 1)
        raise SimulatorError(
            f'MAPSAGE_SIM_FAULTS holds {fault!r}: expected allocation=N, absent=K, stall=N or '
            f'destroy=1, each with @RANK behind it or not.'
            + (f' Did you mean {near[0]}=...?' if near else '')
        )
    return match.group(1), int(match.group(2)), match.group(3)


def _strictness(value: str) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
    if value in ('', '0'):
        return (), ()
    if value == '1':
        return _S60_CHECKS, _SYNC_BN_OPS + _STRICT_OPS
    names = _split(value)
    for name in names:
        if name not in _CHECKS and not re.match(r'\w+::\w+$', name):
            raise SimulatorError(
                f'MAPSAGE_SIM_STRICT holds {name!r}: expected 1, or a list of {", ".join(_CHECKS)} '
                f'and operator names such as aten::bernoulli_.'
            )
    ops = tuple(name for name in names if name not in _CHECKS)
    return names, ops + (_SYNC_BN_OPS if 'sync_bn' in names else ())
