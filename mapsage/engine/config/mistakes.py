"""Typos in a config: errors and warnings that name the setting and the nearest valid name.

MMEngine builds every part of a run from ``dict(type=..., ...)``. A typo there becomes a KeyError or
TypeError of the registry, deep in a traceback. :func:`explain_config_error` replaces it by a
sentence if the error can only come from the config; errors of a user's own code keep their
traceback.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from types import FrameType
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Set

from mmengine.dist import is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook as HostCheckpointHook
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.registry import OPTIMIZERS, Registry, build_from_cfg
from mmengine.runner import Runner

from mapsage.engine.checkpoints.checkpoint_hook import CheckpointHook
from mapsage.engine.env_cfg import ConfigError
from mapsage.host.runner import OptimWrappers, built_wrappers, score_names
from mapsage_launcher.extras import missing_extra, names_of_missing_extras

# Keys that the programs of MapSage and MMEngine read. The Runner's own keys are its arguments.
_OTHER_KEYS = (
    'auto_scale_lr',
    'compile',
    'custom_imports',
    'default_scope',
    'feature_source',
    'find_unused_parameters',
    'model_wrapper_cfg',
    'runner_type',
    'sync_bn',
    'tta_model',
    'tta_pipeline',
    'work_dir',
)

# A training, a validation and a test each need all three.
_TOGETHER = {
    'training': ('train_dataloader', 'train_cfg', 'optim_wrapper'),
    'validation': ('val_dataloader', 'val_cfg', 'val_evaluator'),
    'test': ('test_dataloader', 'test_cfg', 'test_evaluator'),
}

# Registered names of version 0.5 that are gone -> what to use instead.
_REMOVED = dict(
    CompileReportHook='take it out of custom_hooks, and set TORCH_LOGS=graph_breaks,recompiles to see '
    'what torch.compile does.',
    SegLovaszLoss="use MMSegmentation's dict(type='LovaszLoss', reduction='none'), or JaccardLoss.",
    SegTverskyLoss="use MMSegmentation's TverskyLoss(alpha=0.3, beta=0.7), or SegDiceLoss.",
)

# The package that a visualization backend of MMEngine imports when it starts.
_TRACKERS = dict(
    AimVisBackend='aim',
    ClearMLVisBackend='clearml',
    DVCLiveVisBackend='dvclive',
    MLflowVisBackend='mlflow',
    NeptuneVisBackend='neptune',
    TensorboardVisBackend='tensorboard',
    WandbVisBackend='wandb',
)


def look_up(cfg: Mapping[str, Any], setting: str) -> Any:
    """Return the value of a dotted setting; None if a part of the path is missing or built."""
    first, *keys = setting.split('.')
    # MMEngine's Config has `get`, and is no Mapping.
    value: Any = cfg.get(first)
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Check that a training, a validation and a test have all of their keys, or none of them.

    Raises:
        ConfigError: If only some are there. MMEngine prints the whole config instead. Also if the
            config has a setting of an extra that is not installed.
    """
    for name in names_of_missing_extras():
        if look_up(cfg, name):
            raise ConfigError(missing_extra('names', name))
    for task, keys in _TOGETHER.items():
        missing = [key for key in keys if cfg.get(key) is None]
        if 0 < len(missing) < len(keys):
            present = ' and '.join(key for key in keys if key not in missing)
            typos = [
                f'the key {key!r}, which nobody reads; did you mean {known!r}?'
                for key, known in misspelt_keys(cfg).items()
                if known in missing
            ]
            raise ConfigError(
                f'the config has {present}, and no {" and no ".join(missing)}: a {task} needs all '
                f'three. '
                + (
                    f'It has {" ".join(typos)}'
                    if typos
                    else f'Set {" and ".join(missing)}, or leave all three out.'
                )
            )


