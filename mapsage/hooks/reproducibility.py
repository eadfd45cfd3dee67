"""What the bits of a training depend on besides config and data, and how two runs differ in it.

Processes that agree in these facts compute the same losses and weights from the same checkpoint,
bit for bit. A checkpoint holds them under ``meta['reproducibility']`` as groups of ranks that
agree: a list of dicts with ``ranks`` (numbers), ``hosts`` (names of their machines) and ``facts``
(texts by name). Everything here but :func:`facts_of_process` is pure.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence

import torch

from mapsage.accelerator import Accelerator
from mapsage.accelerator.cpu import cpu_capability

META_KEY = 'reproducibility'

# Modules that take part in a step or in the making of its samples, where they are loaded.
_MODULES = ('torch', 'numpy', 'cv2', 'PIL', 'mmcv', 'mmengine', 'mmseg', 'mapsage')
# Variables that make libraries take other kernels.
_VARIABLES = ('ATEN_CPU_CAPABILITY', 'MKL_CBWR', 'MKL_ENABLE_INSTRUCTIONS', 'ONEDNN_MAX_CPU_ISA',
              'DNNL_MAX_CPU_ISA', 'CUBLAS_WORKSPACE_CONFIG', 'NVIDIA_TF32_OVERRIDE')
# Parts of the names of extensions for which math libraries have kernels of their own (x86, ARM).
_FLAGS = ('sse4', 'avx', 'fma', 'f16c', 'amx', 'asimd', 'sve', 'bf16', 'i8mm')

# What is no longer exact if a fact differs: its rounding, unless it is listed here.
_SAMPLES = frozenset(('numpy', 'cv2', 'PIL', 'mmcv', 'mmseg'))
_ORDER = frozenset(('mapsage', 'mmengine'))
# Where another device computes the steps, the CPU makes the samples only.
_COMPUTED_BY_CPU = ('cpu', 'sim', 'xla CPU')
_OF_THE_CPU = frozenset(('processor', 'instruction set', 'CPU flags', 'threads'))
_CONSEQUENCES = {
    'rounding': 'losses and weights are close to those of an uninterrupted run and differ in their '
                'last bits',
    'samples': 'augmented images may differ in the last bits of their values',
    'order': 'the order of the samples and the random draws may be others',
}


class Difference(NamedTuple):
    """A fact in which two runs differ.

    Attributes:
        name: Name of the fact.
        before: Its value, or values where ranks differ; 'none' if it is not known.
        now: The same of the other run.
    """

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f'{self.name}: {self.before}, now {self.now}'


def facts_of_process(accelerator: Accelerator, local_rank: int, reduction: str) -> Dict[str, str]:
    """Return what the bits that this process computes depend on, by name.

    Args:
        accelerator: The accelerator in force.
        local_rank: Rank of this process on its node.
        reduction: Way in which gradients are added over the ranks.
    """
    model = accelerator.card_model(local_rank)
    facts = {
        'device': model if model.startswith(accelerator.name) else f'{accelerator.name} {model}',
        'processor': _cpu_info('model name'),
        'instruction set': cpu_capability(),
        'CPU flags': ' '.join(sorted(
            flag for flag in (_cpu_info('flags') or _cpu_info('Features')).split()
            if any(part in flag for part in _FLAGS))),
        'threads': str(torch.get_num_threads()),
        'deterministic': str(torch.are_deterministic_algorithms_enabled()),
        'reduction': reduction,
    }
    facts.update((name, str(getattr(sys.modules[name], '__version__', 'unknown')))
                 for name in _MODULES if name in sys.modules)
    facts.update(accelerator.software())
    facts.update((name, os.environ[name]) for name in _VARIABLES if name in os.environ)
    return facts


def group_ranks(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the groups of ranks that agree, the one of rank 0 first.

    Args:
        facts: :func:`facts_of_process` of each rank.
        hosts: Name of each rank's machine.
    """
    groups: List[Dict[str, Any]] = []
    for rank, (mine, host) in enumerate(zip(facts, hosts)):
        group = next((each for each in groups if each['facts'] == mine), None)
        if group is None:
            group = dict(ranks=[], hosts=[], facts=dict(mine))
            groups.append(group)
        group['ranks'].append(rank)
        if host not in group['hosts']:
            group['hosts'].append(host)
    return groups


