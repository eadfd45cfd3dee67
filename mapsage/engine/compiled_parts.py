"""The parts of a model that ``compile=dict(backbone=True)`` names, each compiled on its own.

MMEngine's ``compile=True`` gives the whole ``train_step`` to ``torch.compile``, with preprocessor,
loss, log and optimizer, and a graph break at every value that Python reads. Backbone and head are
where the time goes, and they are tensors alone.
"""
from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch
from mmengine.model import is_model_wrapper
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.errors import UserError
from mapsage.hooks import CompileReportHook

from .run_extension import EngineRun

_compile = getattr(torch, 'compile', None)  # since torch 2.0
# Those of torch 2.0 are known as such where torch is older.
_OPTIONS = {'fullgraph', 'dynamic', 'backend', 'mode', 'options', 'disable'} | (
    set() if _compile is None else set(inspect.signature(_compile).parameters) - {'model'})
_MARK = 'compiled_by_mapsage'


class CompileError(UserError, ValueError):
    """The config's ``compile`` cannot be carried out."""


def compiled_parts(setting: Any) -> List[str]:
    """Return the names of modules that a config's ``compile`` has; none if it is MMEngine's own.

    Args:
        setting: Value of ``compile``: MMEngine's bool or dict of arguments of ``torch.compile``, or
            a dict that names modules as well.
    """
    return [name for name in setting if name not in _OPTIONS] if isinstance(setting, dict) else []


def check_parts(model: nn.Module, setting: Any, accelerator: Accelerator) -> None:
    """Check that the modules that ``compile`` names can be compiled; changes nothing.

    Args:
        model: Model, wrapped or not.
        setting: Value of ``compile`` in the config.
        accelerator: Accelerator of the run.

    Raises:
        CompileError: If the model has no such module, the value is none, torch is too old, or
            nothing generates code for the accelerator.
    """
    names = compiled_parts(setting)
    if not names:
        return
    model = _inner(model)
    asked = f'compile={dict(setting)!r}'
    for name in names:
        _calls_of(model, name)
        if not isinstance(setting[name], (bool, dict)) or (
                isinstance(setting[name], dict) and set(setting[name]) - _OPTIONS):
            raise CompileError(
                f'{asked}: {name} is {setting[name]!r}, expected True, False, or a dict of '
                f'arguments of torch.compile: {", ".join(sorted(_OPTIONS))}.')
    wanted = [name for name in names if setting[name]]
    if wanted and _compile is None:
        raise CompileError(
            f'{asked}: this is torch {torch.__version__}, and torch.compile came with 2.0. Take '
            f'`compile` out of the config.')
    without = [name for name in wanted
               if 'backend' not in {**_common(setting), **_own(setting, name)}]
    if without and not accelerator.supports.compile:
        raise CompileError(
            f"{asked}: torch.compile's own backend generates no code for {accelerator.name}. Name "
            f"one that does, as in compile=dict(..., backend='...'), or take `compile` out of the "
            f'config.')


def compile_parts(model: nn.Module, setting: Mapping[str, Any]) -> List[str]:
    """Compile the modules that ``compile`` names, in place; return what was compiled, as text.

    Names, parameters and hooks of the modules stay, so that checkpoints do. Nothing is compiled
    before the first call, and nothing at all if that does not come.

    Args:
        model: Model, wrapped or not.
        setting: Value of ``compile`` in the config, which :func:`check_parts` has accepted.
    """
    model, done = _inner(model), []
    for name in compiled_parts(setting):
        if setting[name] is False:
            continue
        calls = _calls_of(model, name)
        for module, method in calls:
            _replace(module, method, {**_common(setting), **_own(setting, name)})
        what = sorted({f'{type(module).__name__}.{method}' for module, method in calls})
        done.append(f"{name} ({', '.join(what)})")
    return done


def compile_model(run: EngineRun, target: str, compile_step: Callable[[str], None]) -> None:
    """Compile what the config's ``compile`` names, and register the hook that reports on it.

    Args:
        run: The run; its model is wrapped.
        target: Method of the model that MMEngine would compile, ``'train_step'``.
        compile_step: MMEngine's way to do so, for a setting that names no modules.
    """
    setting = run.cfg.get('compile')
    if compiled_parts(setting):
        compiled = compile_parts(run.model, setting)
        run.logger.info(f'compile: {", ".join(compiled) or "nothing"}, at the first steps, which '
                        f'will be slow')
    else:
        compile_step(target)
        compiled = [target]
    if compiled and setting not in (None, False):
        run.register_hook(CompileReportHook(', '.join(compiled)))


def _common(setting: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in setting.items() if key in _OPTIONS}


def _own(setting: Mapping[str, Any], name: str) -> Dict[str, Any]:
    return dict(setting[name]) if isinstance(setting[name], dict) else {}


def _inner(model: Any) -> nn.Module:
    return model.module if is_model_wrapper(model) else model


def _calls_of(model: nn.Module, name: str) -> List[Tuple[nn.Module, str]]:
    """Return the methods by which a training runs a module: its forward, unless the model knows.

    Raises:
        CompileError: If there is no such module.
    """
    known = getattr(model, 'compiled_calls', None)
    if known is not None and name in known():
        return known()[name]
    module: Any = model
    for part in name.split('.'):
        module = getattr(module, '_modules', {}).get(part)
    if not isinstance(module, nn.Module):
        children = [child for child, value in model.named_children() if value is not None]
        raise CompileError(
            f'compile=dict({name}=...): {type(model).__name__} has no module {name!r}. It has '
            f'{", ".join(children)}, and modules in these, as "backbone.layers"; arguments of '
            f'torch.compile are {", ".join(sorted(_OPTIONS))}.')
    # A list of modules is not called, its members are.
    lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return [(each, method) for each in (module.children() if lists else [module])
            for method in getattr(each, 'compiled_methods', ('forward', ))]


def _replace(module: nn.Module, method: str, options: Mapping[str, Any]) -> None:
    """Put a compiled method in front of a module's own.

    ``module.compile()`` would not do: MMSegmentation's heads call their ``forward`` directly. The
    function of the class is compiled, with the module as its first argument, so that a deep copy of
    the module, as of a moving average, computes with its own weights, and blocks of one class share
    what was compiled.
    """
    assert _compile is not None
    before = vars(module).get(method)
    if getattr(before, _MARK, False):
        return  # train() was called before
    compiled: Any
    if before is None:
        compiled = functools.partial(_compile(getattr(type(module), method), **options), module)
    else:  # something else stands there already, such as activation checkpointing
        compiled = functools.partial(_compile(before, **options))
    setattr(compiled, _MARK, True)
    setattr(module, method, compiled)
