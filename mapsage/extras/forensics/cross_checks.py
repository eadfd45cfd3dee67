"""``env_cfg.cross_check``: another rank computes gradients again, see `cross_check_hook.py`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List

from mmengine.model import BaseModel

from mapsage.distributed.wrappers import MMDistributedDataParallel, VirtualDataParallel
from mapsage.engine.compiled_parts import compiled_parts
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.host.runner import plain_model

from .cross_check_hook import CrossCheckHook


class CrossChecks(RunExtension):
    """``env_cfg.cross_check``: another rank computes gradients again, see CrossCheckHook."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        interval = run.env.cross_check_interval
        return [] if interval is None else [dict(type=CrossCheckHook, interval=interval)]

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        obstacle = '' if run.env.cross_check_interval is None else cross_check_obstacle(run)
        if obstacle:
            raise ConfigError(f'env_cfg.cross_check with {obstacle}. Remove one of them.')
        yield


def cross_check_obstacle(run: EngineRun) -> str:
    """Return why another rank cannot compute a step of a run again; '' if it can."""
    model, wrapper = plain_model(run), type(run.model).__name__
    kind: Any = type(model)
    setting = run.cfg.get('compile')
    # A feature or a hook that changes the step declares why another rank cannot repeat it.
    declared = ''.join(extension.cross_check_obstacle(run.cfg) for extension in run.extensions)
    for applies, reason in (
        (
            run.accelerator.lazy,
            f'the lazy device {run.accelerator.name}, which compiles a step and its repetition as '
            f'different graphs, and rounds them differently',
        ),
        (declared, declared),
        (
            not isinstance(model, BaseModel),
            f'the model {kind.__name__}: expected a BaseModel of MMEngine',
        ),
        (
            run.model is not model
            and not isinstance(run.model, (MMDistributedDataParallel, VirtualDataParallel)),
            f'the model wrapper {wrapper}: expected MMDistributedDataParallel, or none',
        ),
        (
            run.model is model and kind.train_step is not BaseModel.train_step,
            f'the model {kind.__name__}, which has a train_step of its own',
        ),
        (run.computes_sync_bn and run.distributed, 'SyncBN layers, in which every rank takes part'),
        (
            setting and not compiled_parts(setting),
            'compile, which compiles the whole step: compile=dict(backbone=True) compiles parts of '
            'it, and',
        ),
    ):
        if applies:
            return reason
    return next(filter(None, (getattr(hook, 'cross_check_obstacle', '') for hook in run.hooks)), '')