def unlike_ranks(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning about ranks that do not compute alike; '' if all agree."""
    if len(groups) < 2:
        return ''
    lines = []
    for name in _names(groups):
        held: Dict[str, List[Mapping[str, Any]]] = {}
        for group in groups:
            held.setdefault(group['facts'].get(name, 'none'), []).append(group)
        if len(held) > 1:
            lines.append(f'  {name}: ' + '; '.join(
                f'{value} on {_where(some)}' for value, some in held.items()))
    return '\n'.join([
        'the ranks do not compute alike:', *lines,
        'The run is sound. But which rank computes what now changes the last bits of losses and '
        'weights, so that a resume on other nodes, or on another number of processes, is not exact.'
        ' Start all ranks with the same of these (OMP_NUM_THREADS for the threads).'])


def differences(before: Sequence[Mapping[str, Any]],
                now: Sequence[Mapping[str, Any]]) -> List[Difference]:
    """Return the facts in which two runs differ.

    Args:
        before: Groups of a checkpoint.
        now: Groups of the run that goes on from it, or of another checkpoint.
    """
    found = []
    for name in _names([*before, *now]):
        old, new = _values(before, name), _values(now, name)
        if sorted(old) != sorted(new):
            found.append(Difference(name, ', '.join(old), ', '.join(new)))
    return found


def resume_warning(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning about what differs since a checkpoint, and what follows; '' if nothing."""
    found = differences(before, now)
    if not found:
        return ''
    devices = [group['facts'].get('device', '') for group in [*before, *now]]
    on_cpu = any(device.startswith(_COMPUTED_BY_CPU) for device in devices)
    kinds = {_kind(each.name, on_cpu) for each in found}
    what = '; '.join(text for kind, text in _CONSEQUENCES.items() if kind in kinds)
    threads = next((each.before for each in found if each.name == 'threads'), '')
    step = f' OMP_NUM_THREADS={threads} gives it the same threads again.' if threads.isdigit() \
        else ''
    return '\n'.join([
        'this run computes otherwise than the one that wrote its checkpoint:',
        *(f'  {each}' for each in found), f'So it goes on, but not bit for bit: {what}.{step}'])


def _kind(name: str, on_cpu: bool) -> str:
    if name in _SAMPLES or (name in _OF_THE_CPU and not on_cpu):
        return 'samples'
    return 'order' if name in _ORDER else 'rounding'


def _names(groups: Iterable[Mapping[str, Any]]) -> List[str]:
    return list(dict.fromkeys(name for group in groups for name in group['facts']))


def _values(groups: Sequence[Mapping[str, Any]], name: str) -> List[str]:
    return list(dict.fromkeys(group['facts'].get(name, 'none') for group in groups))


def _where(groups: Sequence[Mapping[str, Any]]) -> str:
    ranks = sorted(rank for group in groups for rank in group['ranks'])
    hosts = dict.fromkeys(host for group in groups for host in group['hosts'])
    return f"rank(s) {_runs(ranks)} ({', '.join(hosts)})"


def _runs(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, ``0-2, 5``: there may be hundreds."""
    parts: List[List[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ', '.join(str(part[0]) if len(part) == 1 else f'{part[0]}-{part[-1]}' for part in parts)


def _cpu_info(name: str) -> str:
    """Return the first entry of a name in /proc/cpuinfo; '' where there is none."""
    try:
        lines = Path('/proc/cpuinfo').read_text(errors='replace').splitlines()
    except OSError:  # not Linux
        return ''
    pairs = (line.partition(':') for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), '')