def misspelt_keys(cfg: Mapping[str, Any]) -> Dict[str, str]:
    """Return the top-level keys of a config that look like a typo, with the key that is meant.

    A config may have variables of any name at its top level. Only a name that differs from a known
    key by a letter or two counts.
    """
    known = {*inspect.signature(Runner.__init__).parameters, *_OTHER_KEYS} - {'self', 'cfg'}
    typos = {}
    for key in cfg:
        if key in known or len(key) < 5:
            continue
        most = 2 if len(key) >= 8 else 1
        near = [name for name in known if abs(len(name) - len(key)) <= most]
        distance, nearest = min(((_edits(key, name), name) for name in near), default=(3, ''))
        if distance <= most:
            typos[key] = nearest
    return typos


def misspelling_note(cfg: Mapping[str, Any]) -> Optional[str]:
    """Return a warning about the top-level keys that look like a typo, or None."""
    typos = misspelt_keys(cfg)
    return (
        '; '.join(
            f'nobody reads the key {key!r} of the config, did you mean {known!r}?'
            for key, known in typos.items()
        )
        if typos
        else None
    )


def missing_trackers(visualizer: object, packages: Optional[Collection[str]] = None) -> List[str]:
    """Return a sentence for each ``vis_backends`` entry whose package is not installed.

    Args:
        visualizer: Config of the visualizer, or None.
        packages: Names of packages that count as missing; None to look for them.
    """
    backends = (visualizer.get('vis_backends') if isinstance(visualizer, Mapping) else None) or []
    kinds = [
        backend.get('type')
        for backend in (backends if isinstance(backends, (list, tuple)) else [backends])
        if isinstance(backend, Mapping)
    ]
    needed = {
        kind: _TRACKERS[kind] for kind in kinds if isinstance(kind, str) and kind in _TRACKERS
    }
    return [
        f'visualizer.vis_backends: {kind} needs the package {package}, which is not installed. '
        f'pip install {package}, or take {kind} out of vis_backends.'
        for kind, package in needed.items()
        if (
            package not in sys.modules and importlib.util.find_spec(package) is None
            if packages is None
            else package in packages
        )
    ]


def check_trackers(visualizer: object) -> None:
    """Check on the main process, the only one that writes, that the trackers are installed.

    Args:
        visualizer: Config of the visualizer, or None.

    Raises:
        ConfigError: If the package of a ``vis_backends`` entry is missing.
    """
    missing = missing_trackers(visualizer) if is_main_process() else []
    if missing:
        raise ConfigError(' '.join(missing))


def optimizer_mistake(config: object) -> Optional[str]:
    """Return what is wrong with the optimizer of an ``optim_wrapper``, or None.

    MMEngine's constructor of optimizers continues with None if the registry has no such name, and
    fails later.
    """
    if not isinstance(config, Mapping):
        return None
    if 'optimizer' not in config:
        if 'constructor' in config or 'type' not in config:
            return None
        return f"optim_wrapper has no 'optimizer', but {sorted(config)}." + did_you_mean(
            'optimizer', [], typos=config
        )
    optimizer = config['optimizer']
    if not isinstance(optimizer, Mapping):
        return None
    if 'type' not in optimizer:
        return (
            f'optim_wrapper.optimizer={dict(optimizer)} has no type; expected the name of an '
            f"optimizer, as in dict(type='AdamW', lr=1e-3)."
        )
    kind = optimizer['type']
    with OPTIMIZERS.switch_scope_and_registry(None) as registry:
        if not isinstance(kind, str) or registry.get(kind) is not None:
            return None
        return f'optim_wrapper.optimizer.type={kind!r} is no known optimizer.' + did_you_mean(
            kind, _names(registry)
        )


def check_clipping(optim_wrapper: OptimWrappers) -> None:
    """Check the arguments of ``clip_grad``, which MMEngine does not use before the first step.

    Args:
        optim_wrapper: Built optimizers.

    Raises:
        ConfigError: If the function that clips does not take one of the arguments.
    """
    for wrapper in built_wrappers(optim_wrapper):
        settings = wrapper.clip_grad_kwargs
        if not type(wrapper)._clip_grad.__module__.startswith(('mmengine.', 'mapsage.')):
            # A user's own way to clip may take other arguments.
            continue
        mistake = settings and unknown_arguments(
            wrapper.clip_func, settings, 'optim_wrapper.clip_grad'
        )
        if mistake:
            raise ConfigError(mistake)


