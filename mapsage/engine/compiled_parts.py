"""``compile=dict(backbone=True)``: modules of a model that are compiled separately.

MMEngine's ``compile=True`` gives the whole ``train_step`` to ``torch.compile``, with preprocessor,
loss, log and optimizer, and a graph break at every value that Python reads. Backbone and head take
most of the time and compute only with tensors, so compiling them is enough.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Tuple, runtime_checkable

import torch
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.base.errors import UserError
from mapsage.host.runner import unwrap

from .run_extension import EngineRun

# torch.compile exists since torch 2.0.
_compile: Optional[Callable[..., Any]] = getattr(torch, 'compile', None)
# Arguments of torch.compile. The list of torch 2.0 also serves for an older torch, so that the
# error says that torch is too old and not that the model has no module of this name.
_OPTIONS = {'fullgraph', 'dynamic', 'backend', 'mode', 'options', 'disable'} | (
    set() if _compile is None else set(inspect.signature(_compile).parameters) - {'model'}
)


@runtime_checkable
class NamesCompiledMethods(Protocol):
    """A module that a training runs through other methods than ``forward``.

    Attributes:
        compiled_methods: Names of these methods.
    """

    compiled_methods: Tuple[str, ...]


@runtime_checkable
class NamesCompiledCalls(Protocol):
    """A model whose training reaches some of its modules through methods of the model."""

    def compiled_calls(self) -> Dict[str, List[Tuple[nn.Module, str]]]:
        """Return the calls to compile: name of a module -> (module, name of the method)."""


class CompileError(UserError, ValueError):
    """The config's ``compile`` cannot be carried out."""


def compiled_parts(setting: object) -> List[str]:
    """Return the names of modules in a config's ``compile``; empty for a setting of MMEngine.

    Args:
        setting: Value of ``compile``: MMEngine's bool or dict of arguments of ``torch.compile``, or
            a dict that also names modules.
    """
    return [name for name in setting if name not in _OPTIONS] if isinstance(setting, dict) else []


def check_parts(model: nn.Module, setting: object, accelerator: Accelerator) -> None:
    """Check that the modules that ``compile`` names can be compiled. Changes nothing.

    Args:
        model: Model, wrapped or not.
        setting: Value of ``compile`` in the config.
        accelerator: Accelerator of the run.

    Raises:
        CompileError: If the model has no such module, a value is neither a bool nor a dict of
            arguments, torch is too old, or no backend generates code for the accelerator.
    """
    names = compiled_parts(setting)
    if not names or not isinstance(setting, dict):
        return
    model = unwrap(model)
    shown = f'compile={dict(setting)!r}'
    for name in names:
        _calls_of(model, name)
        if not isinstance(setting[name], (bool, dict)) or (
            isinstance(setting[name], dict) and set(setting[name]) - _OPTIONS
        ):
            raise CompileError(
                f'{shown}: {name} is {setting[name]!r}, expected True, False, or a dict of '
                f'arguments of torch.compile: {", ".join(sorted(_OPTIONS))}.'
            )
    enabled = [name for name in names if setting[name]]
    if enabled and _compile is None:
        raise CompileError(
            f'{shown}: this is torch {torch.__version__}, and torch.compile came with 2.0. Take '
            f'`compile` out of the config.'
        )
    default_backend = [name for name in enabled if 'backend' not in _options_of(setting, name)]
    if default_backend and not accelerator.supports.compile:
        raise CompileError(
            f"{shown}: torch.compile's own backend generates no code for {accelerator.name}. Name "
            f"one that does, as in compile=dict(..., backend='...'), or take `compile` out of the "
            f'config.'
        )


def compile_parts(model: nn.Module, setting: Mapping[str, Any]) -> List[str]:
    """Compile the modules that ``compile`` names, in place.

    Names, parameters and hooks of the modules do not change, so checkpoints stay the same. A
    module is compiled at its first call.

    Args:
        model: Model, wrapped or not.
        setting: Value of ``compile`` in the config, which :func:`check_parts` has accepted.

    Returns:
        One text per module: ``'backbone (ResNet.forward)'``.
    """
    model, compiled = unwrap(model), []
    for name in compiled_parts(setting):
        if setting[name] is False:
            continue
        calls = _calls_of(model, name)
        for module, method in calls:
            _replace(module, method, _options_of(setting, name))
        methods = sorted({f'{type(module).__name__}.{method}' for module, method in calls})
        compiled.append(f'{name} ({", ".join(methods)})')
    return compiled


def compile_model(run: EngineRun, target: str, compile_step: Callable[[str], None]) -> None:
    """Compile a model as the config's ``compile`` demands.

    Args:
        run: The run; its model is wrapped.
        target: Method of the model that MMEngine would compile, ``'train_step'``.
        compile_step: MMEngine's method, which compiles the target unless ``compile`` is unset.
    """
    setting = run.cfg.get('compile')
    if not compiled_parts(setting):
        compile_step(target)
        return
    compiled = compile_parts(run.model, setting)
    run.logger.info(
        f'compile: {", ".join(compiled) or "nothing"}, at the first steps, which will be slow; '
        f'TORCH_LOGS=graph_breaks,recompiles says what is compiled again, and why'
    )


def _options_of(setting: Mapping[str, Any], name: str) -> Dict[str, Any]:
    """Return the arguments of torch.compile for one module: the common ones and the module's."""
    common = {key: value for key, value in setting.items() if key in _OPTIONS}
    return {**common, **setting[name]} if isinstance(setting[name], dict) else common


def _calls_of(model: nn.Module, name: str) -> List[Tuple[nn.Module, str]]:
    """Return the methods through which a training runs a module, as (module, name of the method).

    Raises:
        CompileError: If there is no such module.
    """
    calls = model.compiled_calls() if isinstance(model, NamesCompiledCalls) else {}
    if name in calls:
        return calls[name]
    module: Optional[nn.Module] = model
    for child_name in name.split('.'):
        module = None if module is None else module._modules.get(child_name)
    if not isinstance(module, nn.Module):
        children = [child for child, value in model.named_children() if value is not None]
        raise CompileError(
            f'compile=dict({name}=...): {type(model).__name__} has no module {name!r}. It has '
            f'{", ".join(children)}, and modules in these, as "backbone.layers"; arguments of '
            f'torch.compile are {", ".join(sorted(_OPTIONS))}.'
        )
    # A list of modules is never called; its members are.
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return [
        (member, method)
        for member in (module.children() if is_list else [module])
        for method in (
            member.compiled_methods if isinstance(member, NamesCompiledMethods) else ('forward',)
        )
    ]


class _CompiledMethod(functools.partial):
    """A compiled method, which a second call must not compile again."""


def _replace(module: nn.Module, method: str, options: Mapping[str, Any]) -> None:
    """Override a module's method by a compiled one.

    ``module.compile()`` would not help, because MMSegmentation's heads call their ``forward``
    directly. The function of the class is compiled, with the module as its first argument. So a
    deep copy of the module, for a moving average, computes with the weights of the copy, and blocks
    of one class share the compiled code.
    """
    assert _compile is not None
    override = vars(module).get(method)
    if isinstance(override, _CompiledMethod):
        # The second call of train() finds the method compiled.
        return
    if override is None:
        compiled = _CompiledMethod(_compile(getattr(type(module), method), **options), module)
    else:
        # The module has an override already, such as activation checkpointing.
        compiled = _CompiledMethod(_compile(override, **options))
    setattr(module, method, compiled)
