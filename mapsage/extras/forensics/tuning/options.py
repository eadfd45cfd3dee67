"""The options of a training step that `mapsage tune` tries, as changes of a config.

An option that is on in the config is tried the other way round. Every combination is the config
with the keys of its options, exactly as ``--cfg-options`` would set them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mmengine.config import Config
from mmengine.registry import OPTIMIZERS
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed.wrappers.fused import why_not_fused
from mapsage.engine.compiled_parts import CompileError, check_parts
from mapsage.engine.env_cfg import short_name

# Modules of a segmentor that take most of a step.
COMPILED_MODULES = ('backbone', 'decode_head')


@dataclass(frozen=True)
class Option:
    """One option of a training step.

    Attributes:
        name: Name for the table.
        changes: Key of ``--cfg-options`` and its value, for each key.
        obstacle: Reason why it cannot be tried here; empty if it can.
    """

    name: str
    changes: Tuple[Tuple[str, Any], ...]
    obstacle: str = ''


@dataclass(frozen=True)
class Variant:
    """One way to carry out the steps of a config.

    Attributes:
        options: Options that differ from the config; empty for the config as it is.
        threads: Number of threads with which the CPU computes.
        workers: Number of loader workers; None for steps on a batch that is loaded already.
    """

    options: Tuple[Option, ...] = ()
    threads: int = 1
    workers: Optional[int] = None

    @property
    def name(self) -> str:
        """Name for the table."""
        return ', '.join(option.name for option in self.options) or 'as configured'

    @property
    def changes(self) -> Dict[str, Any]:
        """Values of ``--cfg-options`` by key."""
        return {key: value for option in self.options for key, value in option.changes}


def step_options(cfg: Config, model: nn.Module, accelerator: Accelerator) -> List[Option]:
    """Return the options of a step; those that cannot be tried have an ``obstacle``.

    Args:
        cfg: Complete config.
        model: Model of the config.
        accelerator: Accelerator that carries out the steps.
    """
    return [_precision(cfg), _memory_format(cfg, model), _fusion(cfg, accelerator)]


def combine(options: Sequence[Option], threads: int) -> List[Variant]:
    """Return all combinations of the options without an obstacle, single options first.

    The config as it is, without any of them, is not among them.
    """
    possible = [option for option in options if not option.obstacle]
    return [
        Variant(combination, threads)
        for size in range(1, len(possible) + 1)
        for combination in itertools.combinations(possible, size)
    ]


def compile_option(model: nn.Module, accelerator: Accelerator) -> Option:
    """Return the option to compile backbone and decode head, see ``compiled_parts.py``."""
    children = dict(model.named_children())
    names = [name for name in COMPILED_MODULES if children.get(name) is not None]
    option = Option('compile', tuple((f'compile.{name}', True) for name in names))
    if not names:
        return Option(
            option.name,
            (),
            f'{type(model).__name__} has neither of {" and ".join(COMPILED_MODULES)}',
        )
    try:
        check_parts(model, dict.fromkeys(names, True), accelerator)
    except CompileError as error:
        return Option(option.name, option.changes, str(error))
    return option


def _precision(cfg: Config) -> Option:
    wrapper: Mapping[str, Any] = cfg.optim_wrapper
    kind = short_name(wrapper.get('type', 'OptimWrapper'))
    if kind == 'AmpOptimWrapper' and str(wrapper.get('dtype', '')).endswith('bfloat16'):
        return Option(
            'float32',
            (('optim_wrapper.type', 'OptimWrapper'),),
            'the config sets optim_wrapper.dtype, which --cfg-options cannot remove: '
            'take it out of the config to compare',
        )
    changes = (('optim_wrapper.type', 'AmpOptimWrapper'), ('optim_wrapper.dtype', 'bfloat16'))
    if kind not in ('OptimWrapper', 'AmpOptimWrapper'):
        return Option('bfloat16', changes, f'optim_wrapper.type is {kind}, expected OptimWrapper')
    return Option('bfloat16', changes)


def _memory_format(cfg: Config, model: nn.Module) -> Option:
    is_on = bool((cfg.get('env_cfg') or {}).get('channels_last'))
    option = Option(
        'channels first' if is_on else 'channels last', (('env_cfg.channels_last', not is_on),)
    )
    if not any(parameter.dim() == 4 for parameter in model.parameters()):
        return Option(
            option.name, option.changes, f'{type(model).__name__} has no weights of convolutions'
        )
    return option


def _fusion(cfg: Config, accelerator: Accelerator) -> Option:
    optimizer = cfg.optim_wrapper.get('optimizer') or {}
    is_on = bool(optimizer.get('fused'))
    option = Option(
        'not fused' if is_on else 'fused', (('optim_wrapper.optimizer.fused', not is_on),)
    )
    kind = optimizer.get('type')
    optimizer_class = OPTIMIZERS.get(kind) if isinstance(kind, str) else kind
    # An unknown optimizer fails in the step as configured, with the registry's message.
    obstacle = (
        why_not_fused(optimizer_class, accelerator) if isinstance(optimizer_class, type) else None
    )
    return Option(option.name, option.changes, obstacle or '')
