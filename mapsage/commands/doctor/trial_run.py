"""Build everything that a training builds, to find out before the training what fails there.

The run of the config is built with a temporary work dir, without trackers and without weights.
Parts that need the data are not built; their arguments are compared with the signatures instead.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook
from mmengine.registry import DATA_SAMPLERS, LOOPS, MODELS, Registry

from mapsage.commands import cli
from mapsage.distributed import error_text
from mapsage.engine.config import (
    explain_config_error,
    monitored_mistake,
    unknown_arguments,
)
from mapsage.engine.runner import MapSageRunner

_builds = itertools.count()
RUN_IS_BUILT = 'it can be built: logger, hooks, the model on its device, the optimizer'


def run_obstacle(cfg: Config) -> Optional[str]:
    """Return the reason why the run of a config cannot be built on this rank, or None.

    Logger, hooks, the model on its device and in its wrapper, and the optimizer are the same as in
    the run. Its work dir is temporary, nothing is drawn or sent to a tracking server, and no
    weights are loaded. With encoder ranks, the head is built as if features were computed locally.
    Collective under a launcher.
    """
    cfg = copy.deepcopy(cfg)
    # MMEngine caches loggers and visualizers by the name of their run, so every build needs a new
    # name.
    cfg.update(
        resume=False,
        load_from=None,
        log_level='ERROR',
        experiment_name=f'doctor-{next(_builds)}',
        visualizer=dict(type='Visualizer', vis_backends=None),
    )
    if (cfg.get('feature_source') or {}).get('type') == 'Streamed':
        cfg.pop('feature_source')
    with tempfile.TemporaryDirectory(prefix='mapsage-doctor-') as folder, warnings.catch_warnings():
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        cfg.work_dir = folder
        try:
            runner: Any = cli.build_runner(cfg)
            metrics = _build_lazy_parts(runner, cfg)
            runner.refuse_training()
            return next(_unknown_arguments(runner, cfg), None) or monitored_mistake(
                runner.hooks, metrics
            )
        # A class that the user names may raise anything; it becomes the report.
        except Exception as error:
            return error_text(explain_config_error(error))


def _build_lazy_parts(runner: MapSageRunner, cfg: Config) -> List[BaseMetric]:
    """Build what a training builds when it starts, except for parts that need the data.

    Returns:
        Metrics of the validation.
    """
    if runner.optim_wrapper is None:
        return []
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    schedulers = cfg.get('param_scheduler')
    if isinstance(schedulers, (dict, list)) and not any(
        scheduler.get('convert_to_iter_based') for scheduler in _dicts(schedulers)
    ):
        runner.build_param_scheduler(copy.deepcopy(schedulers))
    if not cfg.get('val_evaluator'):
        return []
    return list(runner.build_evaluator(copy.deepcopy(cfg.val_evaluator)).metrics)


def _dicts(configs: object) -> List[Mapping[str, Any]]:
    return [
        config
        for config in (configs if isinstance(configs, list) else [configs])
        if isinstance(config, Mapping)
    ]


def _unknown_arguments(runner: MapSageRunner, cfg: Config) -> Iterator[str]:
    """Yield a message for each unknown argument of a loop, a sampler or an averaged model.

    These are built with the data or on the device, so only their signatures are read here.
    """
    configs: List[Tuple[Registry, Any]] = [
        (LOOPS, cfg.get(f'{name}_cfg')) for name in ('train', 'val', 'test')
    ]
    configs += [
        (DATA_SAMPLERS, (cfg.get(f'{name}_dataloader') or {}).get('sampler'))
        for name in ('train', 'val')
    ]
    configs += [
        (MODELS, getattr(hook, 'ema_cfg', None))
        for hook in runner.hooks
        if isinstance(hook, EMAHook)
    ]
    for registry, config in configs:
        kind = config.get('type') if isinstance(config, Mapping) else None
        with registry.switch_scope_and_registry(None) as scoped:
            kind = scoped.get(kind) if isinstance(kind, str) else kind
        if callable(kind):
            mistake = unknown_arguments(kind, set(config) - {'type', '_scope_'})
            if mistake is not None:
                yield mistake