def saving_mistake(hooks: Iterable[Hook]) -> Optional[ConfigError]:
    """Return the error of a ``CheckpointHook`` with an unknown setting, or None.

    The hook takes any setting, and passes unknown ones to ``Runner.save_checkpoint``, which fails.
    """
    for hook in hooks:
        # A user's subclass may read further settings itself.
        if type(hook) in (CheckpointHook, HostCheckpointHook):
            allowed = {*inspect.signature(Runner.save_checkpoint).parameters}
            wrong = next((name for name in hook.args if name not in allowed), None)
            if wrong is not None:
                return ConfigError(_unknown(type(hook), wrong, _accepted(type(hook)), ''))
    return None


def monitored_mistake(hooks: Iterable[Hook], metrics: Iterable[BaseMetric]) -> Optional[str]:
    """Return a sentence about a hook that waits for a score that no metric gives, or None.

    MMEngine finds out after the first validation, which may be hours later. The score of a user's
    metric has a name that only an evaluation tells; with one, only a misspelt name is a mistake.

    Args:
        hooks: Hooks of the run.
        metrics: Metrics of the validation.
    """
    names = [score_names(metric) for metric in metrics]
    known = list(dict.fromkeys(name for group in names for name in group or ()))
    for hook in hooks:
        if isinstance(hook, HostCheckpointHook):
            setting, wanted = 'default_hooks.checkpoint.save_best', hook.save_best
        elif isinstance(hook, EarlyStoppingHook):
            setting, wanted = 'EarlyStoppingHook.monitor', hook.monitor
        else:
            continue
        for name in [wanted] if isinstance(wanted, str) else wanted or ():
            if name in known or name == 'auto':
                continue
            same = next((score for score in known if score.lower() == name.lower()), '')
            hint = f' Did you mean {same!r}?' if same else did_you_mean(name, known)
            if hint or None not in names:
                return (
                    f'{setting}={name!r}: no metric of val_evaluator gives this score.{hint} '
                    f'Expected one of {", ".join(known) or "no score"}.'
                )
    return None


