"""Run a config under MMEngine's Runner and under MapSageRunner, and compare how the runs end."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pickle
import re
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, DefaultScope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from tiny_host import changed, placed, tiny_host_config
from users_parts import RecordHook

from mapsage.engine import MapSageRunner

RUNNERS = {'stock': Runner, 'ours': MapSageRunner}
# What MapSage writes next to MMEngine's files; docs/reference/conformance.md says why.
OUR_FILES = ('preview.png', 'report.html', 'run.json')
OUR_CHECKPOINT_KEYS = ('gradients', 'accumulative_counts')
OUR_META_KEYS = ('data', 'reproducibility', 'validations', 'virtual_ranks')
# Figures that a clock or the process decides, and the lines that name them.
_MEASURED = ('time', 'data_time', 'eta', 'memory')
_ITERATION = re.compile(r'(?:Iter|Epoch)\((?:train|val|test)\).*')
_MEASURED_IN_LINE = re.compile(r'\b(eta|time|data_time|memory): \S+(?: \d+:\d+:\d+)?|, \d+:\d+:\d+')
_run_numbers = itertools.count()


class Bfloat16Autocast(OptimWrapper):
    """What MMEngine's AmpOptimWrapper does with bfloat16; that itself refuses to run on a CPU."""

    def __init__(self, dtype: str = 'bfloat16', loss_scale: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert dtype == 'bfloat16'

    @contextlib.contextmanager
    def optim_context(self, model: Any) -> Iterator[None]:
        with super().optim_context(model), torch.autocast(get_device(), dtype=torch.bfloat16):
            yield

    def state_dict(self) -> Dict[str, Any]:
        return dict(super().state_dict(), loss_scaler={})  # bfloat16 needs no scaler


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        error: Type and message of its exception, without folders; empty if there was none.
        results: What the methods returned; None for a model.
        calls: Calls of hooks, with digests of what came with them.
        hooks: Hooks of the runner in their order, without MapSage's own.
        files: Contents of the files by their names, both without times and folders.
        weights: State of the model and the optimizer at the end.
    """

    error: str = ''
    results: List[Any] = field(default_factory=list)
    calls: List[Any] = field(default_factory=list)
    hooks: List[List[str]] = field(default_factory=list)
    files: Dict[str, Any] = field(default_factory=dict)
    weights: Dict[str, Any] = field(default_factory=dict)


Stage = Tuple[Dict[str, Any], str]


def run(
    sides: str,
    changes: Dict[str, Any],
    stages: Sequence[Stage],
    data: Path,
    folder: Path,
    preview: bool = False,
) -> Ending:
    """Build Runners of the tiny config one after the other in one work_dir, and call them.

    Args:
        sides: ``'stock'`` or ``'ours'``, or one for each stage, separated by commas.
        changes: Changes to the tiny config; see :func:`tiny_host.changed`.
        stages: For each Runner its own changes, and its methods to call: ``'train test'``.
        data: Folder of the images.
        folder: Folder in which ``run`` becomes the work_dir.
        preview: Whether MapSage draws its preview.
    """
    work_dir = folder / 'run'
    configs = [
        (
            placed(changed(tiny_host_config(), {**changes, **more}), data=data, work_dir=work_dir),
            methods,
        )
        for more, methods in stages
    ]
    return run_configs(sides, configs, folder, preview)


def run_configs(
    sides: str, configs: Sequence[Tuple[Dict[str, Any], str]], folder: Path, preview: bool = False
) -> Ending:
    """Build Runners of configs one after the other in one work_dir, and call them.

    Args:
        sides: As of :func:`run`.
        configs: For each Runner its config, and its methods to call.
        folder: As of :func:`run`.
        preview: As of :func:`run`.
    """
    ending = Ending()
    work_dir = folder / 'run'
    RecordHook.calls = ending.calls
    for (config, methods), side in zip(configs, itertools.cycle(sides.split(','))):
        config = dict(
            config, work_dir=str(work_dir), experiment_name=f'conformance_{next(_run_numbers)}'
        )
        with _clean_process(), _as_in(side):
            try:
                runner = RUNNERS[side].from_cfg(Config(config, format_python_code=False))
                if not preview:
                    runner._hooks = [
                        hook for hook in runner._hooks if type(hook).__name__ != 'PreviewHook'
                    ]
                ending.hooks.append(
                    [
                        type(hook).__name__
                        for hook in runner.hooks
                        if not type(hook).__module__.startswith('mapsage.')
                    ]
                )
                for method in methods.split():
                    result = getattr(runner, method)()
                    ending.results.append(None if isinstance(result, torch.nn.Module) else result)
                ending.weights = dict(
                    model=runner.model.state_dict(), optimizer=_state(runner.optim_wrapper)
                )
            except Exception as error:
                ending.error = _without_folder(f'{type(error).__name__}: {error}', folder)
                break
    _read_files(ending, folder)
    return ending


def _state(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, 'state_dict') else None


@contextlib.contextmanager
def _clean_process() -> Iterator[None]:
    """Leave no named instance, log file or visualizer of a run to the next one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        for logger in MMLogger._instance_dict.values():
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                handler.close()
        for visualizer in Visualizer._instance_dict.values():
            visualizer.close()
        for kind in (MMLogger, MessageHub, Visualizer, DefaultScope):
            kind._instance_dict.clear()
        logging.getLogger('mmengine').handlers.clear()


@contextlib.contextmanager
def _as_in(side: str) -> Iterator[None]:
    """Give Runner the optimizer wrappers that MMEngine has without MapSage."""
    names = OPTIM_WRAPPERS.module_dict
    ours = {name: names[name] for name in ('OptimWrapper', 'AmpOptimWrapper')}
    try:
        if side == 'stock':
            names.update(OptimWrapper=OptimWrapper, AmpOptimWrapper=Bfloat16Autocast)
        yield
    finally:
        names.update(ours)


def _without_folder(text: str, folder: Path) -> str:
    """Return a text without what is different in every run: folder, name, time, address, digest."""
    for pattern, name in (
        (re.escape(str(folder)), 'FOLDER'),
        (r'conformance_\d+', 'NAME'),
        (r'\d{8}_\d{6}', 'TIME'),
        (r'[0-9a-f]{40}$', 'COMMIT'),
        (r'0x[0-9a-f]+', 'ADDRESS'),
        (r'-[0-9a-f]{8}(?=\.pth)', '-DIGEST'),
    ):
        text = re.sub(pattern, name, text)
    return text


def _read_files(ending: Ending, folder: Path) -> None:
    for path in sorted(path for path in folder.rglob('*') if path.is_file()):
        name = re.sub(
            r'events\.out.*', 'events', _without_folder(str(path.relative_to(folder)), folder)
        )
        if path.name in OUR_FILES:
            continue
        content = _read(path, folder)
        if path.suffix in ('.json', '.log'):
            # Two Runners of one second share a log: what they write belongs together.
            content = ending.files.get(name, []) + content
        ending.files[name] = content


def _read(path: Path, folder: Path) -> Any:
    """Return what of a file's content must be equal; None where it is times only."""
    if path.suffix == '.json':
        return [
            {name: value for name, value in json.loads(line).items() if name not in _MEASURED}
            for line in path.read_text().splitlines()
        ]
    if path.suffix == '.log':
        return [_MEASURED_IN_LINE.sub('', line) for line in _ITERATION.findall(path.read_text())]
    if path.suffix == '.pth':
        checkpoint = torch.load(str(path), **_ANY_OBJECT)
        for key in OUR_META_KEYS:
            checkpoint.get('meta', {}).pop(key, None)
        return _comparable(
            {key: part for key, part in checkpoint.items() if key not in OUR_CHECKPOINT_KEYS},
            folder,
        )
    if path.suffix == '.pkl':
        return _comparable(pickle.loads(path.read_bytes()), folder)
    if path.suffix == '.py' or path.name == 'last_checkpoint':
        return _without_folder(path.read_text(), folder)
    return None if path.suffix == '.trace' or 'events' in path.name else path.read_bytes()


# Weights alone are the default of torch.load from 2.6 on; 1.10 does not know the argument.
_ANY_OBJECT = {} if torch.__version__.startswith('1.') else {'weights_only': False}


def _comparable(value: Any, folder: Path) -> Any:
    """Return a checkpoint without times, folders and names that differ by the run."""
    if isinstance(value, HistoryBuffer):
        return value._log_history, value._count_history
    if isinstance(value, dict):
        return {
            key: _comparable(each, folder)
            for key, each in value.items()
            if str(key).rsplit('/', 1)[-1] not in _MEASURED
        }
    if isinstance(value, (list, tuple)):
        return [_comparable(each, folder) for each in value]
    return _without_folder(value, folder) if isinstance(value, str) else value


def differences(stock: Any, ours: Any, place: str = '') -> List[str]:
    """Return where two results differ: the place and both values, bit for bit.

    Args:
        stock: Result under Runner.
        ours: Result under MapSageRunner.
        place: Name of the results.
    """
    if isinstance(stock, Ending):
        return [
            line
            for name in stock.__dataclass_fields__
            for line in differences(getattr(stock, name), getattr(ours, name), name)
        ]
    if isinstance(stock, dict) and isinstance(ours, dict):
        lines = [
            f'{place}: {side} has {sorted(map(str, mine))}'
            for side, mine in (
                ('only stock', set(stock) - set(ours)),
                ('only ours', set(ours) - set(stock)),
            )
            if mine
        ]
        return lines + [
            line
            for key in stock
            if key in ours
            for line in differences(stock[key], ours[key], f'{place}[{key!r}]')
        ]
    if isinstance(stock, (list, tuple)) and isinstance(ours, (list, tuple)):
        lines = [
            line
            for index, (one, other) in enumerate(zip(stock, ours))
            for line in differences(one, other, f'{place}[{index}]')
        ]
        if len(stock) != len(ours):
            lines.append(
                f'{place}: {len(stock)} and {len(ours)} entries, the rest is '
                f'{str(stock[len(ours) :] or ours[len(stock) :])[:300]}'
            )
        return lines
    return (
        []
        if _bits(stock) == _bits(ours)
        else [f'{place}: {str(stock)[:200]} under Runner, {str(ours)[:200]} under MapSageRunner']
    )


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float() if value.dtype == torch.bfloat16 else value.cpu()
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack('d', value)
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value).__name__, value
    return repr(type(value)), {key: _bits(each) for key, each in vars(value).items()} if hasattr(
        value, '__dict__'
    ) else repr(value)
