"""What else than config and data decides the bits of a training, and how two runs differ in it.

Processes that agree in these facts compute the same losses and weights from the same checkpoint,
bit for bit. A checkpoint holds them under ``meta['reproducibility']`` as groups of ranks that
agree: a list of dicts with ``ranks`` (numbers), ``hosts`` (names of their machines) and ``facts``
(texts by name). Everything but :func:`facts_of_process` and the hook is pure.

:class:`ReproducibilityHook` writes the facts into checkpoints, and warns at a resume if they
differ. Facts that differ are never an error: the run is sound, and only its last bits change.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import Accelerator, current_accelerator
from mapsage.accelerator.cpu import cpu_capability
from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.wrappers import MMDistributedDataParallel, VirtualDataParallel
from mapsage.host.runner import HostRunner, MapSageRun
from mapsage.models.weight_license import (
    LICENSES_KEY,
    describe_restrictions,
    find_licenses,
    recorded_licenses,
)

META_KEY = 'reproducibility'

# Modules that take part in a step or in loading its samples. Their versions count if imported.
_MODULES = ('torch', 'numpy', 'cv2', 'PIL', 'mmcv', 'mmengine', 'mmseg', 'mapsage')
# Variables that make libraries choose other kernels.
_VARIABLES = (
    'ATEN_CPU_CAPABILITY',
    'MKL_CBWR',
    'MKL_ENABLE_INSTRUCTIONS',
    'ONEDNN_MAX_CPU_ISA',
    'DNNL_MAX_CPU_ISA',
    'CUBLAS_WORKSPACE_CONFIG',
    'NVIDIA_TF32_OVERRIDE',
)
# Substrings of the names of CPU extensions with special kernels in math libraries (x86, ARM).
_FLAGS = ('sse4', 'avx', 'fma', 'f16c', 'amx', 'asimd', 'sve', 'bf16', 'i8mm')

# What is no longer exact if a fact differs. A fact outside of these sets affects the rounding.
_SAMPLES = frozenset(('numpy', 'cv2', 'PIL', 'mmcv', 'mmseg'))
_ORDER = frozenset(('mapsage', 'mmengine'))
# Devices whose steps the CPU computes. With any other device, the CPU only loads the samples.
_COMPUTED_BY_CPU = ('cpu', 'sim', 'xla CPU')
_OF_THE_CPU = frozenset(('processor', 'instruction set', 'CPU flags', 'threads'))
_CONSEQUENCES = {
    'rounding': 'losses and weights are close to those of an uninterrupted run and differ in their '
    'last bits',
    'samples': 'augmented images may differ in the last bits of their values',
    'order': 'the order of the samples and the random draws may be others',
}


class ConditionDifference(NamedTuple):
    """A fact in which two runs differ.

    Attributes:
        name: Name of the fact.
        before: Value in the first run, or values if ranks differ; 'none' if it is unknown.
        now: Value or values in the second run.
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
        'CPU flags': ' '.join(
            sorted(
                flag
                for flag in (_cpu_info('flags') or _cpu_info('Features')).split()
                if any(extension in flag for extension in _FLAGS)
            )
        ),
        'threads': str(torch.get_num_threads()),
        'deterministic': str(torch.are_deterministic_algorithms_enabled()),
        'reduction': reduction,
    }
    facts.update(
        (name, str(getattr(sys.modules[name], '__version__', 'unknown')))
        for name in _MODULES
        if name in sys.modules
    )
    facts.update(accelerator.software())
    facts.update((name, os.environ[name]) for name in _VARIABLES if name in os.environ)
    return facts