def unknown_arguments(
    function: Callable[..., Any], names: Iterable[str], setting: str = ''
) -> Optional[str]:
    """Return a sentence about the first argument that a function does not take, or None.

    Args:
        function: Class or function. One with ``**kwargs`` takes any argument.
        names: Names of arguments.
        setting: Name of the setting in the config, for the sentence.
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    wrong = next((name for name in names if name not in parameters), None)
    return None if wrong is None else _unknown(function, wrong, parameters, setting)


def explain_config_error(error: Exception) -> Exception:
    """Return a :class:`ConfigError` that names the setting, or ``error`` if it is not a typo.

    Typos are a type that no registry knows, and an argument that neither a class nor the base class
    to which it passes its arguments takes. An error within a class is not a typo.
    """
    if not isinstance(error, (KeyError, TypeError)) or error.__traceback__ is None:
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    build = next(
        (frame for frame in reversed(frames) if frame.f_code is build_from_cfg.__code__), None
    )
    if build is None:
        return error
    text = None
    if isinstance(error, TypeError):
        text = _argument_mistake(str(error), build)
    elif build is frames[-1]:
        text = _type_mistake(build)
    if text is None:
        return error
    explained = ConfigError(text)
    explained.__cause__ = error
    return explained


def did_you_mean(name: str, known: Iterable[str], typos: Iterable[str] = ()) -> str:
    """Return ' Did you mean ...?', or '' where nothing is close.

    Args:
        name: Name that was written, or with ``typos`` the name that was meant.
        known: Names that would work.
        typos: Names that were written, of which one close to ``name`` is a typo of it.
    """
    distance, nearest = min(
        [(_edits(name, candidate), candidate) for candidate in known]
        + [(_edits(name, typo), name) for typo in typos],
        default=(0, name),
    )
    return f' Did you mean {nearest!r}?' if 0 < distance <= max(1, len(name) // 3) else ''


def _edits(left: str, right: str) -> int:
    """Return how many letters are inserted, left out, replaced, or swapped with the next one.

    This is the Damerau-Levenshtein distance without edits inside a swapped pair.
    """
    rows = [list(range(len(right) + 1))]
    for i, left_letter in enumerate(left, 1):
        row = [i]
        for j, right_letter in enumerate(right, 1):
            edits = [
                rows[-1][j] + 1,
                row[j - 1] + 1,
                rows[-1][j - 1] + (left_letter != right_letter),
            ]
            if i > 1 and j > 1 and left_letter == right[j - 2] and left[i - 2] == right_letter:
                edits.append(rows[-2][j - 2] + 1)
            row.append(min(edits))
        rows.append(row)
    return rows[-1][-1]


def _type_mistake(build: FrameType) -> Optional[str]:
    registry, kind = build.f_locals['registry'], build.f_locals.get('obj_type')
    # build_from_cfg reads the arguments after it has checked that there is a type.
    if 'args' not in build.f_locals:
        return (
            f'{dict(build.f_locals["cfg"])} has no type, which a {registry.name} needs; '
            f"expected dict(type='NAME', ...)."
        )
    if not isinstance(kind, str) or build.f_locals.get('obj_cls') is not None:
        return None
    if kind in _REMOVED:
        return f'type={kind!r} is gone: {_REMOVED[kind]}'
    missing = missing_extra('names', kind)
    if missing is not None:
        return f'type={kind!r}: {missing}'
    return (
        f'type={kind!r} is no known {registry.name}.'
        + did_you_mean(kind, _names(registry))
        + ' List the module of your own class in custom_imports of the config.'
    )


def _argument_mistake(message: str, build: FrameType) -> Optional[str]:
    kind, arguments = build.f_locals.get('obj_cls'), build.f_locals.get('args') or {}
    match = re.search(r"got an unexpected keyword argument '(\w+)'", message)
    if kind is None or match is None or match.group(1) not in arguments:
        return None
    accepted = _accepted(kind)
    # If the class takes the argument, the mistake is inside the class and not in the config.
    if match.group(1) in accepted:
        return None
    return _unknown(kind, match.group(1), accepted, '')


def _unknown(function: Callable[..., Any], name: str, known: Iterable[str], setting: str) -> str:
    owner = getattr(function, '__name__', repr(function))
    known = sorted(set(known) - {'self', 'args', 'kwargs'})
    return f'{setting}{": " if setting else ""}{owner} has no setting {name!r}.' + (
        did_you_mean(name, known) or f' It has {", ".join(known)}.'
    )


def _accepted(kind: Callable[..., Any]) -> Set[str]:
    """Return the names of arguments that a function or class takes.

    A class with ``**kwargs`` also takes the arguments of the next class in its method resolution
    order, and of its ``settings_class``.
    """
    functions = (
        [base.__dict__['__init__'] for base in kind.__mro__[:-1] if '__init__' in base.__dict__]
        if inspect.isclass(kind)
        else [kind]
    )
    settings = getattr(kind, 'settings_class', None)
    names: Set[str] = set() if settings is None else {*inspect.signature(settings).parameters}
    for function in functions:
        parameters = inspect.signature(function).parameters
        names.update(parameters)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def _names(registry: Registry) -> Iterator[str]:
    """Yield the names of a registry, of its parents and of their children."""
    while registry.parent is not None:
        registry = registry.parent
    registries = [registry]
    while registries:
        registry = registries.pop()
        yield from registry.module_dict
        registries += registry.children.values()