def group_ranks(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the groups of ranks that agree, beginning with the group of rank 0.

    Args:
        facts: :func:`facts_of_process` of each rank.
        hosts: Name of each rank's machine.
    """
    groups: List[Dict[str, Any]] = []
    for rank, (rank_facts, host) in enumerate(zip(facts, hosts)):
        group = next((group for group in groups if group['facts'] == rank_facts), None)
        if group is None:
            group = dict(ranks=[], hosts=[], facts=dict(rank_facts))
            groups.append(group)
        group['ranks'].append(rank)
        if host not in group['hosts']:
            group['hosts'].append(host)
    return groups


def promises_bits(facts: Sequence[Mapping[str, str]]) -> bool:
    """Return whether all ranks compute a step of given inputs with the same bits, each time.

    They do if they agree in all facts and their kernels are deterministic. The CPU's kernels always
    are, other kernels with ``randomness.deterministic=True`` and without ``cudnn_benchmark``.

    Args:
        facts: :func:`facts_of_process` of each rank.
    """
    first = facts[0]
    deterministic = first['device'].startswith(_COMPUTED_BY_CPU) or (
        first['deterministic'] == 'True' and first.get('cudnn_benchmark') != 'True'
    )
    return deterministic and all(rank_facts == first for rank_facts in facts)


def unlike_ranks(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning about ranks that do not compute alike; '' if all agree."""
    if len(groups) < 2:
        return ''
    lines = []
    for name in _names(groups):
        groups_by_value: Dict[str, List[Mapping[str, Any]]] = {}
        for group in groups:
            groups_by_value.setdefault(group['facts'].get(name, 'none'), []).append(group)
        if len(groups_by_value) > 1:
            lines.append(
                f'  {name}: '
                + '; '.join(
                    f'{value} on {_format_ranks(agreeing)}'
                    for value, agreeing in groups_by_value.items()
                )
            )
    return '\n'.join(
        [
            'the ranks do not compute alike:',
            *lines,
            'The run is sound. But which rank computes what now changes the last bits of losses and '
            'weights, so that a resume on other nodes, or on another number of processes, is not exact.'
            ' Start all ranks with the same of these (OMP_NUM_THREADS for the threads).',
        ]
    )


def differences(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> List[ConditionDifference]:
    """Return the facts in which two runs differ.

    Args:
        before: Groups of a checkpoint.
        now: Groups of the run that continues from it, or of another checkpoint.
    """
    different = []
    for name in _names([*before, *now]):
        old, new = _values(before, name), _values(now, name)
        if sorted(old) != sorted(new):
            different.append(ConditionDifference(name, ', '.join(old), ', '.join(new)))
    return different


def resume_warning(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning of what differs since a checkpoint, and of the consequence.

    Returns:
        The warning; ``''`` if nothing differs.
    """
    different = differences(before, now)
    if not different:
        return ''
    devices = [group['facts'].get('device', '') for group in [*before, *now]]
    on_cpu = any(device.startswith(_COMPUTED_BY_CPU) for device in devices)
    kinds = {_kind(difference.name, on_cpu) for difference in different}
    consequences = '; '.join(text for kind, text in _CONSEQUENCES.items() if kind in kinds)
    threads = next(
        (difference.before for difference in different if difference.name == 'threads'), ''
    )
    advice = (
        f' OMP_NUM_THREADS={threads} gives it the same threads again.' if threads.isdigit() else ''
    )
    return '\n'.join(
        [
            'this run computes otherwise than the one that wrote its checkpoint:',
            *(f'  {difference}' for difference in different),
            f'So it continues, but not bit for bit: {consequences}.{advice}',
        ]
    )


def _kind(name: str, on_cpu: bool) -> str:
    """Return the key of the consequence, in _CONSEQUENCES, if a fact differs."""
    if name in _SAMPLES or (name in _OF_THE_CPU and not on_cpu):
        return 'samples'
    return 'order' if name in _ORDER else 'rounding'


def _names(groups: Iterable[Mapping[str, Any]]) -> List[str]:
    return list(dict.fromkeys(name for group in groups for name in group['facts']))


def _values(groups: Sequence[Mapping[str, Any]], name: str) -> List[str]:
    return list(dict.fromkeys(group['facts'].get(name, 'none') for group in groups))


def _format_ranks(groups: Sequence[Mapping[str, Any]]) -> str:
    ranks = sorted(rank for group in groups for rank in group['ranks'])
    hosts = dict.fromkeys(host for group in groups for host in group['hosts'])
    return f'rank(s) {_format_runs(ranks)} ({", ".join(hosts)})'


def _format_runs(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, ``0-2, 5``: there may be hundreds."""
    runs: List[List[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)


def _cpu_info(name: str) -> str:
    """Return the first value of a name in /proc/cpuinfo; '' if the file or the name is missing."""
    try:
        lines = Path('/proc/cpuinfo').read_text(errors='replace').splitlines()
    except OSError:
        # Not Linux.
        return ''
    pairs = (line.partition(':') for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), '')


@HOOKS.register_module()
class ReproducibilityHook(Hook):
    """Hook that records device, instruction set, threads, versions and settings of all ranks.

    It also records the licenses of the pretrained weights, which apply to the trained weights, too;
    those of a checkpoint that the run starts from are added.

    The ranks gather them once, when the training begins; the log names ranks that differ, with
    their machines. Each checkpoint holds the facts. If they differ from the facts of the
    checkpoint, a resumed run logs what differs and what is no longer exact. Checkpoints without
    these facts are resumed without a message.

    Attributes:
        before: Groups of ranks of the checkpoint that was resumed, as `reproducibility.py`
            describes them; None without a checkpoint or without its facts.
        now: Groups of ranks of this run; empty until it begins.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.before: Optional[List[Dict[str, Any]]] = None
        self.now: List[Dict[str, Any]] = []
        self._licenses: List[Dict[str, str]] = []

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Store the licenses of the checkpoint, and its facts if the run continues from it."""
        meta = checkpoint.get('meta')
        meta = meta if isinstance(meta, dict) else {}
        self._licenses = [license_._asdict() for license_ in recorded_licenses(meta)]
        restrictions = describe_restrictions(meta, 'The checkpoint')
        if restrictions:
            runner.logger.info(restrictions)
        if runner._resume:
            self.before = meta.get(META_KEY)

    def before_train(self, runner: HostRunner) -> None:
        """Gather the facts of all ranks, and compare them. Collective."""
        local_facts = facts_of_process(current_accelerator(), local_rank(), _reduction(runner))
        texts = open_channel(purpose='reproducibility').gather_texts(
            json.dumps([local_facts, socket.gethostname()])
        )
        facts, hosts = zip(*(json.loads(text) for text in texts))
        self.now = group_ranks(facts, hosts)
        for warning in (
            unlike_ranks(self.now),
            resume_warning(self.before, self.now) if self.before else '',
        ):
            if warning:
                runner.logger.warning(warning)

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Add the facts and the licenses to the checkpoint."""
        if self.now:
            checkpoint['meta'][META_KEY] = self.now
        licenses = [license_._asdict() for license_ in find_licenses(runner.model)]
        licenses += [entry for entry in self._licenses if entry not in licenses]
        if licenses:
            checkpoint['meta'][LICENSES_KEY] = licenses


def _reduction(runner: HostRunner) -> str:
    """Return how gradients are added, and over how many processes if the bits depend on it."""
    processes = get_world_size()
    count = runner.virtual_ranks.count if isinstance(runner, MapSageRun) else processes
    # Two numbers have one sum, in whichever order they are added.
    if count < 3 or _adds_in_order(runner):
        return 'ordered'
    return f'native, {processes} processes'


def _adds_in_order(runner: HostRunner) -> bool:
    # Other wrappers, such as MMEngine's, add natively.
    return (
        isinstance(runner.model, (MMDistributedDataParallel, VirtualDataParallel))
        and runner.model.reduction == 'ordered'
    )
